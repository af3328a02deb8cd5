"""The log that training reads: numbered segments of clips, none of which is ever changed.

A segment is a tar file in the WebDataset layout (`CLIP.json`, `CLIP.mp4`, `CLIP.latents.safetensors`, …), and
`000012.json`, which appears last, has the name of its file and the byte ranges of its clips. `finished.json`
says that no more segments follow. Readers need this storage only: no database and no process of the flow.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from worldmodel.errors import ConfigError
from worldmodel.flow.errors import FlowError
from worldmodel.flow.storage import Storage

FINISHED, CURRENT, READER, LAYOUT = "finished.json", "log.json", "reader.txt", "layout.json"
"""Files beside the segments; `reader.txt` has the number of the segment that a training has begun."""
VERSION = 1
POLL_S = 0.05
"""Time between looks for a segment that is not there yet."""


@dataclass(frozen=True)
class ClipFiles:
    """Where the parts of a clip are."""

    id: str
    file: str
    """Path or address of the segment's file."""
    parts: Mapping[str, tuple[int, int]]
    """Offset and size of each part, by column; `json` has all columns that are not binary."""


class Log:
    """Reads a log, also while it grows.

    Args:
        address: folder or address of the log; one of several in it is the one that the last run wrote.

    Raises:
        ConfigError: there is no log.
    """

    def __init__(self, address: str) -> None:
        self.storage = Storage(address)
        if self.storage.exists(CURRENT):
            current = json.loads(self.storage.read(CURRENT))
            if current.get("version", 0) > VERSION:
                raise ConfigError(f"The log {address!r} was written by a newer version; upgrade worldmodel.")
            self.storage = Storage(f"{address.rstrip('/')}/{current['key']}")
        elif not (self.storage.exists("000000.json") or self.storage.exists(FINISHED)):
            raise ConfigError(f"{address!r} is not the log of a flow; start one with `worldmodel flow run`.")
        self.segment = lru_cache(maxsize=64)(self._segment)
        self._end: tuple[int, int] | None = None

    @property
    def segment_size(self) -> int:
        """Number of clips in every segment but the last."""
        return int(json.loads(self.storage.read(LAYOUT))["segment_size"])

    def end(self) -> tuple[int, int] | None:
        """Return the number of segments and of clips, once no more follow."""
        if self._end is None and self.storage.exists(FINISHED):
            end = json.loads(self.storage.read(FINISHED))
            self._end = end["segments"], end["clips"]
        return self._end

    def sealed(self, number: int) -> bool:
        """Return whether a segment is there."""
        return self.storage.exists(segment_name(number))

    def wait(self, number: int, timeout_s: float) -> bool:
        """Wait for a segment; return whether it is there, or the log ended before it.

        Raises:
            FlowError: neither happened in time.
        """
        deadline, pause_s = time.monotonic() + timeout_s, POLL_S
        while not self.sealed(number):
            end = self.end()
            if end is not None and number >= end[0]:
                return False
            if time.monotonic() > deadline:
                raise FlowError(
                    f"Segment {number} of {self.storage.address} was not sealed within {timeout_s:g} s; see "
                    "`worldmodel flow status` for the stage that holds it up, or raise data.timeout_s."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0 if self.storage.is_remote else 4 * POLL_S)
        return True

    def _segment(self, number: int) -> tuple[ClipFiles, ...]:
        """Return the clips of a segment that is there."""
        index = json.loads(self.storage.read(segment_name(number)))
        file = f"{self.storage.address}/{index['name']}"
        return tuple(
            ClipFiles(clip["id"], file, {name: (part[0], part[1]) for name, part in clip["parts"].items()})
            for clip in index["clips"]
        )

    def __getstate__(self) -> dict[str, Any]:
        raise FlowError("A log cannot be sent to another process; open it there.")


def segment_name(number: int) -> str:
    """Return the name of the file that says that a segment is sealed."""
    return f"{number:06d}.json"


def current_key(storage: Storage) -> str | None:
    """Return the key of the chain whose run is the newest that began to write below an address."""
    return json.loads(storage.read(CURRENT))["key"] if storage.exists(CURRENT) else None
