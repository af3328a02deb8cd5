"""Record clips, fine-tune the shipped model for a few steps, and play the result."""

import sys
from pathlib import Path

from worldmodel import WorldModel
from worldmodel.cli import main
from worldmodel.worlds import recorder

ROOT = Path(__file__).parents[1]
OUT = Path("outputs/examples/fine-tune")
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 10

table = recorder.record_world("shapes", OUT / "clips", 12, rounds=2)
code = main(
    [
        "train",
        "own_clips",
        f"data.sources.mine.path={table}",
        f"stages.joint.steps={STEPS}",
        "stages.joint.batch_size=2",
        f"run_dir={OUT / 'run'}",
    ]
)
assert code == 0
session = WorldModel.from_pretrained(OUT / "run" / "model").session(seed=0)
session.reset(ROOT / "demo" / "first_frame.png")
session.step("the red ball moves right")
print(session.save(OUT / "rollout.png"))
