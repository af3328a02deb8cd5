"""The first steps of a new user: steer a shipped scene by words, fork it, ask about it, and see the films.

Run `python -m worldmodel.demo.first_steps`; it writes films and contact sheets and says where they are.
"""

import argparse
import sys
import time
from importlib.resources import as_file, files
from pathlib import Path

from worldmodel.cli.model import load_model
from worldmodel.cli.rollout import parse_action, play, read_lines
from worldmodel.errors import WorldModelError
from worldmodel.io import staged_files
from worldmodel.media import contact_sheet, write_image
from worldmodel.rollout import Session

FUTURES = ("the white diamond moves up", "the blue box vanishes")
"""Two things that could happen next, tried from the same moment."""
CAPTION = "night background, a large red ball at the left, a small yellow triangle at the right"
QUESTION = "how many things are there"


def main(argv: list[str] | None = None) -> int:
    """Play the first steps and return the exit code: 0, or 2 after a mistake that the user can mend."""
    parser = argparse.ArgumentParser(
        prog="python -m worldmodel.demo.first_steps", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--model", default="shapes-tiny", help="a shipped model or a model folder (%(default)s)"
    )
    parser.add_argument("--out", default="outputs/first-steps", help="where files go (%(default)s)")
    args = parser.parse_args(argv)
    try:
        with staged_files(args.out) as staged:
            written = first_steps(args.model, staged)
    except WorldModelError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print("\nLook at:")
    for name, what in written.items():
        print(f"  {Path(args.out) / name!s:40s} {what}")
    return 0


def first_steps(name: str, folder: Path) -> dict[str, str]:
    """Do everything once, writing into `folder`; returns what each file shows."""
    began = time.perf_counter()
    session = load_model(name).session(seed=0)
    print(f"Loaded {name} in {time.perf_counter() - began:.1f} s.\n\nSteering first_frame.png by words:")
    shipped = files("worldmodel.demo")
    with as_file(shipped / "first_frame.png") as picture, as_file(shipped / "actions.txt") as actions:
        session.reset(picture)
        steps = [parse_action(line) for line in read_lines(actions)]
    began = time.perf_counter()
    play(session, steps)
    seconds = time.perf_counter() - began
    frames = sum(len(clip) for clip in session.clips[1:])
    print(f"{frames} frames in {seconds:.2f} s: {frames / seconds:.0f} frames/s")
    print(f"\nWhat is seen now: {session.describe()}\n{QUESTION}? {session.describe(QUESTION)}")
    print(f"What happened last: {session.infer_action()}")
    for suffix in ("mp4", "gif", "png"):
        session.save(folder / f"rollout.{suffix}")
    fork(session, folder / "futures.png")
    imagine(session, folder / "imagined.png")
    return {
        "rollout.mp4": "the rollout",
        "rollout.gif": "the same, for a page or a chat",
        "rollout.png": "contact sheet, a row per round",
        "futures.png": "two futures of the last scene",
        "imagined.png": "a scene made from its description",
    }


def fork(session: Session, path: Path) -> None:
    """Try two futures from the same moment and put them under each other."""
    print("\nTwo futures of this scene:")
    clips = []
    for text in FUTURES:
        future = session.fork()
        clips.append(future.step(text))
        print(f"  {text}: {future.describe()}")
    write_image(contact_sheet(clips, list(FUTURES)), path)


def imagine(session: Session, path: Path) -> None:
    """Make a scene from its description alone."""
    other = session.model.session(seed=session.seed)
    frames = other.reset(text=CAPTION)
    print(f"\nImagined from {CAPTION!r}; the model sees in it: {other.describe()}")
    write_image(contact_sheet([frames[-1:]], [CAPTION]), path)


if __name__ == "__main__":
    sys.exit(main())
