"""Removal of results of stages whose version or settings have changed since, and of old files.

The segments of all chains stay, and what was left out of them: a training may read a former log, and a chain
that comes back goes on behind the clips that it has packed.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from worldmodel.database import reads, writes
from worldmodel.flow.buffer.base import UNUSED_S, Buffer
from worldmodel.flow.catalog.catalog import ROWS, Catalog
from worldmodel.flow.catalog.chain import LISTED, PACK
from worldmodel.flow.catalog.schema import clip, outcome, tally
from worldmodel.flow.errors import FlowError

BATCH = 10_000
"""Results that are removed in one transaction, so that a flow beside it does not wait long."""


@dataclass(frozen=True)
class FormerStage:
    """Results that the chain does not use."""

    stage: str
    key: str
    num_results: int
    num_bytes: int
    """Size of their files in the buffer."""


class Pruner:
    """Finds and removes the results that the chain of a catalog does not use. A flow may run meanwhile.

    Args:
        catalog: an open catalog; its newest run must be one of its chain.
        buffer: the flow's buffer.

    Raises:
        FlowError: the newest run had other stages, so these results may be in use.
    """

    def __init__(self, catalog: Catalog, buffer: Buffer) -> None:
        self.catalog, self.engine, self.buffer = catalog, catalog.engine, buffer
        if catalog.last_chain() != catalog.chain.key:
            raise FlowError(
                "The last run of this flow had other stages; start it with this config before former results "
                "are removed: worldmodel flow run CONFIG."
            )

    def former(self) -> list[FormerStage]:
        """Return the stages and keys with results that the chain does not use."""
        used = {(link.name, link.key) for link in self.catalog.chain.links}
        sizes = self.buffer.sizes()
        return [
            FormerStage(stage, key, count, sizes.get((stage, key), 0))
            for stage, key, count in self._counts()
            if stage not in (PACK, LISTED) and (stage, key) not in used
        ]

    def ended(self, older_than_s: float) -> list[FormerStage]:
        """Return the results with files of clips that have ended, such as packed ones, and their whole rows.

        Those of the sources' own files stay: nothing could fetch them again.
        """
        found = self._counts(self._ended(older_than_s))
        return [FormerStage(stage, key, count, 0) for stage, key, count in found]

    def remove_ended(self, older_than_s: float, files_older_than_s: float = UNUSED_S) -> int:
        """Remove these results and their files, and return how many bytes the buffer shrank by.

        A chain that is changed later makes them again.

        Raises:
            OutputError: a file cannot be removed.
        """
        while self._remove_some_ended(older_than_s):
            pass
        return self.buffer.compact(self.catalog.places(), files_older_than_s)

    def _ended(self, older_than_s: float) -> "sa.ColumnElement[bool]":
        """Return the condition that a result has files, and that its clip with all its parts has ended."""
        row, other = clip.alias(), clip.alias()
        waits = sa.select(other.c.id).where(
            other.c.ordinal == row.c.ordinal, other.c.state.in_(self.catalog.chain.names)
        )
        ended = sa.select(row.c.id).where(row.c.id == outcome.c.clip, sa.not_(waits.exists())).exists()
        old = outcome.c.finished_at < time.time() - older_than_s
        return sa.and_(old, outcome.c.place.is_not(None), outcome.c.stage != LISTED, ended)

    @writes
    def _remove_some_ended(self, db: Connection, older_than_s: float) -> bool:
        """Remove a batch of results; return whether there was one."""
        keys = (outcome.c.clip, outcome.c.stage, outcome.c.key)
        some = db.execute(sa.select(*keys).where(self._ended(older_than_s)).limit(ROWS)).all()
        db.execute(sa.delete(outcome).where(sa.tuple_(*keys).in_([tuple(row) for row in some])))
        return bool(some)

    def remove(self, former: Sequence[FormerStage], older_than_s: float = UNUSED_S) -> int:
        """Remove results and their files, and return how many bytes the buffer shrank by.

        Files that are younger than `older_than_s` stay for a later `Buffer.compact`.

        Raises:
            OutputError: a file cannot be removed.
        """
        for each in former:
            while self._remove_some(each.stage, each.key):
                pass
        return self.buffer.compact(self.catalog.places(), older_than_s)

    @reads
    def _counts(self, db: Connection, *which: "sa.ColumnElement[bool]") -> list[tuple[str, str, int]]:
        """Count the results of each stage and key, of those for which some conditions hold."""
        keys = (outcome.c.stage, outcome.c.key)
        query = sa.select(*keys, sa.func.count()).where(*which).group_by(*keys).order_by(*keys)
        return [(stage, key, count) for stage, key, count in db.execute(query)]

    @writes
    def _remove_some(self, db: Connection, stage: str, key: str) -> bool:
        """Remove a batch of results; return whether there was one."""
        which = (outcome.c.stage == stage, outcome.c.key == key)
        some = [row.clip for row in db.execute(sa.select(outcome.c.clip).where(*which).limit(BATCH))]
        db.execute(sa.delete(outcome).where(*which, outcome.c.clip.in_(some)))
        db.execute(sa.delete(tally).where(tally.c.stage == stage, tally.c.key == key))
        return bool(some)
