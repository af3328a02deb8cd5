"""Registry of live worlds: owners, limits, the idle timeout, steps that are safe to retry, and storing."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import numpy as np

from worldmodel.actions import Action
from worldmodel.serving.engine.completion import Completion, TextParams, merge, until
from worldmodel.serving.engine.shares import Purpose, asking_for, round_in_progress
from worldmodel.serving.errors import (
    ApiError,
    ConflictError,
    DeadlineExceededError,
    NotFoundError,
    RateLimitError,
    UnavailableError,
)
from worldmodel.serving.metrics import Metrics
from worldmodel.serving.models import ModelUnloadedError, Served, ServedModels
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.worlds.owned import CommittedStep, OwnedWorld, Slot
from worldmodel.serving.worlds.saved import Origin, PlayedStep, SavedWorld, made_by
from worldmodel.serving.worlds.service import World, WorldService, WorldSettings
from worldmodel.serving.worlds.store import POLL_S, WAIT_S, WorldHeldError, WorldMovedError, WorldStore

Result = TypeVar("Result")

LOG = logging.getLogger(__name__)

KEEP_S = 60.0
"""Time for which the world of a socket that was dropped is kept."""
OUT_OF_ORDER = "step_out_of_order"
"""Code of the error of a step that is neither the last one nor the next one."""


class WorldRegistry:
    """All live worlds of a server, and their limits.

    Calls on one world run one at a time. Each raises what `World` does, `NotFoundError` if the world was
    deleted in the meantime, `WorldMovedError` if another replica has taken it, and `DeadlineExceededError`
    after `step_deadline_s`.

    Each of these takes one slot of `max_worlds` and `max_worlds_per_key`: a world with an id (also a fork),
    the world of a WebSocket session, and a chat or image request while it runs. Videos are limited as jobs.
    With a store, worlds with an id are stored after their rounds, and resumed where requests for them arrive.
    """

    def __init__(
        self, models: ServedModels, config: ServerConfig, metrics: Metrics, store: WorldStore | None = None
    ) -> None:
        self.models, self.config, self.metrics, self.store = models, config, metrics, store
        self._worlds: dict[str, OwnedWorld] = {}
        self._slots: set[Slot] = set()
        self._resuming: dict[tuple[str, str], asyncio.Task[OwnedWorld | None]] = {}
        self._kept: dict[str, tuple[OwnedWorld, asyncio.TimerHandle]] = {}
        self.keep_s = KEEP_S
        self._stopping = False
        self._reason: UnavailableError | None = None
        if store is not None:
            store.replica.after_heartbeats(self.hand_over)

    def __len__(self) -> int:
        return len(self._slots)

    # ---- limits ----------------------------------------------------------------------------------------

    def reserve(self, owner: str) -> Slot:
        """Reserve a slot for one more world.

        Raises:
            RateLimitError: the owner or the server has the maximum number of live worlds.
        """
        used = Counter(slot.owner for slot in self._slots)
        if not self.config.has_room(owner, used, self.config.max_worlds):
            raise RateLimitError(
                f"The server has {len(self._slots)} live worlds, the most for this key; try again later.", 10
            )
        if (num_owned := used[owner]) >= self.config.of_key("max_worlds_per_key", owner):
            raise RateLimitError(f"This key has {num_owned} live worlds, its maximum; delete one first.", 5)
        slot = Slot(owner)
        self._slots.add(slot)
        return slot

    def release(self, slot: Slot) -> None:
        """Release a slot; releasing it twice has no effect."""
        self._slots.discard(slot)

    @contextmanager
    def starting(self, owner: str) -> Iterator[Slot]:
        """Reserve a slot for the world that the block starts; it is released if that fails."""
        slot = self.reserve(owner)
        try:
            yield slot
        except BaseException:
            self.release(slot)
            raise

    @contextmanager
    def temporary(self, owner: str) -> Iterator[None]:
        """Reserve a slot for a world that exists only while the block runs."""
        with self.starting(owner) as slot:
            yield
        self.release(slot)

    # ---- worlds of sockets that were dropped --------------------------------------------------------------

    def keep(self, name: str, entry: OwnedWorld) -> None:
        """Keep a world, with its slot, for a client that may come back with a name that nobody can guess."""
        end = asyncio.get_running_loop().call_later(self.keep_s, self._end_kept, name)
        self._kept[name] = entry, end

    def take(self, owner: str, name: str) -> OwnedWorld:
        """Return a kept world, with its slot, to the key that had it.

        Raises:
            NotFoundError: there is none of this name, or it belonged to another key.
        """
        kept = self._kept.get(name)
        if kept is None or kept[0].owner != owner:
            raise NotFoundError(
                f"There is no world to come back to: it is kept for {self.keep_s:g} s after its socket was "
                "dropped, by the server that it was on; start another."
            )
        del self._kept[name]
        entry, end = kept
        end.cancel()
        return entry

    def end_kept(self) -> None:
        """End all kept worlds."""
        for name in list(self._kept):
            self._end_kept(name)

    def _end_kept(self, name: str) -> None:
        entry, end = self._kept.pop(name)
        end.cancel()
        entry.world.close()
        self.release(entry.slot)

    # ---- lookup ----------------------------------------------------------------------------------------

    async def get(self, owner: str, world_id: str) -> OwnedWorld:
        """Return a world of its owner; one that another replica has left is resumed.

        Raises:
            NotFoundError: there is no such world, it was closed, or another key owns it.
            WorldHeldError: another replica plays it, and does not hand it over soon.
            RateLimitError: it would be resumed, but the owner or the server has the maximum of live worlds.
            UnavailableError: the server is stopping, or its database does not answer.
        """
        entry = self._worlds.get(world_id)
        if entry is None and self.store is not None:
            key = owner, world_id
            if key not in self._resuming:
                self._resuming[key] = asyncio.create_task(self._resume(self.store, owner, world_id))
                self._resuming[key].add_done_callback(lambda _: self._resuming.pop(key))
            # All callers wait for one resumption, and one that hangs up must not cancel it for the others.
            entry = await asyncio.shield(self._resuming[key])
        if entry is None or entry.owner != owner:
            raise NotFoundError(
                "There is no world with this id: it was deleted, its model was unloaded, or it was closed "
                f"after {self.config.idle_timeout_s:g} s without use; start another."
            )
        entry.used_at = time.monotonic()
        return entry

    def all(self) -> list[OwnedWorld]:
        """Return the worlds of all owners on this server, oldest first."""
        return list(self._worlds.values())

    def owned_by(self, owner: str) -> list[OwnedWorld]:
        """Return an owner's worlds on this server, oldest first."""
        return [entry for entry in self._worlds.values() if entry.owner == owner]

    # ---- life cycle ------------------------------------------------------------------------------------

    async def start(
        self,
        owner: str,
        service: WorldService,
        origin: Origin,
        settings: WorldSettings,
        max_observation_score: float | None = None,
    ) -> OwnedWorld:
        """Start a world of a model.

        Raises:
            InputError: the origin has neither frames nor a text, or both, or its picture is less like what
                the model knows than `max_observation_score`.
        """
        began = time.monotonic()
        with self.starting(owner) as slot:
            world = await self._within_deadline(
                service.start(origin.frames, text=origin.text, actions=origin.actions, settings=settings)
            )
            if origin.frames is not None:
                await self._within_deadline(world.measure(max_observation_score))
        self.metrics.time_to_first_chunk.observe(time.monotonic() - began)
        return await self._add(OwnedWorld(world, origin, slot))

    async def load(self, owner: str, data: bytes) -> OwnedWorld:
        """Start a world from an exported snapshot.

        Raises:
            InputError: it is not a snapshot of a world, is damaged, or is one of another model.
        """
        return await self._add(await self._loaded(owner, data))

    async def export(self, entry: OwnedWorld, snapshot: str | None) -> bytes:
        """Return a world, or one of its snapshots, as a file that `load` takes."""
        async with self._locked(entry):
            self._check_snapshot(entry, snapshot)
            saved = entry.saved(snapshot)
        return await asyncio.to_thread(saved.to_bytes, entry.world.service.identity)

    async def fork(self, entry: OwnedWorld) -> OwnedWorld:
        """Return an independent copy of a world, which has an id."""
        return await self._add(await self.copy(entry))

    async def copy(self, entry: OwnedWorld) -> OwnedWorld:
        """Return an independent copy of a world for a socket, which ends with it."""
        with self.starting(entry.owner) as slot:
            async with self._locked(entry):
                return OwnedWorld(entry.world.fork(), entry.origin, slot)

    async def close(self, entry: OwnedWorld, reason: NotFoundError | None = None) -> None:
        """Delete a world; a call in progress stops before its next denoising step."""
        deleted = NotFoundError("This world was deleted in the meantime; start another.")
        self._forget(entry, reason or deleted)
        if self.store is not None:
            await self.store.remove(entry.world.id)

    async def end_model(self, model: Served) -> None:
        """Delete the worlds of a model or an adapter that this server has no longer."""
        for key in [key for key, (kept, _) in self._kept.items() if model.plays(kept.world)]:
            self._end_kept(key)
        reason = ModelUnloadedError(model.name)
        ended = [entry for entry in self.all() if model.plays(entry.world)]
        await asyncio.gather(*(self.close(entry, reason) for entry in ended))

    async def sweep(self, idle_timeout_s: float | None = None) -> None:
        """Delete the worlds that have been idle for longer than the timeout."""
        timeout_s = self.config.idle_timeout_s if idle_timeout_s is None else idle_timeout_s
        # A copy, since closing removes from it while this coroutine is suspended.
        for entry in list(self._worlds.values()):
            if entry.idle_s > timeout_s:
                await self.close(entry)
        if self.store is not None:
            await self.store.sweep(timeout_s)

    async def _add(self, entry: OwnedWorld) -> OwnedWorld:
        world, store = entry.world, self.store
        try:
            if store is not None:
                await store.add(world.id, entry.owner, world.round, await self._bytes_of(entry))
            self.models.check_served(world)
        except BaseException:
            self.release(entry.slot)
            if store is not None:
                with suppress(UnavailableError):
                    await store.remove(world.id)  # a transaction of a cancelled caller is finished
            raise
        self._worlds[world.id] = entry
        return entry

    def _forget(self, entry: OwnedWorld, reason: ApiError) -> None:
        """End a world on this server; what is stored of it stays."""
        entry.ended = reason
        if entry.running is not None:
            entry.running.cancel()
        entry.world.close()
        entry.last_step = None
        self.release(entry.slot)
        self._worlds.pop(entry.world.id, None)

    # ---- storing, and moving between replicas ----------------------------------------------------------

    async def hand_over(self) -> None:
        """Let the replicas that ask for worlds have them, and forget those that were taken.

        A world whose call is in progress stays until a later heartbeat.
        """
        assert self.store is not None
        # Listed before the database is asked: a world that is added while that answers would be missing there
        # and be forgotten by mistake.
        here = list(self._worlds.values())
        held = await self.store.held()
        for entry in here:
            if entry.world.id not in held:
                self._forget(entry, WorldMovedError())
        for world_id in (name for name, wanted in held.items() if wanted):
            entry = self._worlds.get(world_id)
            if entry is not None:
                if not entry.lock.locked():
                    await self._give_up(self.store, entry)
            elif not any(world_id == resumed for _, resumed in self._resuming):
                await self.store.release(world_id)

    async def stop(self, timeout_s: float) -> None:
        """Resume no more worlds; store all, when their calls have ended, for other replicas to resume."""
        self._stopping = True
        store = self.store
        if store is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(self._give_up(store, entry) for entry in self._worlds.values()))

    async def abandon(self, timeout_s: float, reason: UnavailableError) -> None:
        """Let other replicas have all worlds now: after the time limit, those in use as they were stored.

        Requests that wait for one of them are answered with the reason.
        """
        self._reason = reason
        await self.stop(timeout_s)
        for entry in list(self._worlds.values()):
            self._forget(entry, reason)

    async def _give_up(self, store: WorldStore, entry: OwnedWorld) -> None:
        with suppress(NotFoundError, WorldMovedError):  # it ended in the meantime
            async with self._locked(entry):
                try:
                    await self._save(entry, always=True)
                    await store.release(entry.world.id)
                except Exception:  # of the database or a failed device; the others can still be stored
                    LOG.exception("The world %s cannot be stored.", entry.world.id)
                    return
                self._forget(entry, self._reason or WorldMovedError())

    async def _resume(self, store: WorldStore, owner: str, world_id: str) -> OwnedWorld | None:
        """Resume a stored world, once no live replica holds it; None if there is none."""
        if self._stopping:
            raise UnavailableError("The server is stopping; send the request to another replica.")
        end = time.monotonic() + WAIT_S
        while True:
            try:
                data = await store.claim(owner, world_id)
                break
            except WorldHeldError:
                if time.monotonic() > end:
                    raise
            await asyncio.sleep(POLL_S)
        if data is None:
            return None
        try:
            entry = await self._loaded(owner, data, world_id)
        except BaseException:
            await store.release(world_id)
            raise
        self._worlds[world_id] = entry
        return entry

    async def _loaded(self, owner: str, data: bytes, world_id: str | None = None) -> OwnedWorld:
        """Read a world, and compute its keys and values; it takes a slot."""

        def read() -> tuple[WorldService, SavedWorld]:
            service = self.models.of_digest(made_by(data)) or self.models.first
            return service, SavedWorld.from_bytes(data, service.model, service.identity)

        with self.starting(owner) as slot:
            service, saved = await self.models.first.compute.run(read)
            world = await self._within_deadline(service.resume(saved.settings, saved.state, world_id))
            self.models.check_served(world)
        entry = OwnedWorld(world, saved.origin, slot)
        if saved.last_step is not None:
            entry.last_step = CommittedStep(world.round, saved.last_step, world.last_frames)
        return entry

    async def _save(self, entry: OwnedWorld, changed: bool = False, always: bool = False) -> None:
        """Store a world that has changed often enough since it was stored.

        Raises:
            WorldMovedError: another replica has taken it; this server forgets it.
            UnavailableError: the database does not answer.
        """
        entry.unsaved += changed
        if self.store is None or not entry.unsaved:
            return
        if entry.unsaved < self.config.rounds_per_save and not always:
            self.store.replica.require()
            return
        try:
            await self.store.put(entry.world.id, entry.world.round, await self._bytes_of(entry))
        except WorldMovedError as error:
            self._forget(entry, error)
            raise
        entry.unsaved = 0

    async def _bytes_of(self, entry: OwnedWorld) -> bytes:
        return await asyncio.to_thread(entry.saved().to_bytes, entry.world.service.identity)

    @staticmethod
    def _check_snapshot(entry: OwnedWorld, snapshot: str | None) -> None:
        if snapshot is not None and snapshot not in entry.world.snapshots:
            raise NotFoundError("This world has no snapshot with this name; GET the world lists them.")

    # ---- calls on one world ----------------------------------------------------------------------------

    async def step(
        self,
        entry: OwnedWorld,
        step_id: int,
        action: str | Mapping[str, Any] | None,
        code: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> np.ndarray:
        """Play round `step_id`, or return its frames again if it is the last one played.

        With a `code`, the future that it names happens; with a `seed`, this round has that one.

        Raises:
            ConflictError: it was played with another action, or is neither the last round nor the next one.
            UnavailableError: the database does not answer; the same step may be sent again.
        """
        asked = PlayedStep(Action.of(action), None if code is None else tuple(code), seed)
        async with self._locked(entry):
            last, next_id = entry.last_step, entry.world.round + 1
            if last is not None and last.step_id == step_id:
                if last.played != asked:
                    raise ConflictError(
                        f"Step {step_id} was played with another action, code or seed; the next step_id is "
                        f"{next_id}.",
                        "step_already_committed",
                    )
                await self._save(entry)  # where that failed
                return last.frames
            if step_id != next_id:
                raise ConflictError(f"step_id is {step_id}; the next step_id is {next_id}.", OUT_OF_ORDER)
            began = time.monotonic()
            entry.progress = 0.0
            try:
                playing = entry.world.step(asked.action, entry.report, asked.code, seed)
                frames = await self._run(entry, playing)
            finally:
                entry.progress = None
            self.metrics.chunk(time.monotonic() - began, entry.world.service.chunk_s)
            entry.last_step = CommittedStep(step_id, asked, frames)
            await self._save(entry, changed=True)
            return frames

    async def ask(
        self,
        entry: OwnedWorld,
        call: Callable[[World], Coroutine[Any, Any, Result]],
        purpose: Purpose = "step",
    ) -> tuple[Result, int]:
        """Make a call of a world, which it leaves as it is; return the result and the round of the world."""
        async with self._locked(entry):
            with asking_for(purpose):
                return await self._run(entry, call(entry.world)), entry.world.round

    async def confidence(self, entry: OwnedWorld, step_id: int, words: str) -> float:
        """Return how well round `step_id`, the newest one, fits an action in words.

        Raises:
            ConflictError: another round was played since.
        """
        async with self._locked(entry):
            if entry.world.round != step_id:
                raise ConflictError(
                    f"Round {step_id} is no longer the newest; it has no confidence.", OUT_OF_ORDER
                )
            return await self._run(entry, entry.world.confidence(words))

    async def reset(self, entry: OwnedWorld, origin: Origin | None) -> np.ndarray:
        """Restart a world from `origin`, by default from its first one; return the first observation."""
        async with self._locked(entry):
            origin = origin or entry.origin
            started = entry.world.reset(origin.frames, text=origin.text, actions=origin.actions)
            frames = await self._run(entry, started)
            entry.origin, entry.last_step = origin, None
            await self._save(entry, changed=True)
            return frames

    async def snapshot(self, entry: OwnedWorld) -> tuple[str, int]:
        """Save the current state; return the snapshot's id and round."""
        async with self._locked(entry):
            return entry.world.snapshot(), entry.world.round

    async def restore(self, entry: OwnedWorld, snapshot: str) -> None:
        """Return to a snapshot."""
        async with self._locked(entry):
            self._check_snapshot(entry, snapshot)
            entry.world.restore(snapshot)
            entry.last_step = None
            await self._save(entry, changed=True)

    # ---- temporary worlds ------------------------------------------------------------------------------

    async def complete_frames(
        self,
        owner: str,
        service: WorldService,
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
            world = await self._within_deadline(service.start(frames, settings=settings), end)
            try:
                async with aclosing(
                    merge([until(world.fork().complete(question, each), each.stop) for each in params])
                ) as texts:
                    while (grown := await self._within_deadline(anext(texts, None), end)) is not None:
                        yield grown
            finally:
                world.close()

    async def generate_images(
        self,
        owner: str,
        service: WorldService,
        prompt: str,
        settings: Sequence[WorldSettings],
        frames: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        """Generate one image for each of the settings, uint8 `[h, w, 3]`.

        The prompt describes the scene or, with frames, is the action that follows them.
        """

        async def generate(each: WorldSettings) -> np.ndarray:
            text = prompt if frames is None else None
            world = await service.start(frames, text=text, settings=each)
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
            if entry.ended is not None:
                raise entry.ended
            yield

    async def _run(self, entry: OwnedWorld, call: Coroutine[Any, Any, Result]) -> Result:
        """Await a call that closing the world cancels."""
        entry.running = asyncio.ensure_future(self._within_deadline(call))
        try:
            with round_in_progress():
                return await entry.running
        except asyncio.CancelledError:
            if entry.ended is not None:
                raise entry.ended from None
            raise
        finally:
            entry.running, entry.used_at = None, time.monotonic()

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
