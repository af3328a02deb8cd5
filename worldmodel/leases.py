"""Leases in a database: who works on a row, until it lets go or counts as dead.

A holder has an id, which the rows that it works on have in their column `holder`. It registers in a table of
leases, and renews its own by heartbeats. A row is free when it names no holder, or one whose lease has ended.
So a heartbeat writes one row, however many are held, and nobody needs a list of what a dead holder had.

Times are those of one clock for all machines: PostgreSQL's, or that of SQLite's machine.
"""

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Engine

from worldmodel.database import transaction

CLOCK_STEP_S = 5.0
"""A lease that was renewed further in the future than this is that of a clock that was set back since."""


def lease_columns() -> list[sa.Column[Any]]:
    """Return the columns of a table of leases; a table may have others beside them."""
    return [
        sa.Column("id", sa.String(128), primary_key=True),
        sa.Column("renewed_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
    ]


def now(db: Connection) -> Any:
    """Return the time of the database's clock, in seconds since 1970."""
    if db.dialect.name == "postgresql":
        return sa.cast(sa.func.extract("epoch", sa.func.clock_timestamp()), sa.Double)
    return sa.literal(time.time(), sa.Double)


def is_live(db: Connection, leases: sa.Table) -> "sa.ColumnElement[bool]":
    """Return the condition that a lease has not ended."""
    time_now = now(db)
    return sa.and_(leases.c.expires_at > time_now, leases.c.renewed_at <= time_now + CLOCK_STEP_S)


class Holder:
    """Holds rows of a database that no other process uses, as a lone server does: it needs no lease.

    Args:
        id: what no other holder is called, such as that of an earlier process, whose rows are free.
    """

    def __init__(self, id: str = "") -> None:
        self.id = id or secrets.token_urlsafe(12)

    def is_free(self, db: Connection, holder: "sa.ColumnElement[Any]") -> "sa.ColumnElement[bool]":
        """Return the condition that no other holder, and not this one either, has a row."""
        return sa.or_(holder.is_(None), holder != self.id)

    def claim(
        self,
        db: Connection,
        rows: sa.Table,
        where: "sa.ColumnElement[bool]",
        order_by: Sequence["sa.ColumnElement[Any]"] = (),
        count: int = 1,
        again: bool = False,
        **values: Any,
    ) -> list[Any]:
        """Take free rows, and return them.

        Args:
            db: a connection in a transaction.
            rows: their table; its primary key is one column, and another one is `holder`.
            where: which rows.
            order_by: which of them come first; the result need not be in this order.
            count: how many, at most.
            again: whether rows that this holder has are taken, too.
            values: other columns to set.
        """
        (key,) = rows.primary_key
        takeable = self.is_free(db, rows.c.holder)
        if again:
            takeable = sa.or_(takeable, rows.c.holder == self.id)
        first = sa.select(key).where(where, takeable).order_by(*order_by).limit(count)
        # PostgreSQL skips rows that others take at this moment; SQLite has one writer and ignores the clause.
        # Materialized, or the planner may run the query again for each row, and lock more than its limit.
        locked = first.with_for_update(of=rows, skip_locked=True)
        found = locked.cte("found").prefix_with("MATERIALIZED")
        taken = sa.update(rows).where(key.in_(sa.select(found.c[key.name])))
        return list(db.execute(taken.values(holder=self.id, **values).returning(*rows.c)).all())

    def holds(self, rows: sa.Table) -> "sa.ColumnElement[bool]":
        """Return the condition that this holder has a row: writes of one that lost it change nothing."""
        return rows.c.holder == self.id


class Lease(Holder):
    """A holder that shares its database with others.

    Args:
        leases: the table of leases.
        duration_s: time after its last heartbeat at which it counts as dead.
        id: what no other holder is called.
        about: other columns of its row.
    """

    def __init__(self, leases: sa.Table, duration_s: float, id: str = "", **about: Any) -> None:
        super().__init__(id)
        self.leases, self.duration_s, self.about = leases, duration_s, about

    def is_free(self, db: Connection, holder: "sa.ColumnElement[Any]") -> "sa.ColumnElement[bool]":
        """Return the condition that no holder whose lease goes on has a row."""
        live = sa.select(self.leases.c.id).where(is_live(db, self.leases))
        return sa.or_(holder.is_(None), holder.not_in(live))

    def register(self, db: Connection) -> None:
        """Begin the lease, and forget those that have ended."""
        db.execute(sa.delete(self.leases).where(sa.not_(is_live(db, self.leases))))
        db.execute(sa.insert(self.leases).values(id=self.id, **self._times(db), **self.about))

    def renew(self, db: Connection) -> bool:
        """Renew the lease; return whether it was there: another holder forgets it once it has ended."""
        renewal = sa.update(self.leases).where(self.leases.c.id == self.id).values(self._times(db))
        return db.execute(renewal).rowcount > 0

    def end(self, db: Connection) -> None:
        """End the lease, so that others need not wait for what it holds."""
        db.execute(sa.delete(self.leases).where(self.leases.c.id == self.id))

    def _times(self, db: Connection) -> dict[str, Any]:
        return {"renewed_at": now(db), "expires_at": now(db) + self.duration_s}

    def beat(self, db: Connection) -> None:
        """Renew the lease, or begin it anew if it was forgotten."""
        if not self.renew(db):
            self.register(db)

    @contextmanager
    def kept(self, engine: Engine) -> Iterator[None]:
        """Hold the lease while the block runs, by heartbeats of a thread."""
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(self.duration_s / 3):
                transaction(engine, self.beat)

        transaction(engine, self.beat)
        thread = threading.Thread(target=renew, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            transaction(engine, self.end)
