"""The log of a flow as a source of episodes: training reads segments while stages make further ones.

Rows are in the order of the log, shuffled within each segment; after the last, segments come in another
order in every epoch. So the order is a function of the finished log and the seed alone, whether a run read
it while it grew, was resumed, or reads it later.
"""

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from worldmodel.config import DataConfig, WorldModelConfig
from worldmodel.data.clips import BrokenClip, Clip, Part
from worldmodel.data.huggingface import Still
from worldmodel.errors import ConfigError, InputError
from worldmodel.flow.catalog.clips import ClipReader
from worldmodel.flow.errors import FlowError
from worldmodel.flow.log.log import READER, ClipFiles, Log
from worldmodel.media import sniff

ORDER = 7
"""Purpose of the random numbers that order the segments of an epoch."""


class FlowSource:
    """Episodes of a log; see the module.

    Raises:
        ConfigError: there is no log, or its clips do not suit the model.
    """

    size = None
    streams = 1  # read front to back
    still = False
    """Whether the clips are images, as the first one is."""

    def __init__(self, name: str, data: DataConfig, model: WorldModelConfig) -> None:
        self.name, self.key, self.config = name, f"data.sources.{name}", data.sources[name]
        self.timeout_s, self.reader = data.timeout_s, ClipReader(name, self.config, model)
        self.log = Log(self.config.path)
        self.window = self.log.segment_size
        self.begun = -1
        """The newest segment that was begun."""
        self.tasks = self._tasks()

    def at(self, index: int) -> Clip | Still | BrokenClip:
        """Return a row of the endless log; waits for its segment.

        Raises:
            ConfigError: the segment was not sealed in time.
        """
        segment, row = self._place(index)
        if segment > self.begun and int(os.environ.get("RANK", 0)) == 0:
            self.begun = segment
            self.log.storage.write(READER, str(segment).encode())
        return self._recipe(self.log.segment(segment)[row])

    def _recipe(self, found: ClipFiles) -> Clip | Still | BrokenClip:
        try:
            return self._clip(found)
        except InputError as error:
            return BrokenClip(found.id, str(error))

    def sample(self) -> Iterator[Clip | Still | BrokenClip]:
        """Yield all clips that are there now."""
        for number in itertools.count():
            if not self.log.sealed(number):
                return
            yield from map(self._recipe, self.log.segment(number))

    def _clip(self, found: ClipFiles) -> Clip | Still:
        """Return the recipe of a clip; see `data.sources.NAME.columns`."""
        parts = {name: Part(found.file, *part) for name, part in found.parts.items()}
        columns = json.loads(parts.pop("json").read())
        clip = self.reader.clip(found.id, columns, parts)
        if not self.still:
            return clip
        if "video" not in parts:
            raise InputError("it has no image")
        return Still.of(clip, parts["video"])

    def _tasks(self) -> tuple[str, ...]:
        """Return the tasks that clips with the columns of the first one are good for."""
        segment, row = self._place(0)
        first = self.log.segment(segment)[row]
        try:
            self._clip(first)
        except InputError as error:
            raise ConfigError(f"{self.key}: clip {first.id}: {error}.") from None
        reader = next(iter(self.reader.readers.values()))
        if "video" in first.parts:
            offset, size = first.parts["video"]
            beginning = Part(first.file, offset, min(size, sniff.BEGINNING)).read()
            self.still = sniff.detect_format(beginning) in ("png", "jpeg", "webp")
        if self.still and not reader.still_tasks:
            raise ConfigError(
                f"{self.key}: clip {first.id} is an image without text, which no task can use; give the "
                "flow's source texts, or add the stage caption."
            )
        return reader.still_tasks if self.still else reader.tasks

    def _place(self, index: int) -> tuple[int, int]:
        """Return the segment and the row in it of an index."""
        segment, row = divmod(index, self.window)
        try:
            if self.log.wait(segment, self.timeout_s):
                clips = self.log.segment(segment)
                if row < len(clips):
                    return segment, row
                if not self.log.wait(segment + 1, self.timeout_s):
                    return self._later(index)
                raise ConfigError(
                    f"{self.key}: the log was extended after it had ended, and segment {segment} is short; "
                    "run the flow in another `folder`."
                )
        except FlowError as error:
            raise ConfigError(f"{self.key}: {error}") from None
        return self._later(index)

    def _later(self, index: int) -> tuple[int, int]:
        """Return the segment and row of an index after the first epoch."""
        end = self.log.end()
        assert end is not None
        segments, clips = end
        if not clips:
            raise ConfigError(f"{self.key}: the flow has ended without a clip; see `worldmodel flow status`.")
        epoch, row = divmod(index, clips)
        order = np.random.default_rng((epoch, ORDER)).permutation(segments)
        sizes = [
            clips - self.window * (segments - 1) if each == segments - 1 else self.window for each in order
        ]
        ends = np.cumsum(sizes)
        place = int(np.searchsorted(ends, row, side="right"))
        return int(order[place]), row - int(ends[place] - sizes[place])

    def cost(self, index: int, rounds: int) -> float:
        """Return a constant: the row may not be there yet."""
        return rounds

    def marks(self, window: int) -> dict[str, Any]:
        """Return nothing: any row can be found without those before it."""
        return {}

    def resume(self, bookmarks: Mapping[str, Any]) -> None:
        """Do nothing, see `marks`."""

    def close(self) -> None:
        """Do nothing: files are only open while they are read."""
