"""Claims of clips: which worker works on which ones in a stage.

The clips themselves are the queue: one waits for the stage that its `state` names, and a claim writes the
worker into its `holder`. The transaction that records a result also moves the clip on and clears the claim,
so there is no second place that says what is left to do, and nothing to bring in line after a crash.

A claim ends with its result, with the lease of its worker, or with another attempt being due later. A worker
that lost its lease and goes on is harmless: the first result counts, and what it says of clips that others
hold by then is ignored.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from worldmodel.database import reads, writes
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.records import Claim
from worldmodel.flow.catalog.schema import clip, identity
from worldmodel.leases import CLOCK_STEP_S, now

POLL_S = (0.02, 0.5)
"""Shortest and longest pause between two looks for clips."""


class Claims:
    """The clips that one worker may work on in a stage.

    Args:
        catalog: an open catalog; its `owner` is the worker.
        stage: name of the stage.
        lease_s: time after which clips of a worker that has died are given to others.
    """

    def __init__(self, catalog: Catalog, stage: str, lease_s: float) -> None:
        self.catalog, self.engine, self.stage = catalog, catalog.engine, stage
        self.lease = catalog.lease(stage, lease_s)

    def kept(self) -> AbstractContextManager[None]:
        """Hold the lease while the block runs; afterwards others may claim at once what is left."""
        return self.lease.kept(self.engine)

    def wait(self, count: int, wait_s: float) -> list[Claim]:
        """Claim the first clips in the order of the catalog; wait up to `wait_s` seconds for one."""
        deadline, pause_s = time.monotonic() + wait_s, POLL_S[0]
        claims = self.claim(count)
        while not claims and time.monotonic() < deadline:
            time.sleep(max(0.0, min(pause_s, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, POLL_S[1])
            if self._any():  # which waits for no writer of SQLite, and is none
                claims = self.claim(count)
        return claims

    @writes
    def claim(self, db: Connection, count: int, among: Sequence[str] | None = None) -> list[Claim]:
        """Claim up to `count` clips that wait for the stage, the first ones in the order of the catalog.

        Clips that the worker has and did not finish come again: it works on one claim at a time, so these
        are of one whose answer a database that restarted did not give.

        Args:
            db: a connection in a transaction.
            count: how many, at most.
            among: the clips that may be claimed, if not all.
        """
        waits = self._waits(db)
        if among is not None:
            waits = sa.and_(waits, clip.c.id.in_(among))
        order, delivery = (clip.c.ordinal, clip.c.sub), clip.c.delivery + 1
        values = {"delivery": delivery, "delayed_since": None, "delayed_until": None}
        rows = self.lease.claim(db, clip, waits, order, count, again=True, **values)
        rows.sort(key=lambda row: (row.ordinal, row.sub))
        return [Claim(row.id, row.delivery) for row in rows]

    @reads
    def _any(self, db: Connection) -> bool:
        """Return whether there is a clip to claim."""
        free = self.lease.is_free(db, clip.c.holder)
        return db.execute(sa.select(clip.c.id).where(self._waits(db), free).limit(1)).first() is not None

    def _waits(self, db: Connection) -> "sa.ColumnElement[bool]":
        """Return the condition that a clip is admitted, waits for the stage, and is due."""
        time_now: Any = now(db)
        due = sa.or_(
            clip.c.delayed_until.is_(None),
            clip.c.delayed_until <= time_now,
            clip.c.delayed_since > time_now + CLOCK_STEP_S,  # of a clock that was set back since
        )
        admitted = clip.c.ordinal <= sa.select(identity.c.admitted).scalar_subquery()
        return sa.and_(clip.c.state == self.stage, admitted, due)
