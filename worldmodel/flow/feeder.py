"""The beginning of a flow: clips are listed from the sources and published, as many as may be in flight.

Clips enter in the order of the catalog, and a new one only when another has left: so queues, disk and memory
are bounded, whatever the sizes of the sources and however slow a stage or a trainer is.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from worldmodel.config.flow import FlowConfig
from worldmodel.flow.buffer import open_buffer
from worldmodel.flow.catalog import VIDEO, Catalog
from worldmodel.flow.chain import LISTED, PACK
from worldmodel.flow.records import BEGINNING, NewClip, Place
from worldmodel.flow.sources import open_listing
from worldmodel.flow.stage import CLIP
from worldmodel.flow.topics import Message, open_topic

ROWS = 256
"""Rows of a source that are listed together."""
MAX_BYTES = 64 * 2**20
"""Bytes of files in rows after which fewer rows are."""
AGAIN_S = 30.0
"""Time after which clips in flight are published again, in case a topic has lost some."""


class Lister:
    """Lists the clips of the sources in the catalog.

    Args:
        config: the flow.
        catalog: an open catalog.
    """

    def __init__(self, config: FlowConfig, catalog: Catalog) -> None:
        self.config, self.catalog = config, catalog
        self.buffer = open_buffer(config.place("buffer"))
        self.open: dict[str, Iterator[list[NewClip]]] = {}
        self.listed = {name: (catalog.listed(name)[0], False) for name in config.sources}
        """Rows of each source that are listed, and whether these are all; a source may have grown since."""

    @property
    def all_listed(self) -> bool:
        """Whether the catalog has all clips of the sources."""
        return all(finished for _, finished in self.listed.values())

    def list_next(self) -> bool:
        """List the next rows of the source of which the fewest are listed; return whether there was one."""
        unfinished = {name: rows for name, (rows, finished) in self.listed.items() if not finished}
        if not unfinished:
            return False
        name = min(unfinished, key=lambda each: unfinished[each])
        rows, source = unfinished[name], self.config.sources[name]
        if name not in self.open:
            self.open[name] = open_listing(name, source, rows, self.catalog.listed(name)[1])
        count = min(ROWS, source.limit - rows) if source.limit else ROWS
        taken, ended = _take(self.open[name], count)
        total = rows + len(taken)
        finished = ended or (0 < source.limit <= total)
        bookmark: Any = getattr(self.open[name], "bookmark", lambda: None)()
        self.catalog.add(name, self._stored(taken), total, finished, bookmark)
        self.listed[name] = (total, finished)
        return True

    def _stored(self, rows: Sequence[list[NewClip]]) -> list[NewClip]:
        """Store the files that rows hold, and return their clips; those of one row share its file."""
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
        """Close the sources."""
        for rows in self.open.values():
            with contextlib.suppress(AttributeError):
                rows.close()  # type: ignore[attr-defined] # a generator's


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


class Feeder(Lister):
    """Lists and publishes clips. One per catalog is enough; several do no harm.

    Args:
        config: the flow.
        catalog: an open catalog.
        topics: address of the topics.
    """

    def __init__(self, config: FlowConfig, catalog: Catalog, topics: str) -> None:
        super().__init__(config, catalog)
        self.topics = {link.name: open_topic(topics, link.topic) for link in catalog.chain.links}
        self.place: Place = BEGINNING
        self.began = time.monotonic()

    def feed(self) -> bool:
        """Publish clips up to the limit, listing more where they run out; return whether any were new."""
        if time.monotonic() - self.began > AGAIN_S:
            self.place, self.began = BEGINNING, time.monotonic()
        room = self.config.max_in_flight - self.catalog.in_flight(up_to=self.place)
        if room <= 0:
            return False
        found = self.catalog.waiting(self.place, room)
        for state in {each.state for each in found} - {PACK}:
            ready = [Message(each.id, each.place[0]) for each in found if each.state == state]
            self.topics[state].publish(ready)
        if found:
            self.place = found[-1].place
        return self.list_next() if len(found) < room else bool(found)

    def close(self) -> None:
        """Close the topics and the sources."""
        for topic in self.topics.values():
            topic.close()
        super().close()
