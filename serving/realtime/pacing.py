"""Pacing of a live world: each chunk is started as late as possible while still arriving in time."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from worldmodel.actions import Action
from worldmodel.config import ImageSize, height_width
from worldmodel.errors import InputError
from worldmodel.media import Frames
from worldmodel.media.encoding import encode_jpeg, encode_png
from worldmodel.rollout.state import WorldState
from worldmodel.serving.actions import action_body
from worldmodel.serving.context import ServerContext
from worldmodel.serving.engine.shares import round_in_progress
from worldmodel.serving.errors import DeadlineExceededError, RateLimitError
from worldmodel.serving.media.fragmented_mp4 import FragmentedMp4
from worldmodel.serving.protocol import StateObject
from worldmodel.serving.realtime import events
from worldmodel.serving.worlds.service import World

JPEG_QUALITY = 92
"""Lower values show colour bleeding, because pages enlarge the small frames."""
SAFETY_FACTOR = 1.5
"""Time reserved for a chunk, as a multiple of the slowest recent one."""
NETWORK_MARGIN_S = 0.05
"""Time reserved for sending a chunk to the client."""
MAX_UNSEEN_CHUNKS, MAX_UNSEEN_S = 2, 0.5
"""What a client which acknowledges playback may have ahead of it: the chunk on screen and the next, or where
these are shorter, what it shows between two messages."""
QUEUE_FULL = "queue_full"

Send = Callable[..., Awaitable[None]]
"""Sends an event and its binary messages; blocks while the client does not read."""


class ChunkEncoder:
    """Encodes chunks as binary messages: one image per frame, or one MP4 segment."""

    def __init__(self, format: events.Format, size: ImageSize, fps: int) -> None:
        self._still = format if format in ("png", "jpeg") else None
        self._mp4 = None if self._still else FragmentedMp4(*height_width(size), fps)
        self.content_type = self._mp4.mime if self._mp4 else f"image/{format}"
        self.init = [self._mp4.init] if self._mp4 and format == "fmp4" else []
        self._header = self._mp4.init if self._mp4 and format == "m4s" else b""

    def encode(self, frames: Frames) -> list[bytes]:
        """Encode the next chunk."""
        if self._mp4:
            header, self._header = self._header, b""
            return [header + self._mp4.add(frames)]
        if self._still == "png":
            return [encode_png(frame, compress_level=1) for frame in frames]
        return [encode_jpeg(frame, JPEG_QUALITY) for frame in frames]


@dataclass
class PlaybackClock:
    """Tracks playback at the client, and decides when to start the next chunk."""

    fps: int
    chunk_s: float
    played_at: float = 0.0
    """Time at which a client that plays at `fps` has shown all frames sent so far."""
    started_at: float = 0.0
    """Time at which that client starts to show the last chunk."""
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=8))

    def sent(self, num_frames: int, now: float) -> None:
        """Record that a chunk was sent at time `now`."""
        self.started_at = max(self.played_at, now)
        self.played_at = self.started_at + num_frames / self.fps

    def next_start(self, pace: events.Pace) -> float:
        """Return when to start the next chunk.

        Not before the client starts to show the newest one, so it buffers one chunk at most. In real time, as
        late as the duration of recent chunks permits, to minimize the latency of actions. As soon as possible
        for agents, which need not look at frames one by one.
        """
        if pace == "asap":
            return 0.0
        if pace == "on_action":
            return self.started_at
        lead = SAFETY_FACTOR * max(self.durations) + NETWORK_MARGIN_S if self.durations else self.chunk_s
        return self.played_at - min(self.chunk_s, lead)


class WorldPlayer:
    """Plays one world for one client: `play` runs the loop, the other methods queue actions and commands."""

    def __init__(
        self,
        context: ServerContext,
        world: World,
        encoder: ChunkEncoder,
        pace: events.Pace,
        send: Send,
        started_at: float,
        num_frames: int | None = None,
    ) -> None:
        config = world.service.model.config
        self.world = world
        self.pace: events.Pace = pace
        self.rounds = self.frames = self.chunks = 0
        """Totals sent so far."""
        self._context, self._encoder, self._send = context, encoder, send
        self._max_queued = context.session_limits.max_queued_interactions
        self._num_frames = num_frames or math.inf
        self._queue: deque[tuple[events.Interaction, Action]] = deque()
        self._commands: deque[events.Command] = deque()
        self._changed, self._acted, self._undoing = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._before: deque[WorldState] = deque(maxlen=context.session_limits.max_snapshots)
        """States before the rounds that can be undone, oldest first."""
        self._shown = math.inf
        """Frames that the client has shown; infinite until it acknowledges some."""
        self._max_unseen = max(MAX_UNSEEN_CHUNKS * config.chunk_frames, MAX_UNSEEN_S * config.fps)
        self._clock = PlaybackClock(config.fps, config.chunk_frames / config.fps)
        self._started_at = started_at
        """Start of the time to the first chunk."""

    # ---- client events -------------------------------------------------------------------------------

    async def interact(self, interaction: events.Interaction, replace: bool) -> None:
        """Queue an action and acknowledge it.

        Raises:
            InputError: the model does not accept the action, or not over several chunks.
            RateLimitError: too many interactions are queued.
        """
        if (chunks := interaction.transition_chunks or 0) > 1:
            raise InputError(
                f"transition_chunks is {chunks}; use 0 or 1, or leave it out: an action is played within one "
                "chunk, and is not blended with the one before it."
            )
        action = Action.of(interaction.event.taken)
        model = self.world.service.model
        model.action.validate(action, model.backbone)
        if replace:
            await self._drop_queued("replaced")
        if len(self._queue) >= self._max_queued:
            raise RateLimitError(
                f"{self._max_queued} interactions are queued; wait until one is applied, or send replace.",
                code=QUEUE_FULL,
            )
        self._queue.append((interaction, action))
        # Sent before the loop can see it, so that acknowledgements arrive in order.
        await self._send(
            events.InteractionQueued(event_id=interaction.event_id, position=len(self._queue) - 1)
        )
        self._changed.set()
        self._acted.set()

    def command(self, command: events.Command) -> None:
        """Queue a command to run after the chunk that is being generated, which an undo gives up.

        Raises:
            RateLimitError: too many commands are queued.
        """
        if len(self._commands) >= self._max_queued:
            raise RateLimitError(
                f"{self._max_queued} commands are queued; wait for their replies.", code=QUEUE_FULL
            )
        self._commands.append(command)
        self._changed.set()
        if isinstance(command, events.SessionUndo):
            self._undoing.set()

    def acknowledge(self, frames: int) -> None:
        """Take note of how many frames the client has shown.

        Raises:
            InputError: they were not sent yet.
        """
        if frames > self.frames:
            raise InputError(f"frames is {frames}, and {self.frames} were sent; send what was shown.")
        self._shown = frames if self._shown == math.inf else max(self._shown, frames)
        self._changed.set()

    # ---- the loop ------------------------------------------------------------------------------------

    async def play(self) -> events.Reason:
        """Send the initial observation, then play rounds up to the last one; stopped by cancellation."""
        await self._send_chunk(self.world.last_frames, "start")
        while self.world.round < self.world.service.max_rounds:
            if self.frames >= self._num_frames:
                return "num_frames"
            while self._commands:
                await self._execute(self._commands.popleft())
            if await self._wait_until_due():
                await self._play_round()
        return "round_limit"

    async def _wait_until_due(self) -> bool:
        """Wait until the next chunk is due (true), or until the queues or the pace change (false)."""
        self._changed.clear()
        unseen = self.frames - self._shown > self._max_unseen  # nobody looks: a phone in a tunnel
        outcome = self.world.outcome  # models are trained on nothing after an end
        over = outcome is not None and outcome.ended and self._num_frames == math.inf
        idle = (self.pace != "realtime" or unseen or over) and not self._queue
        delay = None if idle else self._clock.next_start(self.pace) - time.monotonic()
        if delay is not None and delay <= 0:
            return True
        try:
            await asyncio.wait_for(self._changed.wait(), delay)
        except TimeoutError:
            return True
        return False

    async def _play_round(self) -> None:
        interaction, action = self._queue.popleft() if self._queue else (None, Action())
        start, before = time.monotonic(), self.world.state()
        if self.pace != "realtime" and not self.rounds:
            self._started_at = start
        self._acted.clear()
        ends = (self._undoing,) if interaction else (self._undoing, self._acted)
        try:
            async with asyncio.timeout(self._context.config.step_deadline_s):
                with round_in_progress():
                    frames = await self._step_until(action, *ends)
        except TimeoutError:
            raise DeadlineExceededError("The server is too busy; start a session later.") from None
        if frames is None:
            if interaction is not None:
                self._queue.appendleft((interaction, action))  # dropped with those that wait
            return
        self._before.append(before)
        self.rounds += 1
        await self._send_chunk(frames, "round", interaction, action, start)

    async def _step_until(self, action: Action, *ends: asyncio.Event) -> np.ndarray | None:
        """Play a round; None if one of these events came first, which leaves the world unchanged."""
        step = asyncio.ensure_future(self.world.step(action))
        ended = [asyncio.ensure_future(event.wait()) for event in ends]
        try:
            await asyncio.wait((step, *ended), return_when=asyncio.FIRST_COMPLETED)
            return await step if step.done() else None
        finally:
            for each in (step, *ended):
                each.cancel()
            await asyncio.wait((step,))

    async def _send_chunk(
        self,
        frames: np.ndarray,
        source: Literal["start", "round", "restore", "undo"],
        interaction: events.Interaction | None = None,
        action: Action | None = None,
        start: float | None = None,
    ) -> None:
        messages = await asyncio.to_thread(self._encoder.encode, frames)
        ready = time.monotonic()
        duration = 0.0 if start is None else ready - start
        if source == "round":
            self._context.metrics.chunk(duration, self.world.service.chunk_s)
            self._clock.durations.append(duration)
            if self.rounds == 1:
                self._context.metrics.time_to_first_chunk.observe(ready - self._started_at)
        applied = [] if interaction is None else [interaction.event_id]
        for event_id in applied:
            await self._send(
                events.InteractionApplied(
                    event_id=event_id, index=self.chunks, round=self.world.round, frame=self.frames
                )
            )
        metadata = events.ChunkMetadata(
            index=self.chunks,
            source=source,
            round=self.world.round,
            first_frame=self.frames,
            num_frames=len(frames),
            num_messages=len(messages),
            num_bytes=sum(map(len, messages)),
            action=action_body(action),
            event_ids=applied,
            outcome=self.world.outcome,
            state=self.world.predicted and StateObject.of(self.world.predicted),
            generation_s=round(duration, 6),
        )
        self.chunks, self.frames = self.chunks + 1, self.frames + len(frames)
        await self._send(metadata, *messages)
        # Measured after sending: a slow client delays the next chunk.
        self._clock.sent(len(frames), time.monotonic())

    async def _execute(self, command: events.Command) -> None:
        world, event_id = self.world, command.event_id
        if isinstance(command, events.SessionSnapshot):
            name = world.snapshot()
            await self._send(events.SnapshotCreated(event_id=event_id, snapshot=name, round=world.round))
        elif isinstance(command, events.SessionUpdate):
            self.pace = command.pace
            await self._send(events.SessionUpdated(event_id=event_id, pace=self.pace))
        else:
            try:
                self._go_back(command)
            except InputError as error:
                await self._send(events.error_event(error, event_id))
            else:
                await self._show_past(command)

    def _go_back(self, command: events.SessionRestore | events.SessionUndo) -> None:
        """Return to a snapshot or to an earlier round.

        Raises:
            InputError: there is no such snapshot or round; the world stays as it is.
        """
        if isinstance(command, events.SessionRestore):
            self.world.restore(command.snapshot)
            self._before.clear()
            return
        self._undoing.clear()
        target = self.world.round - 1 if command.round is None else command.round
        if command.round is None and not self._before:
            raise InputError(
                "There is nothing to undo; this connection has played no round since its start or restore."
            )
        kept = {state.round: state for state in (*self._before, self.world.state())}
        if target not in kept:
            raise InputError(
                f"round is {target}; this world can go back to rounds {min(kept)} to {max(kept)}, or to a "
                "snapshot."
            )
        self.world.restore(kept[target])
        while self._before and self._before[-1].round >= target:
            self._before.pop()

    async def _show_past(self, command: events.SessionRestore | events.SessionUndo) -> None:
        """Drop what was queued for another moment, and show the one to which the world has returned."""
        world, event_id = self.world, command.event_id
        if isinstance(command, events.SessionUndo):
            await self._drop_queued("undone")
            await self._send(events.SessionUndone(event_id=event_id, round=world.round))
            await self._send_chunk(world.last_frames, "undo")
        else:
            await self._drop_queued("restored")
            name = command.snapshot
            await self._send(events.SessionRestored(event_id=event_id, snapshot=name, round=world.round))
            await self._send_chunk(world.last_frames, "restore")

    async def _drop_queued(self, reason: Literal["replaced", "restored", "undone"]) -> None:
        while self._queue:
            interaction, _ = self._queue.popleft()
            await self._send(events.InteractionDropped(event_id=interaction.event_id, reason=reason))
