"""A short tour of a model: steer a scene by text, fork it, ask about it, generate one from a caption.

`worldmodel first-steps` runs it.
"""

import time
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

from worldmodel.actions.words import say
from worldmodel.media import contact_sheet, write_image
from worldmodel.rollout.action_list import read_actions

if TYPE_CHECKING:
    from worldmodel.models.world_model import WorldModel
    from worldmodel.rollout import Session

FUTURES = ("the white diamond moves up", "the blue box vanishes")
"""Two alternative actions, tried from the same state."""
CAPTION = "night background, a large red ball at the left, a small yellow triangle at the right"
QUESTION = "how many things are there"


def first_steps(model: "WorldModel", folder: Path) -> dict[str, str]:
    """Run the tour and write its files to `folder`; returns a description of every file."""
    print("Steering first_frame.png by text:")
    session = model.session(seed=0)
    shipped = files("worldmodel.demo")
    with as_file(shipped / "first_frame.png") as image, as_file(shipped / "actions.txt") as actions:
        session.reset(image)
        steps = read_actions(actions)
    start = time.perf_counter()
    frames = 0
    for action in steps:
        print(f"  {action}")
        frames += len(session.step(action).frames)
    seconds = time.perf_counter() - start
    print(f"{frames} frames in {seconds:.2f} s: {frames / seconds:.0f} frames/s")
    print(f"\nDescription: {session.describe()}\n{QUESTION}? {session.describe(QUESTION)}")
    print(f"Inferred last action: {say(session.infer_action())}")
    for suffix in ("mp4", "gif", "png"):
        session.save(folder / f"rollout.{suffix}")
    fork(session, folder / "futures.png")
    imagine(session, folder / "imagined.png")
    return {
        "rollout.mp4": "the rollout",
        "rollout.gif": "the rollout as a GIF",
        "rollout.png": "contact sheet, one row per round",
        "futures.png": "two futures of the last scene",
        "imagined.png": "a scene generated from a caption",
    }


def fork(session: "Session", path: Path) -> None:
    """Roll out two futures from the same state and write them to one contact sheet."""
    print("\nTwo futures of this scene:")
    clips = []
    for text in FUTURES:
        future = session.fork()
        clips.append(future.step(text).frames)
        print(f"  {text}: {future.describe()}")
    write_image(contact_sheet(clips, list(FUTURES)), path)


def imagine(session: "Session", path: Path) -> None:
    """Generate a scene from a caption."""
    other = session.model.session(seed=session.seed)
    frames = other.reset(text=CAPTION)
    print(f"\nGenerated from {CAPTION!r}; the model describes it as: {other.describe()}")
    write_image(contact_sheet([frames[-1:]], [CAPTION]), path)
