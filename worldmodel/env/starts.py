"""Starts of episodes from recordings, at any time of an episode."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from worldmodel.config import WorldModelConfig
from worldmodel.data.argument import read_source
from worldmodel.data.sources import Source, open_source
from worldmodel.errors import InputError
from worldmodel.media import Frames

MAX_UNREADABLE = 0.5
"""Share of unreadable episodes above which a source is given up."""


class RecordedStarts:
    """Frames of recorded episodes at random times, for `start=` of environments.

    A real environment only starts where `reset` puts it. A learned world starts from any picture, so also
    shortly before a rare reward.

    Attributes:
        frames: The starts, uint8 `[n, h, w, 3]`.

    Args:
        data: A data source, as `worldmodel data check` takes it: `lerobot:FOLDER`, a table of clips, or
            `CONFIG:NAME`. Of a split dataset the training part is read.
        config: Config of the model, whose frames the recordings must fit.
        count: Number of frames, each of them read now and kept in memory.
        seed: Seed of their choice.

    Raises:
        InputError: there is no such source, or half of its episodes cannot be read.
        ConfigError: the source does not fit the model.
    """

    def __init__(self, data: str, config: WorldModelConfig, count: int = 2000, seed: int = 0) -> None:
        if count < 1:
            raise InputError(f"count is {count}; use 1 or more frames.")
        sources = read_source(data)
        source = open_source(next(iter(sources.sources)), sources, config)
        try:
            self.frames: Frames = np.stack(list(_read(source, count, seed)))
        finally:
            source.close()

    def __call__(self, rng: np.random.Generator) -> dict[str, Any]:
        """Draw a start, as options of `reset`."""
        return {"observation": self.frames[int(rng.integers(len(self.frames)))]}


def _read(source: Source, count: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the frame before a round at a random time of every episode, in turns, `count` in all."""
    size = source.size or count
    # In the order of the files, which are read piece by piece; an episode's index draws its time.
    chosen = np.arange(count) if source.streams else np.random.default_rng(seed).integers(0, size, count)
    unreadable = 0
    for turn, row in enumerate(np.sort(chosen).tolist()):
        try:
            index = row if source.streams else row + turn * size
            episode = source.at(index).episode("rounds", seed, index, 1)
        except InputError:
            unreadable += 1
            if unreadable > MAX_UNREADABLE * count:
                raise
            continue
        yield episode.observations[0][-1]
