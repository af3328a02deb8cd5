"""Orders of videos in the database: one queue for all replicas, from which each order is claimed by one."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy import Connection

from worldmodel.leases import Holder, now
from worldmodel.serving.errors import ConflictError, RateLimitError
from worldmodel.serving.replicas.database import Database, videos
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.videos.record import RECORDS, VideoJob, VideoRecord

UNFINISHED = ("queued", "in_progress")
DAMAGED = "damaged"
"""Status of a row whose record this version cannot read."""


class Orders:
    """The stored orders, as one server reads and writes them; all methods raise `UnavailableError`.

    Args:
        database: where they are.
        holder: this server among those of the database.
        config: the limits.
    """

    def __init__(self, database: Database, holder: Holder, config: ServerConfig) -> None:
        self._run, self._holder, self._config = database.run, holder, config

    # ---- requests --------------------------------------------------------------------------------------

    async def submit(
        self, record: VideoRecord, wait_s: float, usable: Callable[[VideoRecord], bool]
    ) -> VideoJob | None:
        """Store a new order; return the one with the same Idempotency-Key instead, if it is usable."""

        def work(db: Connection) -> VideoJob | None:
            if db.dialect.name == "postgresql":  # one order at a time; SQLite has one writer anyway
                db.execute(sa.text("LOCK TABLE server_videos IN SHARE ROW EXCLUSIVE MODE"))
            if (found := _duplicate(db, record.idempotency, record.fingerprint)) is not None:
                if usable(found.record):
                    return found
                earlier = videos.c.idempotency == record.idempotency
                db.execute(sa.update(videos).where(earlier).values(idempotency=None))
            self._admit(db, record.owner, wait_s)
            db.execute(sa.insert(videos).values(id=record.id, steps_done=0, **_columns(record)))
            return None

        return await self._run(work)

    async def duplicate(self, idempotency: str | None, fingerprint: str | None) -> VideoJob | None:
        """Return the order with the same Idempotency-Key; `ConflictError` if it was another request's."""
        return await self._run(lambda db: _duplicate(db, idempotency, fingerprint))

    async def admit(self, owner: str, wait_s: float) -> None:
        """Raise `RateLimitError` unless an owner may order one more video."""
        await self._run(lambda db: self._admit(db, owner, wait_s))

    def _admit(self, db: Connection, owner: str, wait_s: float) -> None:
        config, owned = self._config, videos.c.owner == owner
        counts = sa.select(videos.c.owner, sa.func.count()).where(videos.c.status == "queued")
        queued = {each: count for each, count in db.execute(counts.group_by(videos.c.owner))}
        if not config.has_room(owner, queued, config.max_queued_jobs):
            raise RateLimitError(
                f"{sum(queued.values())} videos are queued, the most for this key; try again later.", wait_s
            )
        most = config.of_key("max_jobs_per_key", owner)
        if _count(db, owned, videos.c.status.in_(UNFINISHED)) >= most:
            raise RateLimitError(f"This key has {most} unfinished videos; wait for one to finish.", wait_s)
        if (stored := _count(db, owned)) >= config.of_key("max_videos_per_key", owner):
            raise RateLimitError(f"This key has {stored} videos, its maximum; delete some first.", 60.0)

    async def get(self, video_id: str) -> VideoJob | None:
        """Return an order, if there is one."""
        found = await self._select(videos.c.id == video_id)
        return found[0] if found else None

    async def owned_by(self, owner: str) -> list[VideoJob]:
        """Return an owner's orders, oldest first."""
        return await self._select(videos.c.owner == owner)

    async def _select(self, condition: "sa.ColumnElement[bool]") -> list[VideoJob]:
        queued = sa.select(videos.c.id, videos.c.owner).where(videos.c.status == "queued")
        chosen = sa.select(videos).where(condition).order_by(videos.c.created_ns)

        def work(db: Connection) -> list[VideoJob]:
            turns, ahead = list[tuple[int, int, str]](), Counter(self._running(db))
            for index, row in enumerate(db.execute(queued.order_by(videos.c.created_ns))):
                turns.append((ahead[row.owner], index, row.id))
                ahead[row.owner] += 1
            positions = {name: position for position, (_, _, name) in enumerate(sorted(turns), start=1)}
            orders = [(_read(row), row) for row in db.execute(chosen)]
            return [
                VideoJob(record, row.steps_done, positions.get(row.id))
                for record, row in orders
                if record is not None
            ]

        return await self._run(work)

    async def remove(self, video_id: str) -> None:
        """Delete an order; another replica that generates the video stops at its next heartbeat."""
        await self._run(lambda db: db.execute(sa.delete(videos).where(videos.c.id == video_id)))

    # ---- the queue -------------------------------------------------------------------------------------

    async def claim(self) -> VideoRecord | None:
        """Take an order that is queued, or whose server died; it counts as an attempt.

        It is the oldest one of the key that has the fewest in progress.
        """
        unfinished = videos.c.status.in_(UNFINISHED)

        def work(db: Connection) -> VideoRecord | None:
            running = self._running(db)
            turn = sa.case(running, value=videos.c.owner, else_=0) if running else sa.literal(0)
            while taken := self._holder.claim(db, videos, unfinished, [turn, videos.c.created_ns]):
                this, record = videos.c.id == taken[0].id, _read(taken[0])
                if record is None:
                    db.execute(sa.update(videos).where(this).values(status=DAMAGED, holder=None))
                    continue
                record.status, record.attempts = "in_progress", record.attempts + 1
                db.execute(sa.update(videos).where(this).values(_columns(record)))
                return record
            return None

        return await self._run(work)

    def _running(self, db: Connection) -> dict[str, int]:
        """Return how many orders of each key are in progress."""
        held = sa.not_(self._holder.is_free(db, videos.c.holder))
        counts = sa.select(videos.c.owner, sa.func.count()).where(videos.c.status == "in_progress", held)
        return {owner: count for owner, count in db.execute(counts.group_by(videos.c.owner))}

    async def write(
        self, record: VideoRecord, release: bool = False, then: Callable[[Connection], None] | None = None
    ) -> bool:
        """Store the state of a claimed order; return whether this replica still had it.

        `release` leaves it to others; `then` is a part of the transaction.
        """
        values = {"holder": None if release else self._holder.id, **_columns(record)}
        change = sa.update(videos).where(self._holds(record.id)).values(values)

        def work(db: Connection) -> bool:
            held = db.execute(change).rowcount > 0
            if held and then is not None:
                then(db)
            return held

        return await self._run(work)

    async def report(self, steps_done: Mapping[str, int]) -> set[str]:
        """Store how far videos are, for other replicas to tell; return which this one still has."""

        def work(db: Connection) -> set[str]:
            kept = set()
            for video_id, steps in steps_done.items():
                change = sa.update(videos).where(self._holds(video_id)).values(steps_done=steps)
                if db.execute(change).rowcount:
                    kept.add(video_id)
            return kept

        return await self._run(work)

    async def num_queued(self) -> int:
        """Return the length of the queue."""
        return await self._run(lambda db: _count(db, videos.c.status == "queued"))

    async def expired(self) -> Sequence[str]:
        """Return the finished videos that have expired."""

        def work(db: Connection) -> Sequence[str]:
            over = sa.and_(videos.c.status.not_in(UNFINISHED), videos.c.expires_at <= now(db))
            return db.scalars(sa.select(videos.c.id).where(over)).all()

        return await self._run(work)

    def _holds(self, video_id: str) -> "sa.ColumnElement[bool]":
        return sa.and_(videos.c.id == video_id, self._holder.holds(videos))


def clean(db: Connection, holder: Holder) -> tuple[set[str], set[str]]:
    """Delete expired orders that no server works on; return the ids of all others, and of completed ones."""
    db.execute(sa.delete(videos).where(videos.c.expires_at <= now(db), holder.is_free(db, videos.c.holder)))
    rows = db.execute(sa.select(videos.c.id, videos.c.status)).all()
    return {row.id for row in rows}, {row.id for row in rows if row.status == "completed"}


def _duplicate(db: Connection, idempotency: str | None, fingerprint: str | None) -> VideoJob | None:
    if idempotency is None:
        return None
    row = db.execute(sa.select(videos).where(videos.c.idempotency == idempotency)).first()
    record = None if row is None else _read(row)
    if row is None or record is None:
        return None
    if record.fingerprint != fingerprint:
        raise ConflictError(
            "This Idempotency-Key was used for a different request; use a new one.", "idempotency_key_reused"
        )
    return VideoJob(record, row.steps_done)


def _columns(record: VideoRecord) -> dict[str, Any]:
    """Return the record, and the fields of it that queries read."""
    names = ("owner", "created_ns", "expires_at", "status", "idempotency")
    text = RECORDS.dump_json(record).decode()
    return {**{name: getattr(record, name) for name in names}, "record": text}


def _read(row: Any) -> VideoRecord | None:
    try:
        return RECORDS.validate_json(row.record)
    except ValidationError:
        return None


def _count(db: Connection, *conditions: "sa.ColumnElement[bool]") -> int:
    return db.scalar(sa.select(sa.func.count()).select_from(videos).where(*conditions)) or 0
