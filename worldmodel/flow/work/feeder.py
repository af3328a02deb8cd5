"""The beginning of a flow: clips are listed from the sources and admitted, as many as may be in flight.

Clips enter in the order of the catalog, and a new one only when another has left: so memory and the lead of
the first stage are bounded, whatever the sizes of the sources and however slow a stage or a trainer is.
"""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from worldmodel.config.flow import FlowConfig
from worldmodel.errors import ConfigError
from worldmodel.flow.buffer import open_buffer
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.chain import LISTED
from worldmodel.flow.catalog.columns import VIDEO
from worldmodel.flow.catalog.records import LAST_SUB, NewClip
from worldmodel.flow.sources import open_listing, source_digest
from worldmodel.flow.stages.base import CLIP
from worldmodel.flow.work.topics import open_topics

ROWS = 256
"""Rows of a source that are listed together."""
MAX_BYTES = 64 * 2**20
"""Bytes of files in rows after which fewer rows are."""
AGAIN_S = 30.0
"""Time after which admission begins again with the first clip in flight: `retry` and changed stages put clips
back behind the ordinal that was reached, and a topic may have lost some."""
LOG = logging.getLogger(__name__)


class Feeder:
    """Lists and admits clips. One per catalog is enough; several do no harm: each goes on where the last was.

    Raises:
        ConfigError: a source is listed that was another one.
    """

    def __init__(self, config: FlowConfig, catalog: Catalog) -> None:
        self.config, self.catalog = config, catalog
        self.buffer = open_buffer(config.place("buffer"))
        self.open: dict[str, Iterator[list[NewClip]]] = {}
        self.digests = {name: source_digest(source) for name, source in config.sources.items()}
        found = {name: catalog.listed(name) for name in config.sources}
        for name, each in found.items():
            if each.digest not in (None, self.digests[name]):
                raise ConfigError(
                    f"sources.{name} is listed with other settings of what it is (kind, path, root, split, "
                    "columns or preset); give the source another name, or set another folder."
                )
        self.listed = {name: (each.rows, False) for name, each in found.items()}
        """Rows of each source that are listed, and whether these are all; a source may have grown since."""
        self.repeated: Counter[str] = Counter()
        """Rows of each source that gave no clip of their own."""
        self.again: set[str] = set()
        """Sources whose listed rows are listed again."""
        self.topics = open_topics(config, catalog.chain)
        self.ordinal, self.began = -1, time.monotonic()
        """Clips up to the ordinal are admitted, since a time."""

    @property
    def all_listed(self) -> bool:
        """Whether the catalog has all clips of the sources."""
        return all(finished for _, finished in self.listed.values())

    def feed(self) -> bool:
        """Admit clips up to the limit, listing more where they run out; return whether any were new."""
        if time.monotonic() - self.began > AGAIN_S:
            self.ordinal, self.began = -1, time.monotonic()
        place = (self.ordinal, LAST_SUB)
        room = self.config.max_in_flight - self.catalog.in_flight(up_to=place)
        if room <= 0:
            return False
        # Clips behind the ordinal, which wait as well, are not admitted: a chain that was changed puts all
        # clips of a catalog back, and its first stage would run ahead of all others.
        found = self.catalog.waiting(place, room)
        if found:
            self.ordinal = found[-1].place[0]
            self.catalog.admit(self.ordinal)
            for state, topic in self.topics.items():
                topic.announce([each.id for each in found if each.state == state])
        return self.list_next() if len(found) < room else bool(found)

    def list_next(self) -> bool:
        """List the next rows of the source of which the fewest are listed; return whether there was one."""
        unfinished = {name: rows for name, (rows, finished) in self.listed.items() if not finished}
        if not unfinished:
            return False
        name = min(unfinished, key=lambda each: unfinished[each])
        source, known = self.config.sources[name], self.catalog.listed(name)
        first = known.rows
        if name not in self.open or first != unfinished[name]:  # it begins, or another process was faster
            self._close(name)
            self.open[name] = open_listing(name, source, known.rows, known.bookmark)
            first = getattr(self.open[name], "first", known.rows)
            self.again |= {name} if first < known.rows else set()
        count = min(ROWS, source.limit - first) if source.limit else ROWS
        taken, ended = _take(self.open[name], count)
        total = first + len(taken)
        finished = ended or (0 < source.limit <= total)
        bookmark: Any = getattr(self.open[name], "bookmark", lambda: None)()
        clips, digest = self._stored(taken), self.digests[name]
        added = self.catalog.add(name, clips, total, finished, bookmark, known.rows, digest)
        if added is None:
            self._close(name)  # and go on behind what another process has listed
            return True
        self.listed[name] = (total, finished)
        if name not in self.again:
            self.repeated[name] += len(clips) - added
        if finished:
            self._report(name)
        return True

    def _report(self, name: str) -> None:
        if repeated := self.repeated.pop(name, 0):
            LOG.warning(
                "%d rows of the source %s name the same file and times as an earlier row: they are one clip, "
                "with the text of the first.", repeated, name,
            )  # fmt: skip

    def _stored(self, rows: Sequence[list[NewClip]]) -> list[NewClip]:
        """Store the files that rows hold, and return their clips; clips of one row share its file."""
        files = [clips[0] for clips in rows if clips and clips[0].content is not None]
        places: dict[str, str] = {}
        if files:
            content = pa.array([clip.content for clip in files], pa.large_binary())
            batch = pa.record_batch({CLIP: [clip.id for clip in files], VIDEO: content})
            stored = self.buffer.write(LISTED, LISTED, batch)
            places = {clip.id: place for clip, place in zip(files, stored, strict=True)}
        return [
            replace(clip, content=None, place=places.get(clips[0].id)) for clips in rows for clip in clips
        ]

    def close(self) -> None:
        """Close the topics and the sources."""
        for topic in self.topics.values():
            topic.close()
        for name in list(self.open):
            self._close(name)
            self._report(name)

    def _close(self, name: str) -> None:
        with contextlib.suppress(AttributeError):
            self.open.pop(name, None).close()  # type: ignore[union-attr] # a generator's


def _take(rows: Iterator[list[NewClip]], count: int) -> tuple[list[list[NewClip]], bool]:
    """Return up to `count` rows, fewer where these hold large files, and whether they were the last ones."""
    taken: list[list[NewClip]] = []
    num_bytes = 0
    while len(taken) < count and num_bytes < MAX_BYTES:
        clips = next(rows, None)
        if clips is None:
            return taken, True
        taken.append(clips)
        num_bytes += len(clips[0].content or b"") if clips else 0
    return taken, False
