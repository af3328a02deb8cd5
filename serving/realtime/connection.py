"""One WebSocket session of `WS /v1/realtime/video`, from handshake to close.

    session.created ─► session.start (─► upload) ─► video.start ─► chunk, chunk, … ─► session.done

Two tasks serve a client: one reads events and answers those that do not need the world, the other plays the
world (`serving.realtime.pacing`). Neither buffers output for a client that does not read: they block, and
time out in the end. The world is always closed before the last message is sent.
"""

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from typing import Any, get_args

from fastapi import WebSocket, WebSocketDisconnect

from worldmodel.actions import Action
from worldmodel.config import height_width
from worldmodel.errors import InputError, WorldModelError
from worldmodel.serving.actions import ActionSchema, plain
from worldmodel.serving.context import OpenSession, ServerContext
from worldmodel.serving.errors import (
    ApiError,
    ConflictError,
    DeadlineExceededError,
    RateLimitError,
    TooLargeError,
    UnsupportedFormatError,
)
from worldmodel.serving.media.decoding import decode_observation
from worldmodel.serving.rate_limits import TokenBucket
from worldmodel.serving.realtime import events
from worldmodel.serving.realtime.events import Reason, SessionStart, error_event
from worldmodel.serving.realtime.pacing import ChunkEncoder, WorldPlayer
from worldmodel.serving.realtime.sender import EventSender, SlowClientError
from worldmodel.serving.routes.parsing import decode_data_url, generation_settings
from worldmodel.serving.worlds.owned import OwnedWorld, Slot
from worldmodel.serving.worlds.saved import Origin
from worldmodel.serving.worlds.service import World

LOG = logging.getLogger(__name__)

ROUTE = "/v1/realtime/video"
RESUMED = {"type", "event_id", "resume_id", "world", "resumable", "format", "pace", "num_frames"}
"""Fields of a start that goes on with a world."""
TOO_MANY = "too_many_messages"
"""Code of the error of a client that sends too many messages, or too many invalid ones, which is fatal."""
MAX_REJECTED_EVENTS = 32
"""Rejected events after which a session is closed."""
MESSAGE_BURST_S = 4.0
"""Burst of messages that a client may send, in seconds of its rate limit."""

CLOSE_NORMAL, CLOSE_GOING_AWAY, CLOSE_POLICY = 1000, 1001, 1008
CLOSE_TOO_LARGE, CLOSE_INTERNAL, CLOSE_TRY_LATER = 1009, 1011, 1013
"""WebSocket close codes (RFC 6455 §7.4 and the IANA registry)."""


class InternalError(ApiError):
    """An internal error, of which the client gets no details."""

    status, type, code = 500, "server_error", "internal_error"


class Connection:
    """One client from handshake to close."""

    def __init__(self, websocket: WebSocket, caller: str, context: ServerContext) -> None:
        self._websocket, self._caller, self._context = websocket, caller, context
        self._limits = context.session_limits
        self._sender = EventSender(websocket, self._limits.send_timeout_s)
        self._send = self._sender.send
        rate = self._limits.max_messages_per_s
        self._messages = TokenBucket(rate, rate * MESSAGE_BURST_S)
        self._expires_at = time.monotonic() + self._limits.start_timeout_s
        self._start_event: SessionStart | None = None
        """The start event; its upload may not have arrived yet."""
        self._started: asyncio.Future[tuple[SessionStart, bytes | None]]
        self._started = asyncio.get_running_loop().create_future()
        self._session = OpenSession(caller)
        self._player: WorldPlayer | None = None
        self._entry: OwnedWorld
        """The world, from when there is a player."""
        self._describing: asyncio.Task[None] | None = None
        self._num_rejected = 0
        self._dropped = False
        """Whether the connection broke, and was not closed."""

    async def run(self) -> None:
        """Serve the client until the session ends, and report the reason."""
        outcome, code = "failed", CLOSE_INTERNAL
        try:
            reason = await self._serve()
            outcome, code = "ok", CLOSE_GOING_AWAY if reason == "server_stopping" else CLOSE_NORMAL
            rounds, frames = (self._player.rounds, self._player.frames) if self._player else (0, 0)
            await self._send(events.SessionDone(rounds=rounds, frames=frames, reason=reason))
        except (WebSocketDisconnect, SlowClientError):
            outcome = "cancelled"
        except WorldModelError as error:
            outcome, code = "rejected", close_code(error)
            self._context.metrics.reject(error_event(error).error.code)
            await self._fail(error)
        except Exception:  # a bug must end this session only, and its client must learn that it ended
            LOG.exception("A WebSocket session failed.")
            await self._fail(InternalError("Internal error; the session is over, start another."))
        self._context.metrics.request(ROUTE, outcome)
        await self._sender.close(code)

    async def _fail(self, error: WorldModelError) -> None:
        with suppress(WebSocketDisconnect, SlowClientError):
            await self._send(error_event(error, fatal=True))

    async def _serve(self) -> Reason:
        """Run both tasks and return why the session ended; afterwards its world and tasks are closed."""
        calls = self._read(), self._play(), self._ended_by_others()
        tasks: set[asyncio.Task[Any]] = set(map(asyncio.create_task, calls))
        try:
            await self._send(self._session_created())
            done, _ = await asyncio.wait(
                tasks, timeout=self._limits.max_session_s, return_when=asyncio.FIRST_COMPLETED
            )
            return done.pop().result() if done else "session_limit"
        finally:
            if self._describing is not None:
                tasks.add(self._describing)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:  # mark the exceptions as retrieved; the first one is raised above
                if not task.cancelled():
                    task.exception()

    async def _ended_by_others(self) -> Reason:
        session = self._session
        self._context.sessions[session.id] = session
        try:
            return await session.ended
        finally:
            del self._context.sessions[session.id]

    def _session_created(self) -> events.SessionCreated:
        service = self._context.models.first
        config = service.model.config
        return events.SessionCreated(
            model=service.name,
            engine=service.engine.name,
            adapters=list(service.engine.adapters),
            action=ActionSchema.of(config.action),
            about=config.about,
            tasks=list(service.tasks),
            fps=config.fps,
            chunk_frames=config.chunk_frames,
            image_size=config.codec.image_size,
            num_inference_steps=config.num_inference_steps,
            guidance_scale=config.guidance_scale,
            formats=list(get_args(events.Format)),
            paces=list(get_args(events.Pace)),
            pace=config.pace,
            limits=self._limits,
        )

    # ---- the world -----------------------------------------------------------------------------------

    async def _play(self) -> Reason:
        while True:
            event, upload = await self._started
            try:
                return await self._play_world(event, upload)
            except (InputError, TooLargeError, UnsupportedFormatError) as error:
                if self._player is not None:
                    raise
                # What was sent is at fault, and can be sent again as long as there is no world.
                self._start_event, self._started = None, asyncio.get_running_loop().create_future()
                self._expires_at = time.monotonic() + self._limits.start_timeout_s
                await self._reject(error, event)

    async def _play_world(self, event: SessionStart, upload: bytes | None) -> Reason:
        started_at = time.monotonic()
        worlds, resume_id = self._context.worlds, None
        if event.resume_id is not None:
            entry = worlds.take(self._caller, event.resume_id)
        elif event.world is not None:
            entry = await worlds.copy(await worlds.get(self._caller, event.world))
        else:
            with worlds.starting(self._caller) as slot:
                entry = await self._start_world(event, upload, slot)
        world = entry.world
        if event.resumable or event.resume_id is not None:
            resume_id = secrets.token_urlsafe(24)
        self._session.world = world
        try:
            config = world.service.model.config
            encoder = await asyncio.to_thread(ChunkEncoder, event.format, config.codec.image_size, config.fps)
            player = WorldPlayer(
                self._context,
                world,
                encoder,
                event.pace or config.pace,
                self._send,
                started_at,
                event.num_frames,
            )
            await self._send(self._video_start(event, world, encoder, resume_id), *encoder.init)
            if event.prompt is not None and (upload or event.image_reference):
                first = events.InteractionEvent(prompt=event.prompt)
                await player.interact(events.Interaction(event=first), replace=False)
            self._player, self._entry = player, entry
            self._expires_at = time.monotonic() + self._limits.idle_timeout_s
            return await player.play()
        except (WebSocketDisconnect, SlowClientError):
            self._dropped = True
            raise
        finally:
            if self._dropped and resume_id is not None and not self._context.jobs.draining:
                worlds.keep(resume_id, entry)
            else:
                world.close()
                worlds.release(entry.slot)

    async def _start_world(self, event: SessionStart, upload: bytes | None, slot: Slot) -> OwnedWorld:
        if event.image_reference is not None:
            upload = await decode_data_url(event.image_reference.image_url)
        model = self._context.models.find(event.model)
        frames = None if upload is None else await decode_observation(upload, model.config)
        text = (event.text or event.prompt) if frames is None else None
        settings = generation_settings(model, event, event.adapter)
        actions = tuple(Action.of(plain(action)) for action in event.actions)
        try:
            async with asyncio.timeout(self._context.config.step_deadline_s):
                world = await model.service.start(frames, text=text, actions=actions, settings=settings)
                if frames is not None:
                    await world.measure()
                self._context.models.check_served(world)
                return OwnedWorld(world, Origin(frames, text, actions), slot)
        except TimeoutError:
            raise DeadlineExceededError("The server is too busy; start a session later.") from None

    def _video_start(
        self, event: SessionStart, world: World, encoder: ChunkEncoder, resume_id: str | None
    ) -> events.VideoStart:
        config = world.service.model.config
        height, width = height_width(config.codec.image_size)
        return events.VideoStart(
            event_id=event.event_id,
            format=event.format,
            content_type=encoder.content_type,
            num_messages=len(encoder.init),
            width=width,
            height=height,
            fps=config.fps,
            chunk_frames=config.chunk_frames,
            pace=event.pace or config.pace,
            seed=world.settings.seed,
            num_inference_steps=world.settings.num_inference_steps,
            guidance_scale=world.settings.guidance_scale,
            observation_score=world.observation_score,
            resume_id=resume_id,
        )

    # ---- client messages -----------------------------------------------------------------------------

    async def _read(self) -> Reason:
        """Handle messages until the client stops the session or times out."""
        while True:
            try:
                async with asyncio.timeout(self._expires_at - time.monotonic()):
                    message = await self._websocket.receive()
            except TimeoutError:
                if not self._started.done():
                    return "start_timeout"
                # One who only watches is not idle either.
                watched_until = self._sender.media_sent_at + self._limits.idle_timeout_s
                if self._player is not None and time.monotonic() >= max(self._expires_at, watched_until):
                    return "idle"
                # A client that waits for its world to start is not idle.
                self._expires_at = max(self._expires_at, time.monotonic() + 0.1)
                continue
            if message["type"] == "websocket.disconnect":
                code = message.get("code", 1006)
                self._dropped = code != CLOSE_NORMAL  # uvicorn says 1005 of a connection that broke
                raise WebSocketDisconnect(code)
            if self._messages.take():
                rate = self._messages.rate_per_s
                raise RateLimitError(f"Too many messages; send at most {rate:g} per second.", code=TOO_MANY)
            event: Any = None
            try:
                event = self._parse(message)
                if isinstance(event, events.SessionStop):
                    return "stopped"
                await self._handle(event)
            except TooLargeError:  # the rest of the stream cannot be trusted to be smaller
                raise
            except WorldModelError as error:
                await self._reject(error, event)

    def _parse(self, message: Any) -> Any:
        """Return a client event, or the bytes of an announced upload."""
        text, data = message.get("text"), message.get("bytes")
        size = len(text.encode("utf-8", "replace")) if text is not None else len(data)
        max_size = self._limits.max_message_bytes if text is not None else self._limits.max_upload_bytes
        if size > max_size:
            raise TooLargeError(
                f"The message has {size} bytes; the limit is {max_size}.", "message_too_large"
            )
        if text is not None:
            return events.parse_event(text)
        if self._start_event is None or self._started.done():
            raise _out_of_order("Unexpected binary message; send session.start with upload true before it.")
        return data

    async def _handle(self, event: Any) -> None:
        if isinstance(event, events.SessionPing):
            await self._send(events.SessionPong(event_id=event.event_id))
            return
        if isinstance(event, SessionStart | bytes):
            self._start(event)
        elif self._player is None:
            raise _out_of_order("The world has not started; send session.start and wait for video.start.")
        elif isinstance(event, events.SessionInteraction):
            await self._player.interact(event.interaction, event.replace)
        elif isinstance(event, events.SessionFork):
            copy = (await self._context.worlds.fork(self._entry)).world
            await self._send(events.SessionForked(event_id=event.event_id, world=copy.id, round=copy.round))
        elif isinstance(event, events.SessionDescribe):
            self._describe(event, self._player.world)
        elif isinstance(event, events.SessionPlayback):
            self._player.acknowledge(event.frames)
        else:
            self._player.command(event)
        if self._started.done():
            self._expires_at = time.monotonic() + self._limits.idle_timeout_s

    def _start(self, event: SessionStart | bytes) -> None:
        if isinstance(event, bytes):
            assert self._start_event is not None
            self._started.set_result((self._start_event, event))
            return
        if self._start_event is not None:
            raise _out_of_order("This session has already started; open another socket for another world.")
        self._check(event)
        self._start_event = event
        if not event.upload:
            self._started.set_result((event, None))

    def _check(self, event: SessionStart) -> None:
        """Refuse a start that has no origin or several, or that does not fit the model."""
        image = event.upload or event.image_reference is not None
        origins = event.text is not None, event.upload, event.image_reference is not None
        if event.resume_id is not None or event.world is not None:
            if event.model_fields_set - RESUMED or (event.resume_id is not None and event.world is not None):
                raise ApiError(
                    "The world keeps its settings; send resume_id or world with "
                    f"{', '.join(sorted(RESUMED - {'resume_id', 'world'}))} only.",
                    events.INVALID_EVENT,
                )
            return
        if sum(origins) > 1 or not (any(origins) or event.prompt) or (event.text and event.prompt):
            raise ApiError(
                "A world starts from text or from an upload; send one of them.", events.INVALID_EVENT
            )
        model = self._context.models.find(event.model)
        config = model.config
        height, width = height_width(config.codec.image_size)
        for name, own in (("width", width), ("height", height), ("fps", config.fps)):
            if getattr(event, name) not in (None, own):
                raise ApiError(
                    f"{name} is {getattr(event, name)}; this model makes {own}: send that, or leave it out.",
                    events.INVALID_EVENT,
                )
        if image and event.prompt is not None:
            played = model.service.model
            played.action.validate(Action(event.prompt), played.backbone)

    async def _reject(self, error: WorldModelError, event: Any) -> None:
        self._num_rejected += 1
        if self._num_rejected > MAX_REJECTED_EVENTS:
            raise RateLimitError(
                f"{MAX_REJECTED_EVENTS} events were rejected; see /asyncapi.yaml.", code=TOO_MANY
            ) from None
        if isinstance(event, events.SessionInteraction):
            event_id = event.interaction.event_id
        else:
            event_id = getattr(event, "event_id", None)
        await self._send(error_event(error, event_id))

    def _describe(self, event: events.SessionDescribe, world: World) -> None:
        if self._describing is not None and not self._describing.done():
            raise _out_of_order("A description is in progress; wait for session.described.")
        self._describing = asyncio.create_task(self._send_description(event, world))

    async def _send_description(self, event: events.SessionDescribe, world: World) -> None:
        fork = world.fork()  # so that the world itself keeps running
        try:
            text = await fork.describe(event.question)
            await self._send(events.SessionDescribed(event_id=event.event_id, text=text, round=fork.round))
        except WorldModelError as error:
            await self._send(error_event(error, event.event_id))
        except (WebSocketDisconnect, SlowClientError):
            LOG.debug("The client left before its description was sent.")  # the other tasks end the session
        except Exception:  # nothing awaits this task, so an error would be lost
            LOG.exception("A description failed.")
            await self._send(error_event(InternalError("Internal error; try again."), event.event_id))
        finally:
            fork.close()


def _out_of_order(message: str) -> ConflictError:
    """Return the error of an event that does not fit the state of the session."""
    return ConflictError(message, "out_of_order")


def close_code(error: WorldModelError) -> int:
    """Return the WebSocket close code for an error."""
    if isinstance(error, TooLargeError):
        return CLOSE_TOO_LARGE
    if not isinstance(error, ApiError) or error.code == TOO_MANY:
        return CLOSE_POLICY
    return CLOSE_TRY_LATER if error.status in {429, 503, 504} else CLOSE_POLICY
