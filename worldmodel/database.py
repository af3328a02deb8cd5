"""Connections to SQL databases: those of flows, and the one that the replicas of a server share.

SQLite is one file on a local disk, for the processes of one machine; PostgreSQL serves many machines. A
committed transaction survives the death of any process, and of the machine. A database that restarts is
waited for.
"""

import functools
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy import URL, Connection, Engine, Table, create_engine, event, exc, func, make_url, select
from sqlalchemy.dialects import postgresql, sqlite

from worldmodel.errors import ConfigError, DatabaseError, pip_install
from worldmodel.retry import Backoff

T = TypeVar("T")
P = ParamSpec("P")

RETRY_S = 60.0
"""Time for which a transaction is tried again while the database does not answer."""
BUSY_S = 30.0
"""Time for which a transaction of SQLite waits for another process's."""
SQLITE_TEMPORARY = {"SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL"}
POSTGRESQL_TEMPORARY = {"40001", "40P01", "53300", "55P03", "57P01", "57P02", "57P03", "57P05"}
"""Conflicts and deadlocks, too many connections, and a server that stops, crashed or starts."""
POSTGRESQL_REFUSED = ("authentication failed", "does not exist", "pg_hba.conf", "invalid connection option")
"""Failures to connect that have no code and that waiting does not mend."""
SCHEMA_LOCK = 5_171_802_011
"""Number of PostgreSQL's advisory lock of whoever changes the schema."""


def connect(url: str | URL) -> Engine:
    """Return an engine for a database; it connects, and creates SQLite's file, when it is first used.

    Run transactions by `transaction`. Each process needs its own engine.

    Args:
        url: `sqlite:///catalog.db` (four slashes for an absolute path) or `postgresql://user@host/database`.

    Raises:
        ConfigError: the URL is wrong, or the database's driver is not installed.
    """
    try:
        parsed = make_url(url)
    except exc.ArgumentError:
        raise ConfigError(
            f"{url!r} is not the URL of a database; write sqlite:///FILE or postgresql://USER@HOST/DATABASE."
        ) from None
    match parsed.drivername:
        case "sqlite":
            return _connect_sqlite(parsed)
        case "postgresql" | "postgresql+psycopg":
            return _connect_postgresql(parsed.set(drivername="postgresql+psycopg"))
    raise ConfigError(
        f"Databases of the kind {parsed.drivername!r} are not supported; use sqlite or postgresql."
    )


def _connect_sqlite(url: URL) -> Engine:
    if url.database in (None, "", ":memory:"):
        raise ConfigError(
            "A SQLite database in memory is not seen by other processes; name a file, as in sqlite:///a.db."
        )
    engine = create_engine(url, connect_args={"timeout": BUSY_S})

    @event.listens_for(engine, "do_connect")
    def make_folder(*_: object) -> None:
        try:
            Path(str(url.database)).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatabaseError(
                f"The folder of the database {url.database} cannot be made ({error.strerror}); name another."
            ) from None

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, record: object) -> None:
        connection.isolation_level = None  # transactions begin below, not where the driver guesses
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads first and asks for the write lock later can fail without waiting.
        reads = connection.get_execution_options().get("read_only", False)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def _connect_postgresql(url: URL) -> Engine:
    options: dict[str, Any] = {
        "prepare_threshold": None,  # a prepared statement's plan does not know its LIMIT
        "connect_timeout": 10,
        "keepalives_idle": 30,
        "tcp_user_timeout": 30_000,
    }
    try:
        return create_engine(url, connect_args=options)
    except ModuleNotFoundError:
        raise ConfigError(f"PostgreSQL needs its driver: {pip_install('pg')}.") from None


def transaction(
    engine: Engine, work: Callable[[Connection], T], *, read_only: bool = False, retry_s: float = RETRY_S
) -> T:
    """Run `work` in a transaction and return its result; while the database is away, try again.

    A connection that is lost during the commit leaves open whether it happened, so `work` may take effect
    twice and must allow for it. `read_only` lets it run beside a writer of SQLite.

    Raises:
        DatabaseError: it did not answer for `retry_s` seconds, or refuses: no access, a full disk.
    """
    backoff = Backoff(first_s=0.05, longest_s=2.0, timeout_s=retry_s)
    while True:
        try:
            with engine.connect().execution_options(read_only=read_only) as connection, connection.begin():
                return work(connection)
        except (exc.InterfaceError, exc.DatabaseError) as error:
            if not _is_temporary(error):
                if isinstance(error, exc.OperationalError) or _is_strange_file(error):
                    raise DatabaseError(
                        f"The database {shown(engine)} cannot be used: {_reason(error)}."
                    ) from error
                raise
            pause_s = backoff.pause_s()
            if pause_s is None:
                raise DatabaseError(
                    f"The database {shown(engine)} has not answered for {retry_s:g} s ({_reason(error)}); "
                    "try again when it does."
                ) from error
        time.sleep(pause_s)


class HasEngine(Protocol):
    """An object with a database."""

    engine: Engine


S = TypeVar("S", bound=HasEngine)


def writes(method: Callable[Concatenate[S, Connection, P], T]) -> Callable[Concatenate[S, P], T]:
    """Run a method that gets a connection in a transaction, again if the database restarts."""

    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return transaction(self.engine, lambda db: method(self, db, *args, **kwargs))

    return call


def reads(method: Callable[Concatenate[S, Connection, P], T]) -> Callable[Concatenate[S, P], T]:
    """Do the same for a method that only reads, which waits for no writer."""

    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return transaction(self.engine, lambda db: method(self, db, *args, **kwargs), read_only=True)

    return call


def insert(db: Connection, table: Table) -> Any:
    """Return an insert statement that can say what to do about rows that exist."""
    return (postgresql if db.dialect.name == "postgresql" else sqlite).insert(table)


def lock_schema(db: Connection) -> None:
    """Let no other process change the schema until the transaction ends; SQLite has one writer anyway."""
    if db.dialect.name == "postgresql":
        db.execute(select(func.pg_advisory_xact_lock(SCHEMA_LOCK)))


def _is_temporary(error: exc.DBAPIError) -> bool:
    cause = error.orig
    if isinstance(cause, sqlite3.Error):
        return getattr(cause, "sqlite_errorname", "").startswith(tuple(SQLITE_TEMPORARY))
    if error.connection_invalidated:
        return True
    if state := getattr(cause, "sqlstate", None):
        return state in POSTGRESQL_TEMPORARY or state.startswith("08")
    refused = any(sign in str(cause) for sign in POSTGRESQL_REFUSED)
    return isinstance(error, exc.OperationalError) and not refused


def _is_strange_file(error: exc.DBAPIError) -> bool:
    return getattr(error.orig, "sqlite_errorname", "") in ("SQLITE_NOTADB", "SQLITE_CORRUPT")


def shown(engine: Engine) -> str:
    """Return the database's URL for messages, without its password."""
    return engine.url.render_as_string(hide_password=True)


def _reason(error: exc.DBAPIError) -> str:
    return str(error.orig).strip().splitlines()[0].rstrip(".")
