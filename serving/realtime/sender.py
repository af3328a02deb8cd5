"""Back-pressure for one WebSocket: sending waits until the client reads."""

import asyncio
import time
from contextlib import suppress

from fastapi import WebSocket, WebSocketDisconnect
from starlette.websockets import WebSocketDisconnected

from worldmodel.serving.realtime.events import Event

CLOSE_TIMEOUT_S = 2.0


class SlowClientError(Exception):
    """The client did not read within the send timeout."""


class EventSender:
    """Sends one event at a time, each followed by its binary messages, without a queue.

    An event that is being sent is always completed: otherwise the client would take the next event for a
    frame.
    """

    def __init__(self, websocket: WebSocket, timeout_s: float) -> None:
        self._websocket, self._timeout_s = websocket, timeout_s
        self._lock = asyncio.Lock()
        self._timed_out = False
        self.media_sent_at = 0.0
        """When the client took the last binary message."""

    async def send(self, event: Event, *messages: bytes) -> None:
        """Send an event and its binary messages.

        Raises:
            SlowClientError: the client does not read.
            WebSocketDisconnect: the client has disconnected.
        """
        writing = asyncio.create_task(self._write(event.model_dump_json(), messages))
        # Marks the exception as retrieved when the caller is cancelled.
        writing.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(writing)

    async def _write(self, text: str, messages: tuple[bytes, ...]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s), self._lock:
                if self._timed_out:
                    raise SlowClientError
                await self._websocket.send_text(text)
                for message in messages:
                    await self._websocket.send_bytes(message)
                if messages:
                    self.media_sent_at = time.monotonic()
        except TimeoutError:
            self._timed_out = True
            raise SlowClientError from None
        except WebSocketDisconnected:
            raise WebSocketDisconnect(1006) from None

    async def close(self, code: int) -> None:
        """Close the socket; give up after `CLOSE_TIMEOUT_S`."""
        with suppress(TimeoutError, WebSocketDisconnect, WebSocketDisconnected):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._websocket.close(code)
