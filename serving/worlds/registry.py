"""Worlds that clients hold by name over HTTP: whose they are, and a retry that never steps twice."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np

from worldmodel.serving.auth import Limiter, WorldLease
from worldmodel.serving.errors import Conflict, DeadlineExceeded, NotFound, TooManyRequests
from worldmodel.serving.metrics import Metrics
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.worlds.service import World, WorldService, WorldSettings
from worldmodel.types import Action

Result = TypeVar("Result")


class StepAlreadyCommitted(Conflict):
    """A step was sent again with another action."""

    code = "step_already_committed"


class StepOutOfOrder(Conflict):
    """A step is not the one that follows."""

    code = "step_out_of_order"


@dataclass(frozen=True)
class Origin:
    """What a world began with."""

    frames: np.ndarray | None = None
    text: str | None = None


@dataclass(frozen=True)
class Committed:
    """The last step of a world, kept for a client that did not get its answer."""

    step_id: int
    action: Action
    frames: np.ndarray


@dataclass(eq=False)
class HeldWorld:
    """A world and what HTTP adds to it."""

    world: World
    owner: str
    origin: Origin
    lease: WorldLease
    created_at: int = field(default_factory=lambda: int(time.time()))
    committed: Committed | None = None
    closed: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    work: "asyncio.Task[Any] | None" = None


class HeldWorlds:
    """All worlds that clients hold by name; those of other doors (videos, sockets) are not among them."""

    def __init__(
        self, service: WorldService, config: ServerConfig, limiter: Limiter, metrics: Metrics
    ) -> None:
        self.service, self.config, self.limiter, self.metrics = service, config, limiter, metrics
        self._held: dict[str, HeldWorld] = {}
        self._starting = 0

    # ---- finding ---------------------------------------------------------------------------------------

    def get(self, owner: str, identity: str) -> HeldWorld:
        """Find a world of its owner.

        Raises:
            NotFound: there is none, it was closed, or it is somebody else's.
        """
        held = self._held.get(identity)
        if held is None or held.owner != owner or identity not in self.service.worlds:
            raise NotFound(
                "There is no such world: it was deleted, or closed after "
                f"{self.config.idle_timeout_s:g} s without use; start another."
            )
        return held

    def owned(self, owner: str) -> list[HeldWorld]:
        """Return an owner's live worlds, oldest first."""
        return [
            held for name, held in self._held.items() if held.owner == owner and name in self.service.worlds
        ]

    # ---- beginning and ending --------------------------------------------------------------------------

    async def start(self, owner: str, origin: Origin, settings: WorldSettings) -> HeldWorld:
        """Start a world.

        Raises:
            InputError: there is nothing to start from, or two things.
            TooManyRequests: the owner or the server has as many worlds as it may.
            DeadlineExceeded: it took too long.
        """
        began = time.monotonic()
        async with self._place(owner) as lease:
            world = await self._in_time(
                self.service.start(origin.frames, text=origin.text, **asdict(settings))
            )
        self.metrics.first_chunk(time.monotonic() - began)
        return self._hold(world, owner, origin, lease)

    async def fork(self, held: HeldWorld) -> HeldWorld:
        """Return a second world that goes its own way from here.

        Raises:
            TooManyRequests: the owner or the server has as many worlds as it may.
        """
        async with self._place(held.owner) as lease, self._turn(held):
            world = held.world.fork()
        return self._hold(world, held.owner, held.origin, lease)

    def close(self, held: HeldWorld) -> None:
        """End a world; work that is under way stops before its next denoising step."""
        held.closed = True
        if held.work is not None:
            held.work.cancel()
        held.world.close()
        held.lease.release()
        held.committed = None
        self._held.pop(held.world.id, None)

    def sweep(self) -> None:
        """Close worlds that nobody has used for a while."""
        self.service.sweep(self.config.idle_timeout_s)
        for held in list(self._held.values()):
            if held.world.id not in self.service.worlds:
                self.close(held)

    # ---- what is done with one -------------------------------------------------------------------------

    async def step(self, held: HeldWorld, step_id: int, action: str | Mapping[str, Any] | None) -> np.ndarray:
        """Play round `step_id`, or return its frames again if it is the last one played.

        Raises:
            StepAlreadyCommitted: it was played with another action.
            StepOutOfOrder: it is neither the last round nor the next one.
            InputError: the model does not take such an action.
            NotFound: the world was deleted meanwhile.
            DeadlineExceeded: it took too long.
        """
        act = Action.of(action)
        async with self._turn(held):
            last, following = held.committed, held.world.round + 1
            if last is not None and last.step_id == step_id:
                if last.action != act:
                    raise StepAlreadyCommitted(
                        f"Step {step_id} was played with another action; the next step_id is {following}."
                    )
                return last.frames
            if step_id != following:
                raise StepOutOfOrder(f"step_id is {step_id}; the next step of this world is {following}.")
            began = time.monotonic()
            frames = await self._work(held, held.world.step(act))
            self.metrics.chunk(time.monotonic() - began)
            held.committed = Committed(step_id, act, frames)
            return frames

    async def reset(self, held: HeldWorld, origin: Origin | None) -> np.ndarray:
        """Start anew, from something else or from what the world began with; returns what is seen first."""
        async with self._turn(held):
            origin = origin or held.origin
            frames = await self._work(held, held.world.reset(origin.frames, text=origin.text))
            held.origin, held.committed = origin, None
            return frames

    async def snapshot(self, held: HeldWorld) -> tuple[str, int]:
        """Keep the present moment; returns its name and round."""
        async with self._turn(held):
            return held.world.snapshot(), held.world.round

    async def restore(self, held: HeldWorld, name: str) -> None:
        """Go back to a kept moment.

        Raises:
            InputError: the world keeps no such moment.
        """
        async with self._turn(held):
            held.world.restore(name)
            held.committed = None

    async def describe(self, held: HeldWorld, question: str | None) -> tuple[str, int]:
        """Say what is seen, or answer a question; returns the words and the round they are about."""
        async with self._turn(held):
            return await self._work(held, held.world.describe(question)), held.world.round

    async def infer_action(self, held: HeldWorld) -> tuple[str, int]:
        """Say which action led to what is seen now; returns the words and the round they are about."""
        async with self._turn(held):
            return await self._work(held, held.world.infer_action()), held.world.round

    # ---- worlds that live for one request ----------------------------------------------------------------

    async def answer(
        self, owner: str, frames: np.ndarray, settings: WorldSettings, question: str | None = None
    ) -> str:
        """Answer a question about an observation, or describe it."""
        async with self._place(owner) as lease:
            try:
                return await self._in_time(self._answer(frames, settings, question))
            finally:
                lease.release()

    async def imagine(self, owner: str, text: str, each: Sequence[WorldSettings]) -> list[np.ndarray]:
        """Return a picture of a described scene for each of the settings, uint8 `[h, w, 3]`."""
        async with self._place(owner) as lease:
            try:
                pictures = asyncio.gather(*(self._imagine(text, settings) for settings in each))
                return await self._in_time(pictures)
            finally:
                lease.release()

    async def _answer(self, frames: np.ndarray, settings: WorldSettings, question: str | None) -> str:
        world = await self.service.start(frames, **asdict(settings))
        try:
            return await world.describe(question)
        finally:
            world.close()

    async def _imagine(self, text: str, settings: WorldSettings) -> np.ndarray:
        world = await self.service.start(text=text, **asdict(settings))
        world.close()
        return world.last_frames[-1]

    # ---- how -------------------------------------------------------------------------------------------

    def _hold(self, world: World, owner: str, origin: Origin, lease: WorldLease) -> HeldWorld:
        held = HeldWorld(world, owner, origin, lease)
        self._held[world.id] = held
        return held

    @asynccontextmanager
    async def _place(self, owner: str) -> AsyncIterator[WorldLease]:
        """Keep a place for one more world; it is given back when the block fails."""
        if len(self.service.worlds) + self._starting >= self.config.max_worlds:
            raise TooManyRequests(
                f"{self.config.max_worlds} worlds are live, the most allowed; try again later.", 10.0
            )
        lease = self.limiter.open_world(owner)
        self._starting += 1
        try:
            yield lease
        except BaseException:
            lease.release()
            raise
        finally:
            self._starting -= 1

    @asynccontextmanager
    async def _turn(self, held: HeldWorld) -> AsyncIterator[None]:
        """Wait for one's turn with a world that is still there."""
        async with held.lock:
            if held.closed:
                raise _gone()
            yield

    async def _work(self, held: HeldWorld, work: Coroutine[Any, Any, Result]) -> Result:
        """Do something long with a world, which deleting the world ends."""
        held.work = asyncio.ensure_future(self._in_time(work))
        try:
            return await held.work
        except asyncio.CancelledError:
            if held.closed:
                raise _gone() from None
            raise
        finally:
            held.work = None

    async def _in_time(self, work: Awaitable[Result]) -> Result:
        limit = self.config.step_deadline_s
        try:
            async with asyncio.timeout(limit):
                return await work
        except TimeoutError:
            raise DeadlineExceeded(
                f"This took longer than {limit:g} s and was stopped; try again, or ask for fewer steps."
            ) from None


def _gone() -> NotFound:
    return NotFound("This world was deleted meanwhile; start another.")
