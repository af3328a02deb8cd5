"""Methods that run in a transaction of their object's database."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection, Engine
from sqlalchemy.dialects import postgresql, sqlite

from worldmodel.database import transaction


class HasEngine(Protocol):
    """An object with a database."""

    engine: Engine


S = TypeVar("S", bound=HasEngine)
P = ParamSpec("P")
R = TypeVar("R")


def writes(method: Callable[Concatenate[S, Connection, P], R]) -> Callable[Concatenate[S, P], R]:
    """Run a method that gets a connection in a transaction, again if the database restarts."""

    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        return transaction(self.engine, lambda db: method(self, db, *args, **kwargs))

    return call


def reads(method: Callable[Concatenate[S, Connection, P], R]) -> Callable[Concatenate[S, P], R]:
    """Do the same for a method that only reads, which waits for no writer."""

    @functools.wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        return transaction(self.engine, lambda db: method(self, db, *args, **kwargs), read_only=True)

    return call


def insert(db: Connection, table: sa.Table) -> Any:
    """Return an insert statement that can say what to do about rows that exist."""
    return (postgresql if db.dialect.name == "postgresql" else sqlite).insert(table)
