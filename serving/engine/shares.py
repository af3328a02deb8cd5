"""Who asks for calls to the model and for what, and how the time of the model is divided among them.

Start-time fair queueing (Goyal, Vin and Chen 1996, doi:10.1145/248156.248171): every flow has a virtual time,
which a call advances by its duration over the flow's weight, and the flow that is furthest behind goes first.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

Purpose = Literal["live", "step", "chat", "image", "video"]
WEIGHTS: dict[Purpose, float] = {"live": 16.0, "step": 8.0, "chat": 2.0, "image": 2.0, "video": 1.0}
"""Relative time that a key gets for each purpose, where there is not enough for all.

A step beside the chats of another key gets 4 of 5 parts of the time, and so takes at least 5/4 of its time
alone; with 2 of 3 it would be 3/2, and calls that cannot be interrupted, such as the first of a chat, come on
top at each of its stages.
"""

FOLLOWS_S = 0.005
"""Time within which a call of a round follows the one before it."""
RECENT_S = 1.0
"""Time after its last call for which a flow is expected to ask again."""


@dataclass(eq=False)
class Asker:
    """A request, a session or an order: whose it is, and what for."""

    key: str = ""
    purpose: Purpose = "step"
    rounds: int = 0
    """Rounds in progress, each of which is a chain of calls."""
    served_at: float = 0.0
    """When its last call ended."""


_ASKER: ContextVar[Asker | None] = ContextVar("asker", default=None)
_SERVER = Asker()


def ask_as(key: str, purpose: Purpose) -> None:
    """Make all further calls of the current task, and of tasks that it starts, those of a key."""
    _ASKER.set(Asker(key, purpose))


def current_asker() -> Asker:
    """Return who the current task asks for; the server itself, if nobody said."""
    return _ASKER.get() or _SERVER


@contextmanager
def asking_for(purpose: Purpose) -> Iterator[None]:
    """Make the calls of the block those of another purpose of the same key."""
    asker = current_asker()
    token = _ASKER.set(asker if asker.purpose == purpose else Asker(asker.key, purpose))
    try:
        yield
    finally:
        _ASKER.reset(token)


@contextmanager
def round_in_progress() -> Iterator[None]:
    """Announce that the calls of the block follow each other at once."""
    asker = current_asker()
    asker.rounds += 1
    try:
        yield
    finally:
        asker.rounds -= 1


@dataclass(eq=False)
class Flow:
    """The calls of one key for one purpose."""

    key: str
    purpose: Purpose
    weight: float = 1.0
    virtual_s: float = 0.0
    """Time that it has had, over its weight."""
    jobs: list[Any] = field(default_factory=list)
    """Those that wait."""
    askers: set[Asker] = field(default_factory=set)
    active_at: float = field(default_factory=time.monotonic)
    """When a job of it last arrived or ended."""

    def follows_within_s(self, now: float) -> float:
        """Return for how long its next call is still expected to follow the last one."""
        self.askers = {asker for asker in self.askers if asker.rounds}
        return max((asker.served_at + FOLLOWS_S - now for asker in self.askers), default=0.0)

    def recent(self, now: float) -> bool:
        """Return whether it has waiting jobs, or had some a moment ago."""
        return bool(self.jobs) or now - self.active_at < RECENT_S
