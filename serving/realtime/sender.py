"""What one socket may cost: sending waits for its client, and a client may send so much and no more."""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass

from fastapi import WebSocket, WebSocketDisconnect
from starlette.websockets import WebSocketDisconnected

from worldmodel.serving.errors import TooManyRequests
from worldmodel.serving.realtime.events import Event

BURST_S = 4.0
"""Messages of so many seconds may come at once."""
CLOSE_S = 2.0
"""How long a client may keep the socket from being closed."""


class TooManyMessagesError(TooManyRequests):
    """A client that sends without pause, or wrong events only; the session ends."""

    code = "too_many_messages"


class SlowClientError(Exception):
    """A client has not read for so long that nothing more is sent to it."""


class Outbox:
    """Sends one event after the other, each with its binary messages, never faster than the client reads.

    Nothing is queued: whoever sends waits. What has begun to be sent is sent to its end, or the client would
    take the next event for a frame.
    """

    def __init__(self, websocket: WebSocket, timeout_s: float) -> None:
        self._websocket, self._timeout_s = websocket, timeout_s
        self._lock = asyncio.Lock()
        self._broken = False

    async def send(self, event: Event, *messages: bytes) -> None:
        """Send an event and what belongs to it.

        Raises:
            SlowClientError: the client does not read.
            WebSocketDisconnect: it has gone.
        """
        writing = asyncio.create_task(self._write(event.model_dump_json(), messages))
        writing.add_done_callback(
            lambda task: task.cancelled() or task.exception()
        )  # may have no other reader
        await asyncio.shield(writing)

    async def _write(self, text: str, messages: tuple[bytes, ...]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s), self._lock:
                if self._broken:
                    raise SlowClientError
                await self._websocket.send_text(text)
                for message in messages:
                    await self._websocket.send_bytes(message)
        except TimeoutError:
            self._broken = True
            raise SlowClientError from None
        except WebSocketDisconnected:
            raise WebSocketDisconnect(1006) from None

    async def close(self, code: int) -> None:
        """Close the socket, if the client lets it."""
        with suppress(TimeoutError, WebSocketDisconnect, WebSocketDisconnected):
            async with asyncio.timeout(CLOSE_S):
                await self._websocket.close(code)


@dataclass
class Allowance:
    """Tells a client that floods from one that plays."""

    per_s: float
    spent: float = 0.0
    at: float = 0.0

    def take(self) -> None:
        """Take note of a message.

        Raises:
            TooManyMessagesError: too many came in too short a time.
        """
        now = time.monotonic()
        self.spent = max(0.0, self.spent - (now - self.at) * self.per_s) + 1
        self.at = now
        if self.spent > self.per_s * BURST_S:
            raise TooManyMessagesError(f"Too many messages; send {self.per_s:g} in a second at most.")
