"""Recordings of a square that two keys move, and their examination."""

from pathlib import Path

import numpy as np

from worldmodel.actions import Action
from worldmodel.config import ActionSpec
from worldmodel.data import examiner
from worldmodel.recording.episode import RecordedEpisode, RecordingFormat
from worldmodel.recording.lerobot import LeRobotStore

SPECS = tuple(ActionSpec(name, "key", low=0, high=1, rate=10) for name in ("left", "right", "jump"))


def moving(
    seed: int, repeat: int = 1, late: int = 0, start: int | None = None, steps: int = 40
) -> RecordedEpisode:
    """A bright square that `left` and `right` move by 4 pixels, `late` steps after; `jump` is never held."""
    rng = np.random.default_rng(seed)
    chosen = np.repeat(rng.integers(0, 2, steps), repeat)[:steps]
    acting = np.concatenate([rng.integers(0, 2, late), chosen])[:steps]
    x, frames = 24 if start is None else start, []
    for side in [*acting, None]:
        frame = np.zeros((64, 64, 3), np.uint8)
        frame[24:40, x : x + 16] = (220, 180, 40)
        frames.append(frame)
        x = x if side is None else int(np.clip(x + (4 if side else -4), 0, 48))
    numbers = np.eye(3, dtype=np.float32)[chosen]
    actions = tuple(Action.of_numbers(SPECS, row) for row in numbers)
    return RecordedEpisode(
        {"render": np.stack(frames)}, actions, numbers, np.zeros(steps, np.float32), truncated=True, seed=seed
    )


def examined(argument: object, most: int = 0) -> examiner.Report:
    return examiner.examine(examiner.open_examined(str(argument)), most).report()


def stored(folder: Path, episodes: list[RecordedEpisode]) -> Path:
    store = LeRobotStore(folder, RecordingFormat(10, SPECS, {}))
    for episode in episodes:
        store.write(episode)
    store.finish()
    return folder
