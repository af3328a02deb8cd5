"""Live worlds in the database, each held by one replica at a time: a world moves by its stored state."""

import sqlalchemy as sa
from sqlalchemy import Connection

from worldmodel.leases import now
from worldmodel.serving.errors import ConflictError
from worldmodel.serving.replicas.database import worlds
from worldmodel.serving.replicas.replica import LEASE_S, Replica

WAIT_S = LEASE_S + 1.0
"""How long a request waits for a world that another replica holds: until that has died, or hands it over."""
POLL_S = 0.2
"""How often a request looks whether another replica has let go of its world."""


class WorldHeldError(ConflictError):
    """Another replica plays the world."""

    code = "world_held"


class WorldMovedError(ConflictError):
    """The world went on to another replica."""

    code = "world_moved"

    def __init__(self) -> None:
        super().__init__("This world has moved to another replica; send its next requests there.")


class WorldStore:
    """The stored worlds, as one replica reads and writes them; all methods raise `UnavailableError`."""

    def __init__(self, replica: Replica) -> None:
        self.replica, self.lease, self._run = replica, replica.lease, replica.database.run

    async def add(self, world_id: str, owner: str, played: int, data: bytes) -> None:
        """Store a new world, which this replica holds."""
        row = {"id": world_id, "owner": owner, "holder": self.lease.id, "round": played, "data": data}
        await self._run(lambda db: db.execute(sa.insert(worlds).values(**row, updated_at=now(db))))

    async def put(self, world_id: str, played: int, data: bytes) -> None:
        """Replace the stored state of a world.

        Raises:
            WorldMovedError: this replica does not hold it any more; the stored state is that of another.
        """

        def work(db: Connection) -> int:
            values = {"round": played, "data": data, "updated_at": now(db)}
            return db.execute(sa.update(worlds).where(self._holds(world_id)).values(values)).rowcount

        if not await self._run(work):
            raise WorldMovedError

    async def claim(self, owner: str, world_id: str) -> bytes | None:
        """Take a world that no live replica holds, and return its stored state; None if there is none.

        Raises:
            WorldHeldError: a live replica holds it, and is asked to hand it over when it is at rest.
        """
        owned = sa.and_(worlds.c.id == world_id, worlds.c.owner == owner)

        def work(db: Connection) -> tuple[bool, bytes | None]:
            # One that was handed over is held by this replica already.
            if taken := self.lease.claim(db, worlds, owned, again=True, wanted_by=None):
                return False, taken[0].data
            asked = sa.update(worlds).where(owned).values(wanted_by=self.lease.id)
            return db.execute(asked).rowcount > 0, None

        held, data = await self._run(work)
        if held:
            raise WorldHeldError(
                "Another replica plays this world; send all requests for one world to one replica."
            )
        return data

    async def held(self) -> dict[str, bool]:
        """Return the worlds of this replica, each with whether another one has requests for it."""
        mine = sa.select(worlds.c.id, worlds.c.wanted_by).where(self.lease.holds(worlds))
        return await self._run(lambda db: {row.id: row.wanted_by is not None for row in db.execute(mine)})

    async def release(self, world_id: str) -> None:
        """Let another replica take a world: the one that has requests for it, or any."""
        values = {"holder": worlds.c.wanted_by, "wanted_by": None}
        await self._run(lambda db: db.execute(sa.update(worlds).where(self._holds(world_id)).values(values)))

    async def remove(self, world_id: str) -> None:
        """Delete a world that this replica holds."""
        await self._run(lambda db: db.execute(sa.delete(worlds).where(self._holds(world_id))))

    async def sweep(self, idle_timeout_s: float) -> None:
        """Delete worlds of dead replicas that nobody has used for longer than the timeout."""

        def work(db: Connection) -> None:
            idle = worlds.c.updated_at < now(db) - idle_timeout_s
            db.execute(sa.delete(worlds).where(self.lease.is_free(db, worlds.c.holder), idle))

        await self._run(work)

    def _holds(self, world_id: str) -> "sa.ColumnElement[bool]":
        return sa.and_(worlds.c.id == world_id, self.lease.holds(worlds))
