"""One client of `WS /v1/realtime/video`, from handshake to end.

    session.created ─► session.start (─► upload) ─► video.start ─► chunk, chunk, … ─► session.done

Two tasks serve a client: one reads events and answers what needs no world, one plays the world
(`serving.realtime.pacing`). Neither keeps anything for a client that does not read: they wait for it, and in
the end give up. However a session ends, its world is gone before the last message is sent.
"""

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

from fastapi import WebSocket, WebSocketDisconnect

from worldmodel.config import height_width
from worldmodel.errors import WorldModelError
from worldmodel.serving.actions import ActionSchema
from worldmodel.serving.auth import Limiter
from worldmodel.serving.errors import ApiError, DeadlineExceeded, TooLarge, TooManyRequests
from worldmodel.serving.media import decoding
from worldmodel.serving.media.limits import UploadLimits
from worldmodel.serving.realtime import events
from worldmodel.serving.realtime.events import Reason, SessionStart, refusal
from worldmodel.serving.realtime.pacing import Film, LiveWorld
from worldmodel.serving.realtime.sender import Allowance, Outbox, SlowClientError, TooManyMessagesError
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.worlds.service import World, WorldService

log = logging.getLogger("worldmodel.realtime")

ROUTE = "/v1/realtime/video"
MAX_UPLOAD_BYTES = 16 * 2**20
"""A message is in memory whole before anybody can look at it; this is also what uvicorn takes by default."""
MAX_ERRORS = 32
"""Events of one session that may be refused."""

NORMAL, REFUSED, TOO_LARGE, BROKEN, LATER = 1000, 1008, 1009, 1011, 1013
"""Codes that a WebSocket closes with (RFC 6455 §7.4 and its registry)."""


class OutOfOrderError(ApiError):
    """An event that does not fit the state of the session."""

    status, type, code = 409, "conflict_error", "out_of_order"


class MessageTooLargeError(TooLarge):
    """A message above the limit; the session ends."""

    code = "message_too_large"


class BrokenError(ApiError):
    """A mistake of the server's own, of which the client learns nothing but this."""

    status, type, code = 500, "server_error", "internal_error"


def limits_of(state: Any) -> events.Limits:
    """Return a server's limits of live sessions; `app.state.realtime_limits` wins over the config."""
    given: events.Limits | None = getattr(state, "realtime_limits", None)
    if given is not None:
        return given
    config: ServerConfig = state.config
    service: WorldService = state.service
    return events.Limits(
        start_timeout_s=120.0,
        idle_timeout_s=config.idle_timeout_s,
        max_session_s=3600.0,
        send_timeout_s=20.0,
        max_message_bytes=32 * 2**10,
        max_upload_bytes=min(config.max_upload_bytes, MAX_UPLOAD_BYTES),
        max_queued_interactions=8,
        max_messages_per_s=30.0,
        max_rounds=service.max_rounds,
        max_snapshots=service.max_snapshots,
    )


class Connection:
    """A client from handshake to end."""

    def __init__(self, websocket: WebSocket, caller: str, limits: events.Limits) -> None:
        state = websocket.app.state
        self.service: WorldService = state.service
        self.config: ServerConfig = state.config
        self._state, self._websocket, self._caller, self._limits = state, websocket, caller, limits
        self._outbox = Outbox(websocket, limits.send_timeout_s)
        self._send = self._outbox.send
        self._allowance = Allowance(limits.max_messages_per_s)
        self._expires = time.monotonic() + limits.start_timeout_s
        self._order: SessionStart | None = None
        """What is to be started; its upload may still be on its way."""
        self._started: asyncio.Future[tuple[SessionStart, bytes | None]]
        self._started = asyncio.get_running_loop().create_future()
        self._live: LiveWorld | None = None
        self._describing: asyncio.Task[None] | None = None
        self._num_errors = 0

    async def run(self) -> None:
        """Serve the client until the session is over, and say how it ended."""
        outcome, code = "failed", BROKEN
        try:
            reason = await self._serve()
            live = self._live
            outcome, code = "ok", NORMAL
            rounds, frames = (live.rounds, live.frames) if live else (0, 0)
            await self._send(events.SessionDone(rounds=rounds, frames=frames, reason=reason))
        except (WebSocketDisconnect, SlowClientError):
            outcome = "cancelled"
        except WorldModelError as error:
            outcome, code = "rejected", close_code(error)
            self._state.metrics.reject(refusal(error).error.code)
            await self._fail(error)
        except Exception:
            log.exception("a live session failed")
            await self._fail(BrokenError("The server made a mistake and ended this session; start another."))
        self._state.metrics.request(ROUTE, outcome)
        await self._outbox.close(code)

    async def _fail(self, error: WorldModelError) -> None:
        with suppress(WebSocketDisconnect, SlowClientError):
            await self._send(refusal(error, fatal=True))

    async def _serve(self) -> Reason:
        """Return why the session is over; whatever happens, its world and its tasks are then gone."""
        tasks: set[asyncio.Task[Any]] = {asyncio.create_task(self._read()), asyncio.create_task(self._play())}
        try:
            await self._send(self._hello())
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
            for task in tasks:  # the first to end has told why; what the others say is of no interest
                if not task.cancelled():
                    task.exception()

    def _hello(self) -> events.SessionCreated:
        config = self.service.model.config
        return events.SessionCreated(
            model=self.config.model_name,
            engine=self.service.engine.name,
            adapters=list(self.service.engine.adapters),
            action=ActionSchema.of(config.action),
            fps=config.fps,
            chunk_frames=config.chunk_frames,
            image_size=config.codec.image_size,
            num_inference_steps=config.num_inference_steps,
            guidance_scale=config.guidance_scale,
            formats=["jpeg", "fmp4"],
            paces=["realtime", "on_action"],
            limits=self._limits,
        )

    # ---- the world -----------------------------------------------------------------------------------

    async def _play(self) -> Reason:
        order, upload = await self._started
        since = time.monotonic()
        limiter: Limiter = self._state.limiter
        if len(self.service.worlds) >= self.config.max_worlds:
            raise TooManyRequests(f"All {self.config.max_worlds} live worlds are taken; try again later.", 5)
        lease, world = limiter.open_world(self._caller), None
        try:
            world = await self._begin(order, upload)
            config = self.service.model.config
            film = await asyncio.to_thread(Film, order.format, config.codec.image_size, config.fps)
            live = LiveWorld(
                self.service,
                world,
                film,
                order.pace,
                self._send,
                metrics=self._state.metrics,
                max_queued=self._limits.max_queued_interactions,
                step_deadline_s=self.config.step_deadline_s,
                since=since,
            )
            await self._send(self._video_start(order, world, film), *film.init)
            self._live = live
            self._expires = time.monotonic() + self._limits.idle_timeout_s
            await live.play()
            return "round_limit"
        finally:
            if world is not None:
                world.close()
            lease.release()

    async def _begin(self, order: SessionStart, upload: bytes | None) -> World:
        config, frames = self.service.model.config, None
        if upload is not None:
            frames = await decoding.decode_upload(
                upload,
                size=config.codec.image_size,
                fps=config.fps,
                max_frames=UploadLimits.max_frames,
            )
        try:
            async with asyncio.timeout(self.config.step_deadline_s):
                return await self.service.start(
                    frames,
                    text=order.text,
                    seed=order.seed,
                    num_inference_steps=order.num_inference_steps,
                    guidance_scale=order.guidance_scale,
                    adapter=order.adapter,
                )
        except TimeoutError:
            raise DeadlineExceeded("The server is too busy to begin; start a session again later.") from None

    def _video_start(self, order: SessionStart, world: World, film: Film) -> events.VideoStart:
        config = self.service.model.config
        height, width = height_width(config.codec.image_size)
        return events.VideoStart(
            event_id=order.event_id,
            format=order.format,
            content_type=film.content_type,
            num_messages=len(film.init),
            width=width,
            height=height,
            fps=config.fps,
            chunk_frames=config.chunk_frames,
            pace=order.pace,
            seed=world.settings.seed,
            num_inference_steps=world.settings.num_inference_steps,
            guidance_scale=world.settings.guidance_scale,
        )

    # ---- the client ----------------------------------------------------------------------------------

    async def _read(self) -> Reason:
        """Answer event after event until the client stops or falls silent."""
        while True:
            try:
                async with asyncio.timeout(self._expires - time.monotonic()):
                    message = await self._websocket.receive()
            except TimeoutError:
                if not self._started.done():
                    return "start_timeout"
                if self._live is not None and time.monotonic() >= self._expires:
                    return "idle"
                # Nobody is idle who waits for the server.
                self._expires = max(self._expires, time.monotonic() + 0.1)
                continue
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(message.get("code", 1006))
            self._allowance.take()
            event: Any = None
            try:
                event = self._understand(message)
                if isinstance(event, events.SessionStop):
                    return "stopped"
                await self._handle(event)
            except MessageTooLargeError:
                raise
            except WorldModelError as error:
                await self._refuse(error, event)

    def _understand(self, message: Any) -> Any:
        """Return an event, or the upload that was announced."""
        text, data = message.get("text"), message.get("bytes")
        size = len(text.encode("utf-8", "replace")) if text is not None else len(data)
        most = self._limits.max_message_bytes if text is not None else self._limits.max_upload_bytes
        if size > most:
            raise MessageTooLargeError(f"The message has {size} bytes; {most} are allowed.")
        if text is not None:
            return events.read_event(text)
        if self._order is None or self._started.done():
            raise OutOfOrderError(
                "A binary message came unannounced; send session.start with upload before it."
            )
        return data

    async def _handle(self, event: Any) -> None:
        if isinstance(event, events.SessionPing):
            await self._send(events.SessionPong(event_id=event.event_id))
            return
        if isinstance(event, SessionStart | bytes):
            self._start(event)
        elif self._live is None:
            raise OutOfOrderError("The world has not begun; send session.start and wait for video.start.")
        elif isinstance(event, events.SessionInteraction):
            await self._live.interact(event.interaction, event.replace)
        elif isinstance(event, events.SessionDescribe):
            self._describe(event, self._live.world)
        else:
            self._live.command(event)
        if self._started.done():
            self._expires = time.monotonic() + self._limits.idle_timeout_s

    def _start(self, event: SessionStart | bytes) -> None:
        if isinstance(event, bytes):
            assert self._order is not None
            self._started.set_result((self._order, event))
            return
        if self._order is not None:
            raise OutOfOrderError("This session has been started; open another for another world.")
        if (event.text is None) == (not event.upload):
            raise events.InvalidEventError("A world starts from one thing: give text, or upload true.")
        self._order = event
        if not event.upload:
            self._started.set_result((event, None))

    async def _refuse(self, error: WorldModelError, event: Any) -> None:
        self._num_errors += 1
        if self._num_errors > MAX_ERRORS:
            raise TooManyMessagesError(f"{MAX_ERRORS} events were refused; read /asyncapi.yaml.") from None
        if isinstance(event, events.SessionInteraction):
            name = event.interaction.event_id
        else:
            name = getattr(event, "event_id", None)
        await self._send(refusal(error, name))

    def _describe(self, event: events.SessionDescribe, world: World) -> None:
        if self._describing is not None and not self._describing.done():
            raise OutOfOrderError("A description is being written; wait for session.described.")
        self._describing = asyncio.create_task(self._say(event, world))

    async def _say(self, event: events.SessionDescribe, world: World) -> None:
        # A fork can be asked without holding up the world, which keeps moving.
        fork = world.fork()
        try:
            text = await fork.describe(event.question)
            await self._send(events.SessionDescribed(event_id=event.event_id, text=text, round=fork.round))
        except WorldModelError as error:
            await self._send(refusal(error, event.event_id))
        except (WebSocketDisconnect, SlowClientError):
            log.debug("nobody is left to read a description")  # the other tasks end the session
        except Exception:
            log.exception("a description failed")
            await self._send(refusal(BrokenError("The server could not describe the world."), event.event_id))
        finally:
            fork.close()


def close_code(error: WorldModelError) -> int:
    """Return the code that tells a client what ended its session."""
    if isinstance(error, TooLarge):
        return TOO_LARGE
    if isinstance(error, TooManyMessagesError) or not isinstance(error, ApiError):
        return REFUSED
    return LATER if error.status in {429, 503, 504} else REFUSED
