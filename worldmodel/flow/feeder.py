"""The beginning of a flow: clips are listed from the sources and published, as many as may be in flight.

Clips enter in the order of the catalog, and a new one only when another has left: so queues, disk and memory
are bounded, whatever the sizes of the sources and however slow a stage or a trainer is.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator

from worldmodel.config.flow import FlowConfig
from worldmodel.flow.catalog import Catalog
from worldmodel.flow.chain import PACK
from worldmodel.flow.records import BEGINNING, NewClip, Place
from worldmodel.flow.sources import open_listing
from worldmodel.flow.topics import Message, open_topic

ROWS = 256
"""Rows of a source that are listed together."""
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
            self.open[name] = open_listing(name, source, rows)
        count = min(ROWS, source.limit - rows) if source.limit else ROWS
        taken = list(itertools.islice(self.open[name], count))
        total = rows + len(taken)
        finished = len(taken) < count or total == source.limit
        self.catalog.add(name, [clip for clips in taken for clip in clips], total, finished)
        self.listed[name] = (total, finished)
        return True

    def close(self) -> None:
        """Close the sources."""
        for rows in self.open.values():
            with contextlib.suppress(AttributeError):
                rows.close()  # type: ignore[attr-defined] # a generator's


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
