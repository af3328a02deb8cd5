"""The database of a server, which replicas share: SQLite on one machine, PostgreSQL for many."""

import asyncio
import fcntl
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy import URL, Connection
from sqlalchemy.exc import SQLAlchemyError

from worldmodel.database import connect, lock_schema, transaction
from worldmodel.errors import DatabaseError, OutputError
from worldmodel.leases import lease_columns
from worldmodel.serving.errors import UnavailableError

T = TypeVar("T")

RETRY_S = 2.0
"""Time for which a request waits for a database that does not answer."""
START_RETRY_S = 60.0
"""Time for which a server waits for it at the start."""
NUM_CONNECTIONS = 4
LOCK_S = 2.0
"""How long a server waits for the one before it to leave its data folder."""

METADATA = sa.MetaData()
replicas = sa.Table(
    "server_replicas",
    METADATA,
    *lease_columns(),
    sa.Column("model", sa.String, nullable=False),
    sa.Column("folder", sa.String, nullable=False),
)
"""The leases of servers that share a database; a lone server has none."""
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

webhooks = sa.Table(
    "server_webhooks",
    METADATA,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("holder", sa.String),  # the replica that sends it; null: none
    sa.Column("due_at", sa.Double, nullable=False, index=True),
    sa.Column("expires_at", sa.Double, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
)
"""Messages that were not taken yet."""


class Database:
    """Runs transactions in threads of its own; uploads and encoders cannot keep a heartbeat waiting."""

    def __init__(self, url: str | URL, lock: "FolderLock | None" = None) -> None:
        """Connect, and create the tables if there are none; `lock` is released when it is closed.

        Raises:
            ConfigError: the URL is wrong, or the database's driver is not installed.
            DatabaseError: the database does not answer, or refuses.
        """
        self._engine, self._lock = connect(url), lock
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
            raise UnavailableError(
                "The server's database cannot be used at the moment; try again later."
            ) from error

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown()
        self._engine.dispose()
        if self._lock is not None:
            self._lock.release()


class FolderLock:
    """The lock of a data folder: one lone server has it, or any number of replicas.

    The kernel releases it when the process ends, however it does, so the next server never waits for a lease.
    """

    def __init__(self, folder: Path, shared: bool) -> None:
        """Lock a folder.

        Raises:
            OutputError: another server uses it, and they do not share a database.
        """
        # Not opened for writing, which would keep an operator from remounting the disk read-only.
        self._file = os.open(folder / ".lock", os.O_RDONLY | os.O_CREAT, 0o600)
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(self._file)
                    raise OutputError(
                        f"Another server uses the data folder {str(folder)!r}; choose another --data-dir, or "
                        "start both with the same --database."
                    ) from None
            time.sleep(0.05)

    def release(self) -> None:
        """Release the lock."""
        os.close(self._file)


def _create(db: Connection) -> None:
    lock_schema(db)
    METADATA.create_all(db)
