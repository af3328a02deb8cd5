"""A topic in memory, for the threads of one process."""

import heapq
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from worldmodel.flow.topics.base import Claim, Message


@dataclass
class _Entry:
    message: Message
    attempt: int = 0
    owner: str = ""
    hidden_until: float = 0.0


@dataclass(eq=False)
class _Queue:
    """What all topics of one name share."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    entries: dict[str, _Entry] = field(default_factory=dict)
    waiting: list[tuple[int, str]] = field(default_factory=list)
    """A heap of (ordinal, key)."""
    hidden: list[tuple[float, str]] = field(default_factory=list)
    """A heap of (time, key) of claimed and delayed ones; entries whose time differs are out of date."""

    def release(self, now: float) -> None:
        """Let messages wait whose lease or delay has ended."""
        while self.hidden and self.hidden[0][0] <= now:
            hidden_until, key = heapq.heappop(self.hidden)
            entry = self.entries.get(key)
            if entry and entry.hidden_until == hidden_until:
                entry.hidden_until = 0.0
                heapq.heappush(self.waiting, (entry.message.ordinal, key))

    def hide(self, entry: _Entry, until: float) -> None:
        entry.hidden_until = until
        heapq.heappush(self.hidden, (until, entry.message.key))

    def held(self, claims: Sequence[Claim]) -> list[_Entry]:
        """Return the entries of those claims that nobody else has got."""
        found = [self.entries.get(claim.message.key) for claim in claims]
        return [
            entry for entry, claim in zip(found, claims, strict=True) if entry and entry.owner == claim.handle
        ]


_queues: WeakValueDictionary[tuple[str, str], _Queue] = WeakValueDictionary()
_opening = threading.Lock()


class MemoryTopic:
    """A topic in memory; it is gone when its last user is.

    Args:
        url: `memory:`, or `memory:NAME` for one of several sets of topics.
        name: name of the topic.
    """

    def __init__(self, url: str, name: str) -> None:
        with _opening:
            self.queue = _queues.setdefault((url, name), _Queue())

    def publish(self, messages: Sequence[Message]) -> None:
        """Add messages, except those whose key is waiting or claimed."""
        with self.queue.changed:
            for message in messages:
                if message.key not in self.queue.entries:
                    self.queue.entries[message.key] = _Entry(message)
                    heapq.heappush(self.queue.waiting, (message.ordinal, message.key))
            self.queue.changed.notify_all()

    def claim(self, count: int, lease_s: float, wait_s: float = 0.0) -> list[Claim]:
        """Take the messages with the lowest ordinals; wait up to `wait_s` seconds for the first one."""
        deadline = time.monotonic() + wait_s
        with self.queue.changed:
            while True:
                now = time.monotonic()
                self.queue.release(now)
                claims = self._take(count, now + lease_s)
                if claims or now >= deadline:
                    return claims
                wake = min(deadline, self.queue.hidden[0][0]) if self.queue.hidden else deadline
                self.queue.changed.wait(wake - now)

    def _take(self, count: int, until: float) -> list[Claim]:
        owner = uuid.uuid4().hex
        claims: list[Claim] = []
        while self.queue.waiting and len(claims) < count:
            entry = self.queue.entries.get(heapq.heappop(self.queue.waiting)[1])
            if entry and not entry.hidden_until:  # it may have been acknowledged after its lease ended
                entry.owner = owner
                entry.attempt += 1
                self.queue.hide(entry, until)
                claims.append(Claim(entry.message, entry.attempt, owner))
        return claims

    def extend(self, claims: Sequence[Claim], lease_s: float) -> None:
        """Renew the leases of those claims that nobody else has got."""
        with self.queue.changed:
            for entry in self.queue.held(claims):
                self.queue.hide(entry, time.monotonic() + lease_s)

    def ack(self, claims: Sequence[Claim]) -> None:
        """Remove the messages of those claims that nobody else has got."""
        with self.queue.changed:
            for entry in self.queue.held(claims):
                del self.queue.entries[entry.message.key]

    def nack(self, claims: Sequence[Claim], delay_s: float = 0.0) -> None:
        """Return those messages that nobody else has got, to be claimed after a delay."""
        with self.queue.changed:
            for entry in self.queue.held(claims):
                self.queue.hide(entry, time.monotonic() + delay_s)
            self.queue.changed.notify_all()

    def depth(self) -> int:
        """Return the number of messages, claimed ones among them."""
        return len(self.queue.entries)

    def close(self) -> None:
        """Do nothing; messages that are claimed wait until their leases end."""
