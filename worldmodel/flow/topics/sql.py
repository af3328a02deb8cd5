"""A topic in a table of an SQL database: one row per message, in the order of `ordinal`.

A key is in a topic at most once, so no two workers ever have messages of one key, and the order per key is
that of publishing. Leases are measured by one clock: PostgreSQL's, or that of SQLite's machine.
"""

import os
import socket
import time
import uuid
from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Float,
    Select,
    and_,
    bindparam,
    cast,
    delete,
    func,
    literal,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from worldmodel.database import connect, transaction
from worldmodel.flow.migrations import migrate
from worldmodel.flow.schema import message
from worldmodel.flow.topics.base import Claim, Message

DEPTH_LIMIT = 100_000
"""Up to this many messages are counted: counting more takes too long to do often."""
RELEASE_EVERY_S = 1.0
"""How often a busy topic looks for leases that ended."""
RELEASE_COUNT = 256
"""How many it ends at a time, so that those of thousands delay no claim."""
OTHER_PLANS = ("enable_sort", "enable_bitmapscan", "enable_seqscan")
POLL_S = (0.02, 0.5)
"""Shortest and longest pause between two looks into an empty topic."""
CLOCK_STEP_S = 5.0
"""A clock that was set back by less than this is waited for."""


class SqlTopic:
    """A topic in the database at `url`, which is made if there is none.

    Raises:
        ConfigError: the URL is wrong.
        FlowError: its tables are those of another program, or of a newer version.
        DatabaseError: it cannot be used.
    """

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self.engine = connect(url)
        self.on_postgresql = self.engine.dialect.name == "postgresql"
        self.owner = f"{socket.gethostname()}:{os.getpid()}"
        self.released_at = float("-inf")
        migrate(self.engine)

    def publish(self, messages: Sequence[Message]) -> None:
        """Add messages, except those whose key is waiting or claimed."""
        if not messages:
            return
        dialect = postgresql if self.on_postgresql else sqlite
        rows = [
            {"topic": self.name, "key": one.key, "ordinal": one.ordinal}
            for one in sorted(messages, key=lambda one: one.key)  # locks are always taken in this order
        ]
        statement = dialect.insert(message).on_conflict_do_nothing()
        transaction(self.engine, lambda connection: connection.execute(statement, rows))

    def claim(self, count: int, lease_s: float, wait_s: float = 0.0) -> list[Claim]:
        """Take the messages with the lowest ordinals; wait up to `wait_s` seconds for the first one."""
        deadline = time.monotonic() + wait_s
        pause_s = POLL_S[0]
        while True:
            claims = self._claim(count, lease_s)
            if claims or time.monotonic() >= deadline:
                return claims
            time.sleep(max(0.0, min(pause_s, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, POLL_S[1])

    def extend(self, claims: Sequence[Claim], lease_s: float) -> None:
        """Renew the leases of those claims that nobody else has got."""
        self._hide(claims, lease_s)

    def ack(self, claims: Sequence[Claim]) -> None:
        """Remove the messages of those claims that nobody else has got."""
        if claims:
            statement = delete(message).where(self._is_held())
            transaction(self.engine, lambda connection: connection.execute(statement, _parameters(claims)))

    def nack(self, claims: Sequence[Claim], delay_s: float = 0.0) -> None:
        """Return those messages that nobody else has got, to be claimed after a delay."""
        self._hide(claims, delay_s)

    def depth(self) -> int:
        """Return the number of messages, claimed ones among them; above 100,000, at least that number."""
        waits = message.c.hidden_until.is_(None)

        def work(connection: Connection) -> int:
            self._set_planner(connection)
            mine = select(literal(1)).where(message.c.topic == self.name)
            some = [
                mine.where(state).limit(DEPTH_LIMIT).subquery() for state in (waits, ~waits)
            ]  # two indexes
            return sum(
                connection.execute(select(func.count()).select_from(each)).scalar_one() for each in some
            )

        return transaction(self.engine, work, read_only=True)

    def close(self) -> None:
        """Close the connections; messages that are claimed wait until their leases end."""
        self.engine.dispose()

    def _now(self) -> ColumnElement[float]:
        if self.on_postgresql:
            return cast(func.extract("epoch", func.statement_timestamp()), Float)
        return literal(time.time())

    def _set_planner(self, connection: Connection) -> None:
        """Have PostgreSQL read the first entries of an index, also without statistics of the table."""
        if self.on_postgresql:
            off = [func.set_config(name, "off", True) for name in OTHER_PLANS]
            connection.execute(select(*off))

    def _is_held(self) -> ColumnElement[bool]:
        """Return the condition that a message belongs to a claim still: another claim would be its owner."""
        key, owner = bindparam("held_key"), bindparam("held_owner")
        return and_(message.c.topic == self.name, message.c.key == key, message.c.owner == owner)

    def _hide(self, claims: Sequence[Claim], seconds: float) -> None:
        if claims:
            now = self._now()
            times = {"hidden_since": now, "hidden_until": now + seconds}
            statement = update(message).where(self._is_held()).values(times)
            transaction(self.engine, lambda connection: connection.execute(statement, _parameters(claims)))

    def _claim(self, count: int, lease_s: float) -> list[Claim]:
        owner = f"{self.owner}:{uuid.uuid4().hex}"

        def work(connection: Connection) -> list[Any]:
            rows: list[Any] = []
            self._set_planner(connection)
            if time.monotonic() < self.released_at + RELEASE_EVERY_S:
                rows = self._take(connection, owner, count, lease_s)
            if len(rows) < count:
                self._release(connection)
                rows += self._take(connection, owner, count - len(rows), lease_s)
            return rows

        rows = transaction(self.engine, work)
        rows.sort(key=lambda row: (row.ordinal, row.key))
        return [Claim(Message(row.key, row.ordinal), row.attempt, owner) for row in rows]

    def _take(self, connection: Connection, owner: str, count: int, lease_s: float) -> list[Any]:
        waiting = select(message.c.key).where(message.c.topic == self.name, message.c.hidden_until.is_(None))
        first = waiting.order_by(message.c.ordinal, message.c.key).limit(count)
        now = self._now()
        return self._update(
            connection,
            first,
            owner=owner, attempt=message.c.attempt + 1, hidden_since=now, hidden_until=now + lease_s,
        )  # fmt: skip

    def _release(self, connection: Connection) -> None:
        """Let messages wait again whose lease or delay ended, or began in the future of a clock set back."""
        now, since, until = self._now(), message.c.hidden_since, message.c.hidden_until
        hidden = select(message.c.key).where(message.c.topic == self.name, until.is_not(None))
        ended = hidden.where(until <= now).order_by(until)
        ahead = hidden.where(since > now + CLOCK_STEP_S).order_by(since)
        for keys in (ended, ahead):
            self._update(connection, keys.limit(RELEASE_COUNT), hidden_since=None, hidden_until=None)
        self.released_at = time.monotonic()

    def _update(self, connection: Connection, keys: Select[tuple[str]], **values: Any) -> list[Any]:
        """Update the messages of these keys, except those that another transaction is updating."""
        # Materialized, or the planner may run it again for each row, and lock more of them than its limit.
        found = keys.with_for_update(skip_locked=True).cte("found").prefix_with("MATERIALIZED")
        statement = (
            update(message)
            .where(message.c.topic == self.name, message.c.key.in_(select(found.c.key)))
            .values(values)
            .returning(message.c.key, message.c.ordinal, message.c.attempt)
        )
        return list(connection.execute(statement).all())


def _parameters(claims: Sequence[Claim]) -> list[dict[str, str]]:
    held = sorted((claim.message.key, claim.handle) for claim in claims)
    return [{"held_key": key, "held_owner": owner} for key, owner in held]
