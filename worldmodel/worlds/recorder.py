"""Record clips of the shapes world: `python -m worldmodel.worlds.recorder FOLDER --num-clips N`.

The folder gets one mp4 a clip and a table, clips.csv, that says what was done in it and when: what a user's
own recordings look like, and what `data.sources` of kind `clips` reads.
"""

import csv
import io
import json
from pathlib import Path

import numpy as np

from worldmodel import media
from worldmodel.errors import OutputError
from worldmodel.io import atomic_file
from worldmodel.types import Action
from worldmodel.worlds import shapes
from worldmodel.worlds.shapes.source import ShapesSource

FPS = 8
"""Frames per second of the recordings."""
SECONDS = shapes.FRAMES_PER_CLIP / FPS
"""What one action takes."""


def record(folder: str | Path, num_clips: int, rounds: int = 3, seed: int = 0, split: str = "train") -> Path:
    """Write `num_clips` clips of `rounds` rounds each, and the table that describes them.

    The table has the columns `path`, `text` and `keys`. A clip's actions are JSON: for each its text or keys,
    and the seconds from `start` to `end` in which they lead to what is seen.

    Returns:
        The path of the table.

    Raises:
        OutputError: the folder cannot be written.
    """
    if num_clips < 1 or rounds < 1:
        raise OutputError(f"num_clips is {num_clips} and rounds {rounds}; use 1 or more.")
    source, rows = ShapesSource(split), []
    for index in range(num_clips):
        episode = source.episode("rounds", seed, index, rounds)
        frames = np.concatenate(episode.observations)
        name = f"clip-{index:05d}.mp4"
        media.write_video(frames, Path(folder) / name, FPS)
        rows.append([name, entries(episode.actions, "text"), entries(episode.actions, "keys")])
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows([["path", "text", "keys"], *rows])
    table = Path(folder) / "clips.csv"
    with atomic_file(table) as temporary:
        temporary.write_text(written.getvalue(), encoding="utf-8")
    return table


def entries(actions: tuple[Action, ...], field: str) -> str:
    """Return the actions that have a field as JSON, each from the frame it finds to the last it leads to."""
    values = [(place * SECONDS, getattr(action, field)) for place, action in enumerate(actions)]
    return json.dumps([{"start": at, "end": at + SECONDS, field: value} for at, value in values if value])
