"""Live worlds with an owner."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from worldmodel.serving.errors import ApiError
from worldmodel.serving.worlds.saved import Origin, PlayedStep, SavedWorld
from worldmodel.serving.worlds.service import World


@dataclass(frozen=True)
class CommittedStep:
    """The last step of a world, kept for a client that retries it."""

    step_id: int
    played: PlayedStep
    frames: np.ndarray


@dataclass(eq=False, frozen=True)
class Slot:
    """A reservation for one live world, counted against the limits until `WorldRegistry.release`."""

    owner: str


@dataclass(eq=False)
class OwnedWorld:
    """A live world of an owner, who addresses it by id or plays it on a socket."""

    world: World
    origin: Origin
    slot: Slot
    created_at: int = field(default_factory=lambda: int(time.time()))
    used_at: float = field(default_factory=time.monotonic)
    """When the last request for it arrived, or the last call that computes ended."""
    last_step: CommittedStep | None = None
    unsaved: int = 0
    """Changes since it was stored."""
    ended: ApiError | None = None
    """Why there is no such world here any more: it was deleted, or has moved to another replica."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    running: "asyncio.Task[Any] | None" = None
    """The call that is in progress; closing the world cancels it."""
    progress: float | None = None
    """Share of the denoising steps of the round that is being played; None without one."""

    @property
    def idle_s(self) -> float:
        """Seconds without use; 0 during a call."""
        return 0.0 if self.lock.locked() else time.monotonic() - self.used_at

    def report(self, steps: int, total: int) -> None:
        """Record the progress of the round that is being played."""
        self.progress = steps / total

    @property
    def owner(self) -> str:
        """Caller id of the owner."""
        return self.slot.owner

    def saved(self, snapshot: str | None = None) -> SavedWorld:
        """Return the world, or one of its snapshots, as it is stored."""
        last = self.last_step.played if self.last_step is not None and snapshot is None else None
        return SavedWorld(self.world.settings, self.world.state(snapshot), self.origin, last)
