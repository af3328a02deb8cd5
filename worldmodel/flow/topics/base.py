"""The interface of topics.

A topic is a queue of clip ids in front of a stage: at-least-once, in order of `ordinal`, and ordered per key.
It carries no payload: results are in the buffer and in the catalog, which is also what remembers that a clip
is done. A topic may therefore deliver twice, or be lost: the catalog can publish again what is not done.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Message:
    """A clip id on its way to a stage."""

    key: str
    """Id of the clip."""
    ordinal: int = 0
    """Where messages wait, those with lower numbers are delivered first, if the transport can choose."""


@dataclass(frozen=True)
class Claim:
    """A delivered message; nobody else gets it until it is returned or its lease ends."""

    message: Message
    attempt: int
    """Number of this delivery, from 1."""
    handle: Any = None
    """What the transport needs to acknowledge it."""


class Topic(Protocol):
    """A queue in front of one stage. Thread-safe; each process opens its own object."""

    def publish(self, messages: Sequence[Message]) -> None:
        """Add messages; one that is already waiting is not added again, where the transport can tell."""
        ...

    def claim(self, count: int, lease_s: float, wait_s: float = 0.0) -> list[Claim]:
        """Take up to `count` messages for `lease_s` seconds; wait up to `wait_s` for the first one."""
        ...

    def extend(self, claims: Sequence[Claim], lease_s: float) -> None:
        """Renew the leases of claims that are still worked on."""
        ...

    def ack(self, claims: Sequence[Claim]) -> None:
        """Remove messages whose work is recorded."""
        ...

    def nack(self, claims: Sequence[Claim], delay_s: float = 0.0) -> None:
        """Return messages, to be delivered again after a delay."""
        ...

    def depth(self) -> int:
        """Return the number of messages that wait or are claimed, for back-pressure; may be approximate."""
        ...

    def close(self) -> None:
        """Release connections; unacknowledged claims are delivered again."""
        ...
