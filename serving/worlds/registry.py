"""Registry of live worlds: owners, limits, the idle timeout, and steps that are safe to retry."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np

from worldmodel.serving.engine.completion import Completion, TextParams, merge
from worldmodel.serving.errors import ConflictError, DeadlineExceededError, NotFoundError, RateLimitError
from worldmodel.serving.metrics import Metrics
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.worlds.service import World, WorldService, WorldSettings
from worldmodel.types import Action

Result = TypeVar("Result")


class StepAlreadyCommittedError(ConflictError):
    """The step was already played with another action."""

    code = "step_already_committed"


class StepOutOfOrderError(ConflictError):
    """The step is neither the last one nor the next one."""

    code = "step_out_of_order"


@dataclass(frozen=True)
class Origin:
    """The observation or the text that a world starts from."""

    frames: np.ndarray | None = None
    text: str | None = None


@dataclass(frozen=True)
class CommittedStep:
    """The last step of a world, kept for a client that retries it."""

    step_id: int
    action: Action
    frames: np.ndarray


@dataclass(eq=False, frozen=True)
class Slot:
    """A reservation for one live world, counted against the limits until `WorldRegistry.release`."""

    owner: str


@dataclass(eq=False)
class OwnedWorld:
    """A live world that its owner addresses by id."""

    world: World
    origin: Origin
    slot: Slot
    created_at: int = field(default_factory=lambda: int(time.time()))
    last_step: CommittedStep | None = None
    closed: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    running: "asyncio.Task[Any] | None" = None
    """The call that is in progress; closing the world cancels it."""

    @property
    def owner(self) -> str:
        """Caller id of the owner."""
        return self.slot.owner


class WorldRegistry:
    """All live worlds of a server, and their limits.

    Each of these takes one slot of `max_worlds` and `max_worlds_per_key`: a world with an id (also a fork),
    the world of a WebSocket session, and a chat or image request while it runs. Videos are limited as jobs.
    """

    def __init__(self, service: WorldService, config: ServerConfig, metrics: Metrics) -> None:
        self.service, self.config, self.metrics = service, config, metrics
        self._worlds: dict[str, OwnedWorld] = {}
        self._slots: set[Slot] = set()

    def __len__(self) -> int:
        return len(self._slots)

    # ---- limits ----------------------------------------------------------------------------------------

    def reserve(self, owner: str) -> Slot:
        """Reserve a slot for one more world.

        Raises:
            RateLimitError: the owner or the server has the maximum number of live worlds.
        """
        if len(self._slots) >= self.config.max_worlds:
            raise RateLimitError(
                f"The server has {self.config.max_worlds} live worlds, its maximum; try again later.", 10
            )
        num_owned = sum(slot.owner == owner for slot in self._slots)
        if num_owned >= self.config.max_worlds_per_key:
            raise RateLimitError(f"This key has {num_owned} live worlds, its maximum; delete one first.", 5)
        slot = Slot(owner)
        self._slots.add(slot)
        return slot

    def release(self, slot: Slot) -> None:
        """Release a slot; releasing it twice has no effect."""
        self._slots.discard(slot)

    @contextmanager
    def temporary(self, owner: str) -> Iterator[None]:
        """Reserve a slot for a world that exists only while the block runs."""
        slot = self.reserve(owner)
        try:
            yield
        finally:
            self.release(slot)

    # ---- lookup ----------------------------------------------------------------------------------------

    def get(self, owner: str, world_id: str) -> OwnedWorld:
        """Return a world of its owner.

        Raises:
            NotFoundError: there is no such world, it was closed, or another key owns it.
        """
        entry = self._worlds.get(world_id)
        if entry is None or entry.owner != owner:
            raise NotFoundError(
                "There is no world with this id: it was deleted, or closed after "
                f"{self.config.idle_timeout_s:g} s without use; start another."
            )
        return entry

    def owned_by(self, owner: str) -> list[OwnedWorld]:
        """Return an owner's worlds, oldest first."""
        return [entry for entry in self._worlds.values() if entry.owner == owner]

    # ---- life cycle ------------------------------------------------------------------------------------

    async def start(self, owner: str, origin: Origin, settings: WorldSettings) -> OwnedWorld:
        """Start a world.

        Raises:
            InputError: the origin has neither frames nor a text, or both.
            RateLimitError: the owner or the server has the maximum number of live worlds.
            DeadlineExceededError: starting took longer than the step deadline.
        """
        began = time.monotonic()
        slot = self.reserve(owner)
        try:
            world = await self._within_deadline(
                self.service.start(origin.frames, text=origin.text, **asdict(settings))
            )
        except BaseException:
            self.release(slot)
            raise
        self.metrics.first_chunk(time.monotonic() - began)
        return self._add(world, origin, slot)

    async def fork(self, entry: OwnedWorld) -> OwnedWorld:
        """Return an independent copy of a world.

        Raises:
            RateLimitError: the owner or the server has the maximum number of live worlds.
        """
        slot = self.reserve(entry.owner)
        try:
            async with self._locked(entry):
                world = entry.world.fork()
        except BaseException:
            self.release(slot)
            raise
        return self._add(world, entry.origin, slot)

    def close(self, entry: OwnedWorld) -> None:
        """Close a world; a call in progress stops before its next denoising step."""
        entry.closed = True
        if entry.running is not None:
            entry.running.cancel()
        entry.world.close()
        entry.last_step = None
        self.release(entry.slot)
        self._worlds.pop(entry.world.id, None)

    def sweep(self, idle_timeout_s: float | None = None) -> None:
        """Close the worlds that have been idle for longer than the timeout."""
        timeout_s = self.config.idle_timeout_s if idle_timeout_s is None else idle_timeout_s
        for entry in list(self._worlds.values()):
            if entry.world.idle_s > timeout_s:
                self.close(entry)

    def _add(self, world: World, origin: Origin, slot: Slot) -> OwnedWorld:
        entry = OwnedWorld(world, origin, slot)
        self._worlds[world.id] = entry
        return entry

    # ---- calls on one world ----------------------------------------------------------------------------

    async def step(
        self, entry: OwnedWorld, step_id: int, action: str | Mapping[str, Any] | None
    ) -> np.ndarray:
        """Play round `step_id`, or return its frames again if it is the last one played.

        Raises:
            StepAlreadyCommittedError: it was played with another action.
            StepOutOfOrderError: it is neither the last round nor the next one.
            InputError: the model does not accept the action.
            NotFoundError: the world was deleted in the meantime.
            DeadlineExceededError: it took longer than the step deadline.
        """
        act = Action.of(action)
        async with self._locked(entry):
            last, next_id = entry.last_step, entry.world.round + 1
            if last is not None and last.step_id == step_id:
                if last.action != act:
                    raise StepAlreadyCommittedError(
                        f"Step {step_id} was played with another action; the next step_id is {next_id}."
                    )
                return last.frames
            if step_id != next_id:
                raise StepOutOfOrderError(f"step_id is {step_id}; the next step_id is {next_id}.")
            began = time.monotonic()
            frames = await self._run(entry, entry.world.step(act))
            self.metrics.chunk(time.monotonic() - began)
            entry.last_step = CommittedStep(step_id, act, frames)
            return frames

    async def reset(self, entry: OwnedWorld, origin: Origin | None) -> np.ndarray:
        """Restart a world from `origin`, by default from its first one; return the first observation."""
        async with self._locked(entry):
            origin = origin or entry.origin
            frames = await self._run(entry, entry.world.reset(origin.frames, text=origin.text))
            entry.origin, entry.last_step = origin, None
            return frames

    async def snapshot(self, entry: OwnedWorld) -> tuple[str, int]:
        """Save the current state; return the snapshot's id and round."""
        async with self._locked(entry):
            return entry.world.snapshot(), entry.world.round

    async def restore(self, entry: OwnedWorld, snapshot: str) -> None:
        """Return to a snapshot.

        Raises:
            NotFoundError: the world has no such snapshot.
        """
        async with self._locked(entry):
            if snapshot not in entry.world.snapshots:
                raise NotFoundError("This world has no snapshot with this name; GET the world lists them.")
            entry.world.restore(snapshot)
            entry.last_step = None

    async def describe(self, entry: OwnedWorld, question: str | None) -> tuple[str, int]:
        """Describe the newest observation or answer a question; return the text and the round."""
        async with self._locked(entry):
            return await self._run(entry, entry.world.describe(question)), entry.world.round

    async def infer_action(self, entry: OwnedWorld) -> tuple[str, int]:
        """Return the action, in words, that led to the newest observation, and the round."""
        async with self._locked(entry):
            return await self._run(entry, entry.world.infer_action()), entry.world.round

    # ---- temporary worlds ------------------------------------------------------------------------------

    async def complete_frames(
        self,
        owner: str,
        frames: np.ndarray,
        settings: WorldSettings,
        question: str | None,
        params: Sequence[TextParams],
    ) -> AsyncGenerator[tuple[int, Completion], None]:
        """Describe an observation, or answer a question about it, once for each of `params`.

        Yields every text as it grows, with its index.
        """
        end = asyncio.get_running_loop().time() + self.config.step_deadline_s
        with self.temporary(owner):
            world = await self._within_deadline(self.service.start(frames, **asdict(settings)), end)
            try:
                async with aclosing(
                    merge([world.fork().complete(question, each) for each in params])
                ) as texts:
                    while (grown := await self._within_deadline(anext(texts, None), end)) is not None:
                        yield grown
            finally:
                world.close()

    async def generate_images(
        self,
        owner: str,
        prompt: str,
        settings: Sequence[WorldSettings],
        frames: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        """Generate one image for each of the settings, uint8 `[h, w, 3]`.

        The prompt describes the scene or, with frames, is the action that follows them.
        """

        async def generate(each: WorldSettings) -> np.ndarray:
            world = await self.service.start(frames, text=prompt if frames is None else None, **asdict(each))
            if frames is not None:
                await world.step(prompt)
            world.close()
            return world.last_frames[-1]

        with self.temporary(owner):
            return await self._within_deadline(asyncio.gather(*map(generate, settings)))

    # ---- locking, cancellation, deadlines --------------------------------------------------------------

    @asynccontextmanager
    async def _locked(self, entry: OwnedWorld) -> AsyncIterator[None]:
        """Serialize the calls on one world."""
        async with entry.lock:
            if entry.closed:
                raise _deleted()
            yield

    async def _run(self, entry: OwnedWorld, call: Coroutine[Any, Any, Result]) -> Result:
        """Await a call that closing the world cancels."""
        entry.running = asyncio.ensure_future(self._within_deadline(call))
        try:
            return await entry.running
        except asyncio.CancelledError:
            if entry.closed:
                raise _deleted() from None
            raise
        finally:
            entry.running = None

    async def _within_deadline(self, call: Awaitable[Result], end: float | None = None) -> Result:
        """Await a call until `end` in the event loop's time, by default for `step_deadline_s`."""
        limit = self.config.step_deadline_s
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + limit if end is None else end):
                return await call
        except TimeoutError:
            raise DeadlineExceededError(
                f"This took longer than {limit:g} s and was cancelled; retry, or use fewer denoising steps."
            ) from None


def _deleted() -> NotFoundError:
    return NotFoundError("This world was deleted in the meantime; start another.")
