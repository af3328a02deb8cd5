"""Whether a world that took missions for actions carries them out: BabyAI's "go to the yellow key".

    python benchmarks/missions.py runs/babyai/model --picture babyai.png

Of every board each object is named in turn, so that a world which ignores the words is right in as many cases
as objects it happens to face. A mission ends with the first frame in which the agent faces an object; what
it faces, and whether all objects are where they were, is read from the pixels. Boards whose agent faces an
object from the start are left out.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from worldmodel.actions import Action
from worldmodel.eval.figures import rate_figure
from worldmodel.eval.runner import ModelSubject
from worldmodel.games.minigrid_judge import DIRECTIONS, MiniGridJudge
from worldmodel.media import Frame, crop_and_resize
from worldmodel.models.world_model import WorldModel

AHEAD = {"right": (0, 1), "down": (1, 0), "left": (0, -1), "up": (-1, 0)}
"""Rows and columns to the cell before an agent that faces this way."""
KINDS = ("key", "ball", "box")
BATCH = 32
assert set(AHEAD) == set(DIRECTIONS)


def objects(cells: np.ndarray) -> dict[tuple[int, ...], str]:
    """Return the names of keys, balls and boxes by their places."""
    names = {place: str(name).removesuffix(" in view") for place, name in np.ndenumerate(cells)}
    return {place: name for place, name in names.items() if name.endswith(KINDS)}


def faced(cells: np.ndarray) -> str:
    """Return the name of the object that the agent faces; nothing if there is none, or no single agent."""
    agents = [
        (place, str(name)) for place, name in np.ndenumerate(cells) if str(name).startswith("agent facing")
    ]
    if len(agents) != 1:
        return ""
    (row, column), name = agents[0]
    down, right = AHEAD[name.split()[2]]
    return objects(cells).get((row + down, column + right), "")


def boards(env_id: str, count: int, seed: int, judge: MiniGridJudge) -> Iterator[tuple[Frame, list[str]]]:
    """Yield first frames and the names of the objects that occur once."""
    import gymnasium
    import minigrid  # noqa: F401 -- it registers the environments

    env = gymnasium.make(env_id, render_mode="rgb_array", disable_env_checker=True)
    while count:
        env.reset(seed=seed)
        seed += 1
        board = env.unwrapped.grid  # type: ignore[attr-defined]
        size = (board.height * judge.cell, board.width * judge.cell)
        frame = crop_and_resize(Image.fromarray(np.asarray(env.render())), size)
        cells = judge.read(frame)
        names = list(objects(cells).values())
        if not faced(cells) and (single := [name for name in names if names.count(name) == 1]):
            yield frame, single
            count -= 1


def carry_out(
    subject: ModelSubject,
    judge: MiniGridJudge,
    cases: list[tuple[Frame, str, Action]],
    rounds: int,
    seed: int,
) -> list[tuple[str, bool]]:
    """Return the name of the object that the agent faces first, and whether all are in place by then."""
    found = []
    for first in range(0, len(cases), BATCH):
        part = cases[first : first + BATCH]
        starts = [objects(judge.read(frame)) for frame, _, _ in part]
        worlds = subject.open(np.stack([frame for frame, _, _ in part]), [seed] * len(part))
        ends: list[tuple[str, bool]] = [("", False)] * len(part)
        for _ in range(rounds):
            for row, clip in enumerate(worlds.step([action for _, _, action in part])):
                cells = judge.read(clip[-1])
                if not ends[row][0] and (name := faced(cells)):
                    ends[row] = name, objects(cells) == starts[row]
        found += ends
    return found


def draw(subject: ModelSubject, frame: Frame, names: list[str], rounds: int, seed: int) -> Image.Image:
    """Draw a board and what follows in every round, a row for each object that is named."""
    worlds = subject.open(np.stack([frame] * len(names)), [seed] * len(names))
    actions = [Action(text=f"go to the {name}") for name in names]
    columns = [np.stack([frame] * len(names))]
    columns += [worlds.step(actions)[:, -1] for _ in range(rounds)]
    padded = np.pad(np.stack(columns, axis=1), [(0, 0), (0, 0), (0, 2), (0, 2), (0, 0)], constant_values=255)
    count, length, height, width, _ = padded.shape
    drawn = padded.swapaxes(1, 2).reshape(count * height, length * width, 3)
    return Image.fromarray(drawn).resize((2 * length * width, 2 * count * height), Image.Resampling.NEAREST)


def main() -> None:
    """Print the shares of missions that are carried out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--env", default="BabyAI-GoToLocalS6N4-v0")
    parser.add_argument("--num-boards", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=10**6, help="of the first board; other than in training")
    parser.add_argument("--picture", type=Path, help="draw the missions of the first board here")
    args = parser.parse_args()
    judge = MiniGridJudge()
    subject = ModelSubject(WorldModel.from_pretrained(args.model))
    found = list(boards(args.env, args.num_boards, args.seed, judge))
    cases = [(frame, name, Action(text=f"go to the {name}")) for frame, names in found for name in names]
    if args.picture:
        draw(subject, *found[0], 8, args.seed).save(args.picture, optimize=True)
    rows = {"the mission": cases, "no words": [(frame, name, Action()) for frame, name, _ in cases]}
    print(f"{args.env}: {len(cases)} missions on {len(found)} boards, within {args.rounds} rounds")
    for label, each in rows.items():
        ends = carry_out(subject, judge, each, args.rounds, args.seed)
        right = [end == name and whole for (_, name, _), (end, whole) in zip(each, ends, strict=True)]
        other = [end not in ("", name) for (_, name, _), (end, _) in zip(each, ends, strict=True)]
        rate = rate_figure(sum(right), len(right))
        print(
            f"{label:12s} carried out {rate['value']:.1%} ({rate['low']:.1%} to {rate['high']:.1%}), "
            f"another object {np.mean(other):.1%}, none {np.mean([not end for end, _ in ends]):.1%}"
        )


if __name__ == "__main__":
    main()
