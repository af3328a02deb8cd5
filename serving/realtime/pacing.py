"""A live world on its own clock: each chunk is begun as late as it can be and still arrive in time."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from worldmodel.config import ImageSize, height_width
from worldmodel.errors import InputError
from worldmodel.media import Frames
from worldmodel.serving.actions import body, plain
from worldmodel.serving.errors import ApiError, DeadlineExceeded
from worldmodel.serving.media.encoding import encode_jpeg
from worldmodel.serving.media.fragmented_mp4 import FragmentedMp4
from worldmodel.serving.realtime.events import (
    ChunkMetadata,
    Command,
    Format,
    Interaction,
    InteractionApplied,
    InteractionDropped,
    InteractionQueued,
    Pace,
    SessionRestore,
    SessionRestored,
    SessionSnapshot,
    SessionUpdated,
    SnapshotCreated,
    refusal,
)
from worldmodel.serving.worlds.service import World, WorldService
from worldmodel.types import Action

JPEG_QUALITY = 92
"""Frames are small: below this, colours bleed visibly when a page enlarges them."""
SAFETY = 1.5
"""A chunk is given this many times what the slowest of the last few took."""
SPARE_S = 0.05
"""And this much for the way to the client."""

Send = Callable[..., Awaitable[None]]
"""Sends an event and the binary messages that belong to it, and waits for a client that reads slowly."""


class Metrics(Protocol):
    """What a server counts about live worlds."""

    def first_chunk(self, seconds: float) -> None:
        """Count the time from a session's start, or its first action, to its first generated chunk."""

    def chunk(self, seconds: float) -> None:
        """Count the time that a chunk took, and whether that is less than it lasts."""


class Film:
    """Turns chunks into binary messages: a JPEG per frame, or one MP4 segment."""

    def __init__(self, kind: Format, size: ImageSize, fps: int) -> None:
        self._mp4 = FragmentedMp4(*height_width(size), fps) if kind == "fmp4" else None
        self.content_type = self._mp4.mime if self._mp4 else "image/jpeg"
        self.init = [self._mp4.init] if self._mp4 else []

    def add(self, frames: Frames) -> list[bytes]:
        """Encode the next chunk."""
        if self._mp4:
            return [self._mp4.add(frames)]
        return [encode_jpeg(frame, JPEG_QUALITY) for frame in frames]


class QueueFullError(ApiError):
    """More interactions wait than a session may have."""

    status, type, code = 429, "rate_limit_error", "queue_full"


@dataclass
class Clock:
    """When the chunk sent last has been played, and when work on the next one should begin."""

    fps: int
    chunk_s: float
    played_at: float = 0.0
    """When a client that plays at the world's pace will have shown all that was sent."""
    began_at: float = 0.0
    """When that client began, or will begin, with the chunk sent last."""
    took: deque[float] = field(default_factory=lambda: deque(maxlen=8))

    def sent(self, num_frames: int, ready: float) -> None:
        """Take note of a chunk that was ready at this time."""
        self.began_at = max(self.played_at, ready)
        self.played_at = self.began_at + num_frames / self.fps

    def due(self, pace: Pace) -> float:
        """Return when to begin with the next chunk.

        Never before the newest one is being played, so a client is one chunk ahead at most. In real time it
        is as late as past chunks allow, so that an action waits no longer than it must.
        """
        if pace == "on_action":
            return self.began_at
        lead = SAFETY * max(self.took) + SPARE_S if self.took else self.chunk_s
        return self.played_at - min(self.chunk_s, lead)


class LiveWorld:
    """Plays one world for one client; `play` runs it, the other methods are called meanwhile."""

    def __init__(
        self,
        service: WorldService,
        world: World,
        film: Film,
        pace: Pace,
        send: Send,
        *,
        metrics: Metrics,
        max_queued: int,
        step_deadline_s: float,
        since: float,
    ) -> None:
        config = service.model.config
        self.world = world
        self.pace: Pace = pace
        self.rounds = self.frames = self.chunks = 0
        """What was sent so far."""
        self._service, self._film, self._send, self._metrics = service, film, send, metrics
        self._max_queued, self._step_deadline_s = max_queued, step_deadline_s
        self._queue: deque[tuple[Interaction, Action]] = deque()
        self._commands: deque[Command] = deque()
        self._changed = asyncio.Event()
        self._clock = Clock(config.fps, config.chunk_frames / config.fps)
        self._since = since
        """From when the first chunk is waited for."""

    # ---- from the client, at any time ----------------------------------------------------------------

    async def interact(self, interaction: Interaction, replace: bool) -> None:
        """Queue an action and say so.

        Raises:
            InputError: the model takes no such action.
            QueueFullError: too many wait already.
        """
        action = Action.of(plain(interaction.event.action))
        self._service.model.action.validate(action, self._service.model.backbone)
        if replace:
            await self._drop("replaced")
        if len(self._queue) >= self._max_queued:
            raise QueueFullError(
                f"{self._max_queued} interactions wait already; wait for one to be applied, or send replace."
            )
        self._queue.append((interaction, action))
        # Told before the world may act on it: receipts arrive in the order in which things happen.
        await self._send(InteractionQueued(event_id=interaction.event_id, position=len(self._queue) - 1))
        self._changed.set()

    def command(self, command: Command) -> None:
        """Have something done after the chunk that is being made.

        Raises:
            QueueFullError: too many wait already.
        """
        if len(self._commands) >= self._max_queued:
            raise QueueFullError(f"{self._max_queued} commands wait already; wait for their answers.")
        self._commands.append(command)
        self._changed.set()

    # ---- the loop ------------------------------------------------------------------------------------

    async def play(self) -> None:
        """Show where the world starts, then go on until the last round; end it by cancelling."""
        await self._show(self.world.last_frames, "start")
        while self.world.round < self._service.max_rounds:
            while self._commands:
                await self._obey(self._commands.popleft())
            if await self._turn():
                await self._play_round()

    async def _turn(self) -> bool:
        """Wait until it is time for a chunk (true), or until something changes (false)."""
        self._changed.clear()
        idle = self.pace == "on_action" and not self._queue
        delay = None if idle else self._clock.due(self.pace) - time.monotonic()
        if delay is not None and delay <= 0:
            return True
        try:
            # An action that arrives meanwhile starts a world that waits for one; else it joins the chunk.
            await asyncio.wait_for(self._changed.wait(), delay)
        except TimeoutError:
            return True
        return False

    async def _play_round(self) -> None:
        interaction, action = self._queue.popleft() if self._queue else (None, Action())
        began = time.monotonic()
        if self.pace == "on_action" and not self.rounds:
            self._since = began
        try:
            async with asyncio.timeout(self._step_deadline_s):
                frames = await self.world.step(action)
        except TimeoutError:
            raise DeadlineExceeded("The server is too busy to go on; start a session again later.") from None
        self.rounds += 1
        await self._show(frames, "round", interaction, action, began)

    async def _show(
        self,
        frames: np.ndarray,
        source: Literal["start", "round", "restore"],
        interaction: Interaction | None = None,
        action: Action | None = None,
        began: float | None = None,
    ) -> None:
        messages = await asyncio.to_thread(self._film.add, frames)
        ready = time.monotonic()
        taken = 0.0 if began is None else ready - began
        if source == "round":
            self._count(taken, ready)
        if interaction is not None:
            await self._send(
                InteractionApplied(
                    event_id=interaction.event_id,
                    index=self.chunks,
                    round=self.world.round,
                    frame=self.frames,
                )
            )
        metadata = ChunkMetadata(
            index=self.chunks,
            source=source,
            round=self.world.round,
            first_frame=self.frames,
            num_frames=len(frames),
            num_messages=len(messages),
            num_bytes=sum(map(len, messages)),
            action=body(action),
            event_ids=[interaction.event_id] if interaction is not None else [],
            generation_s=round(taken, 6),
        )
        self.chunks, self.frames = self.chunks + 1, self.frames + len(frames)
        await self._send(metadata, *messages)
        # A client that took its time gets the next chunk later, not faster.
        self._clock.sent(len(frames), time.monotonic())

    def _count(self, taken: float, ready: float) -> None:
        self._metrics.chunk(taken)
        if self.rounds == 1:
            self._metrics.first_chunk(ready - self._since)
        self._clock.took.append(taken)

    async def _obey(self, command: Command) -> None:
        if isinstance(command, SessionSnapshot):
            name = self.world.snapshot()
            await self._send(
                SnapshotCreated(event_id=command.event_id, snapshot=name, round=self.world.round)
            )
        elif isinstance(command, SessionRestore):
            await self._restore(command)
        else:
            self.pace = command.pace
            await self._send(SessionUpdated(event_id=command.event_id, pace=self.pace))

    async def _restore(self, command: SessionRestore) -> None:
        try:
            self.world.restore(command.snapshot)
        except InputError as error:
            await self._send(refusal(error, command.event_id))
            return
        await self._drop("restored")
        await self._send(
            SessionRestored(event_id=command.event_id, snapshot=command.snapshot, round=self.world.round)
        )
        await self._show(self.world.last_frames, "restore")

    async def _drop(self, reason: Literal["replaced", "restored"]) -> None:
        while self._queue:
            interaction, _ = self._queue.popleft()
            await self._send(InteractionDropped(event_id=interaction.event_id, reason=reason))
