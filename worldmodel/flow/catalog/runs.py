"""The identity of a flow, and its runs: the states of clips follow the chain of the newest one."""

import os
import socket
import time

import sqlalchemy as sa
from sqlalchemy import Connection, Engine

from worldmodel.database import insert, reads, writes
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.catalog.schema import identity, lease, run
from worldmodel.flow.errors import FlowError
from worldmodel.leases import Lease, is_live

RUN_LIVES_S = 30.0
"""A run whose last heartbeat is this old has ended."""


class Runs:
    """The part of a catalog that knows its own identity and the runs."""

    def __init__(self, engine: Engine, chain: Chain) -> None:
        self.engine, self.chain = engine, chain

    @reads
    def _identity(self, db: Connection) -> str | None:
        """Return what no other catalog is called; None before it has a name."""
        return db.execute(sa.select(identity.c.name)).scalar()

    @writes
    def _identify(self, db: Connection, name: str) -> str:
        """Give the catalog a name, unless another process was first; return the one it has."""
        db.execute(insert(db, identity).values(one=1, name=name).on_conflict_do_nothing())
        return db.execute(sa.select(identity.c.name)).scalar_one()

    def _lock(self, db: Connection) -> None:
        """Wait for other transactions that do this, and keep them waiting; SQLite has one writer anyway."""
        db.execute(sa.select(identity.c.one).with_for_update())

    @reads
    def last_chain(self, db: Connection) -> str | None:
        """Return the key of the newest run's chain.

        Raises:
            FlowError: a run with other stages, or with other weights of their models, is alive.
        """
        return self._last_chain(db)

    def _last_chain(self, db: Connection) -> str | None:
        live = sa.exists().where(lease.c.id == run.c.id, is_live(db, lease)).label("live")
        others = db.execute(sa.select(run, live).order_by(run.c.started_at.desc())).mappings().all()
        for other in others:
            if other["key"] != self.chain.key and other["live"]:
                raise FlowError(
                    f"Process {other['pid']} on {other['host']} runs other stages with this catalog; stop it "
                    "first, or set another folder."
                )
        return others[0]["key"] if others else None

    def _register(self, db: Connection, name: str) -> None:
        """Record a run, whose chain the states of clips follow."""
        newest = db.execute(sa.select(sa.func.max(run.c.started_at))).scalar() or 0.0
        row = {
            "id": name, "key": self.chain.key, "host": socket.gethostname(), "pid": os.getpid(),
            "stages": [[link.name, link.key] for link in self.chain.links],
            "started_at": max(time.time(), newest + 1e-3),  # clocks of machines differ
        }  # fmt: skip
        statement = insert(db, run).values(row)
        db.execute(statement.on_conflict_do_update(index_elements=[run.c.id], set_=row))
        Lease(lease, RUN_LIVES_S, name).beat(db)

    @writes
    def beat(self, db: Connection, name: str) -> None:
        """Say that a run goes on."""
        Lease(lease, RUN_LIVES_S, name).beat(db)

    @writes
    def end(self, db: Connection, name: str, error: str | None = None) -> None:
        """Say that a run has ended, and why if it failed."""
        db.execute(sa.update(run).where(run.c.id == name).values(error=error))
        Lease(lease, RUN_LIVES_S, name).end(db)
