"""Play a world by text and keys, and save the rollout as video and contact sheet."""

from pathlib import Path

from worldmodel import WorldModel

ROOT = Path(__file__).parents[1]
OUT = Path("outputs/examples")
ACTIONS = ("the red ball moves right", {"keys": ["blue", "jump"]}, None, "the red ball turns green")

session = WorldModel.from_pretrained("shapes-tiny").session(seed=0)
session.reset(ROOT / "demo" / "first_frame.png")
for action in ACTIONS:
    frames = session.step(action).frames
    print(f"{session.actions[-1]!s:40} -> {session.describe()}")
OUT.mkdir(parents=True, exist_ok=True)
print(session.save(OUT / "steer.mp4"), session.save(OUT / "steer.png"))
