"""The database of a server, which replicas share: SQLite on one machine, PostgreSQL for many."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import URL, Connection
from sqlalchemy.exc import SQLAlchemyError

from worldmodel.database import connect, lock_schema, transaction
from worldmodel.errors import DatabaseError
from worldmodel.serving.errors import UnavailableError

T = TypeVar("T")

RETRY_S = 2.0
"""How long a request waits for a database that does not answer."""
START_RETRY_S = 60.0
"""How long a server waits for it when it starts."""
NUM_CONNECTIONS = 4

METADATA = sa.MetaData()
replicas = sa.Table(
    "server_replicas",
    METADATA,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("model", sa.String, nullable=False),
    sa.Column("folder", sa.String, nullable=False),
    sa.Column("expires_at", sa.Double, nullable=False),
)
"""Servers, each until its lease expires, in seconds since 1970 of the database's clock."""
worlds = sa.Table(
    "server_worlds",
    METADATA,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("holder", sa.String, index=True),  # the replica that plays it; null: none
    sa.Column("wanted_by", sa.String),  # the replica that has a request for it
    sa.Column("round", sa.Integer, nullable=False),
    sa.Column("updated_at", sa.Double, nullable=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
)
"""The last stored state of every live world, as a file of `serving.worlds.saved`."""

videos = sa.Table(
    "server_videos",
    METADATA,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("owner", sa.String, nullable=False, index=True),
    sa.Column("created_ns", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.Double, nullable=False),
    sa.Column("status", sa.String, nullable=False, index=True),
    sa.Column("holder", sa.String),  # the replica that generates it; null: none
    sa.Column("idempotency", sa.String, unique=True),
    sa.Column("steps_done", sa.Integer, nullable=False),
    sa.Column("record", sa.Text, nullable=False),
)
"""Orders of videos; `record` is a `VideoRecord` as JSON, of which other columns repeat fields."""


class Database:
    """Runs transactions in threads of its own; uploads and encoders cannot keep a heartbeat waiting."""

    def __init__(self, url: str | URL) -> None:
        """Connect, and create the tables if there are none.

        Raises:
            ConfigError: the URL is wrong, or the database's driver is not installed.
            DatabaseError: the database does not answer, or refuses.
        """
        self._engine = connect(url)
        self._threads = ThreadPoolExecutor(NUM_CONNECTIONS, "database")
        self.run_now(_create)

    def run_now(self, work: Callable[[Connection], T], *, retry_s: float = START_RETRY_S) -> T:
        """Run a transaction in this thread.

        Raises:
            DatabaseError: the database did not answer for `retry_s` seconds, or refuses.
        """
        return transaction(self._engine, work, retry_s=retry_s)

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Run a transaction to its end, also when the caller is cancelled: writes never overtake each other.

        Raises:
            UnavailableError: the database does not answer.
        """
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._threads, lambda: self.run_now(work, retry_s=RETRY_S))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            raise
        except (DatabaseError, SQLAlchemyError) as error:
            raise UnavailableError("The server's database does not answer; try again later.") from error

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown()
        self._engine.dispose()


def now(db: Connection) -> Any:
    """Return the time by one clock for all replicas: PostgreSQL's, or that of SQLite's machine."""
    if db.dialect.name == "postgresql":
        return sa.cast(sa.func.extract("epoch", sa.func.clock_timestamp()), sa.Double)
    return sa.literal(time.time())


def free(db: Connection, holder: "sa.Column[str]") -> "sa.ColumnElement[bool]":
    """Return the condition that no live replica holds a row."""
    live = sa.select(replicas.c.id).where(replicas.c.expires_at > now(db))
    return sa.or_(holder.is_(None), holder.not_in(live))


def _create(db: Connection) -> None:
    lock_schema(db)
    METADATA.create_all(db)
