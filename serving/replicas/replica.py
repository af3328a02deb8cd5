"""A server among the replicas of a database: while its lease goes on, no other takes what it holds."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import sqlalchemy as sa
from sqlalchemy import Connection

from worldmodel.errors import OutputError
from worldmodel.leases import Lease
from worldmodel.serving.errors import UnavailableError
from worldmodel.serving.replicas.database import Database, replicas

LOG = logging.getLogger(__name__)

LEASE_S = 3.0
"""Time after its last heartbeat at which a replica counts as dead."""
HEARTBEAT_S = 0.75


class Replica:
    """This server among the replicas of a database."""

    def __init__(self, database: Database, model: str, folder: str) -> None:
        """Register the replica; `model` and `folder` are the identities of its model and data folder.

        Raises:
            OutputError: another replica is live, and has another model or data folder.
            DatabaseError: the database does not answer.
        """
        self.database = database
        self.lease = Lease(replicas, LEASE_S, model=model, folder=folder)
        self._held_until = time.monotonic() + LEASE_S
        self._beating: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._calls: list[Callable[[], Awaitable[None]]] = []
        database.run_now(self._register)

    @property
    def held(self) -> bool:
        """Whether the lease has not expired, by the clock of this process."""
        return time.monotonic() < self._held_until

    def require(self) -> None:
        """Raise `UnavailableError` if the lease has expired: others may take what this replica holds."""
        if not self.held:
            raise UnavailableError("The server has lost its database for a while; try again.")

    def after_heartbeats(self, call: Callable[[], Awaitable[None]]) -> None:
        """Run a call after heartbeats, one at a time."""
        self._calls.append(call)

    def start(self) -> None:
        """Begin to renew the lease."""
        self._beating = asyncio.create_task(self._beat())

    async def close(self) -> None:
        """End the lease, so that others need not wait until it expires."""
        for task in (self._beating, self._following):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        with suppress(UnavailableError):  # it expires
            await self.database.run(self.lease.end)
        self._held_until = 0.0

    async def _beat(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self.database.run(self._renew)
                self._held_until = began + LEASE_S
                if self._following is None or self._following.done():  # the next heartbeat does not wait
                    self._following = asyncio.create_task(self._follow())
            except UnavailableError:
                LOG.warning("The database does not answer; the lease of this server is not renewed.")
            except Exception:  # a heart that stopped would give away all worlds
                LOG.exception("A heartbeat failed.")
            await asyncio.sleep(HEARTBEAT_S)

    async def _follow(self) -> None:
        for call in self._calls:
            try:
                await call()
            except UnavailableError:
                LOG.warning("The database does not answer.")
            except Exception:  # nothing awaits this task
                LOG.exception("What follows a heartbeat failed.")

    def _renew(self, db: Connection) -> None:
        if not self.lease.renew(db):
            self._register(db)

    def _register(self, db: Connection) -> None:
        self.lease.register(db)
        for name, value in self.lease.about.items():
            if db.scalar(sa.select(replicas.c.id).where(replicas.c[name] != value).limit(1)):
                raise OutputError(
                    f"A server with another {name} uses the same database; stop it, or choose another "
                    f"--database{' and --data-dir' if name == 'model' else ', or its --data-dir'}."
                )
