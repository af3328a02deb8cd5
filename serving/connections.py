"""Idle connections of the server, which are closed so that they cannot keep others out."""

import socket
import time
from typing import Any

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.websockets.auto import AutoWebSocketsProtocol

from worldmodel.errors import ConfigError

HEAD_TIMEOUT_S = 10.0
"""Longest time that a connection may take to send the head of a request, its first one or a begun one."""
KEEP_ALIVE_S = 75
"""Time for which a silent connection is kept after a response.

Clients and proxies keep theirs for less (httpx 5 s, load balancers usually 60 s), so that they close it and
not the server: a request that is sent while the server closes its connection is lost.
"""
MAX_IDLE = 256
"""Connections that may be without a request in progress; above it, the oldest are closed."""

SEND_BUFFER_BYTES = 32 * 2**10
"""Bytes of a WebSocket in the kernel, which Linux doubles; larger frames are sent in parts."""

MAX_UNREAD_BYTES = 2**20
"""Body of which the server still reads the rest after its response, to keep the connection."""

_State = tuple[Any, bool]


class IdleConnections:
    """Finds connections of a uvicorn server without a request in progress.

    uvicorn itself closes a connection that is silent after a response (`KEEP_ALIVE_S`), but waits forever for
    the first request and for the rest of an incomplete one. WebSockets have limits of their own
    (`SessionLimits`).
    """

    def __init__(self) -> None:
        self._idle: dict[Any, tuple[_State, float]] = {}
        """State of each idle connection, and since when it is idle."""

    def close_expired(self, protocols: set[Any]) -> int:
        """Close connections that were idle too long, or are too many; returns how many.

        Args:
            protocols: uvicorn's `server_state.connections`.
        """
        now, before = time.monotonic(), self._idle
        idle = {protocol: _state(protocol) for protocol in protocols if _is_idle(protocol)}
        # Those that became idle first come first. A request in between makes a new cycle.
        self._idle = {
            protocol: (state, since)
            for protocol, (state, since) in before.items()
            if idle.get(protocol) == state
        }
        self._idle |= {protocol: (idle[protocol], now) for protocol in idle.keys() - self._idle.keys()}
        too_many = len(self._idle) - MAX_IDLE
        expired = [
            protocol
            for index, (protocol, ((_, kept), since)) in enumerate(self._idle.items())
            if index < too_many or (now - since > HEAD_TIMEOUT_S and not kept)
        ]
        for protocol in expired:
            del self._idle[protocol]
            protocol.transport.close()
        return len(expired)


class UnreadBodies:
    """ASGI middleware: closes a connection on which the large body of an answered request still arrives.

    Otherwise the server would read all of it, also of a request without a key, before the next request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        unread = "transfer-encoding" in headers or not length.isdecimal() or len(length) > 18
        unread = unread or int(length) > MAX_UNREAD_BYTES

        async def reading() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", False)
            return message

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and unread:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self.app(scope, reading, closing)


class SmallBuffers(AutoWebSocketsProtocol):  # type: ignore[valid-type,misc]
    """WebSockets that hold few bytes which the client has not read.

    By default the kernel takes megabytes, which are half a minute of small frames: rounds would be played for
    a client that has stopped reading, and one that comes back would see what is long past.
    """

    def connection_made(self, transport: Any) -> None:
        """Limit the buffer of the kernel."""
        if (connected := transport.get_extra_info("socket")) is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        super().connection_made(transport)


def check_protocol(protocol: type[Any] = AutoHTTPProtocol) -> None:
    """Raise `ConfigError` if uvicorn's connections lack the fields that are read here."""
    if not {"cycle", "timeout_keep_alive_task"} <= set(protocol.__init__.__code__.co_names):
        raise ConfigError(
            f"uvicorn {uvicorn.__version__} does not say which connections are idle; install a version that "
            "this package was tested with, such as 0.54."
        )


def _is_idle(protocol: Any) -> bool:
    if not hasattr(protocol, "cycle"):  # a WebSocket
        return False
    return protocol.cycle is None or protocol.cycle.response_complete


def _state(protocol: Any) -> _State:
    """Return the last request of a connection, and whether it is silent since, so that uvicorn closes it."""
    return protocol.cycle, protocol.timeout_keep_alive_task is not None
