"""Recording of clips of the shapes world (`worldmodel record`).

A recording is one mp4 per clip and a table, clips.csv, with the actions and their times, as a data source of
kind `clips` reads them.
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
"""Duration of one action."""


def record(folder: str | Path, num_clips: int, rounds: int = 3, seed: int = 0, split: str = "train") -> Path:
    """Write `num_clips` clips of `rounds` rounds each, and the table that describes them.

    The table has the columns `path`, `text` and `keys`. The actions of a clip are JSON: the text or keys of
    each, and its interval from `start` to `end` in seconds.

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
    """Return the actions that have a field as JSON, each with its interval in seconds."""
    values = [(index * SECONDS, getattr(action, field)) for index, action in enumerate(actions)]
    return json.dumps(
        [{"start": start, "end": start + SECONDS, field: value} for start, value in values if value]
    )
