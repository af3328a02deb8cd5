"""Logs of a server: request ids, the access log, and formatting as text or JSON."""

import json
import logging
import re
import secrets
import time
from contextvars import ContextVar

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from worldmodel.serving import tracing
from worldmodel.serving.settings import HttpOptions

ACCESS = logging.getLogger("worldmodel.serving.access")
HEADER = "x-request-id"
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the request that the current task serves."""
_GIVEN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_REFUSED = "ASGI callable returned without completing handshake."
"""Messages that uvicorn logs as errors when a WebSocket is refused; the access log has the status."""


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, request id, and the fields of `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", None),
            "trace_id": getattr(record, "trace_id", None),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in fields.items() if value is not None})


class _Context(logging.Filter):
    """Adds the request id, and drops messages that are not errors."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id, record.trace_id = REQUEST_ID.get(), tracing.current_trace()
        return record.getMessage() != _REFUSED


def configure(options: HttpOptions) -> None:
    """Log the package and uvicorn to stderr."""
    handler = logging.StreamHandler()
    handler.addFilter(_Context())
    plain = "%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"
    handler.setFormatter(JsonFormatter() if options.log_format == "json" else logging.Formatter(plain))
    for name in ("worldmodel", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(options.log_level.upper())
    ACCESS.setLevel(logging.INFO if options.access_log else logging.CRITICAL)


class RequestLog:
    """ASGI middleware: gives every request an id, repeats it in the response, and logs the outcome.

    A client may choose the id, in the header `x-request-id`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or WebSocket."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(HEADER.encode(), b"").decode("latin-1")
        request_id = given if _GIVEN_ID.fullmatch(given) else secrets.token_hex(8)
        token, began, status = REQUEST_ID.set(request_id), time.monotonic(), 0

        async def logged(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
            elif message["type"] == "websocket.accept":
                status = 101
            await send(message)

        try:
            await self.app(scope, receive, logged)
        finally:
            duration_ms = round(1000 * (time.monotonic() - began), 1)
            method, path = scope.get("method", "WEBSOCKET"), scope["path"]
            fields = {"method": method, "path": path, "status": status, "duration_ms": duration_ms}
            ACCESS.info("%s %r %d %.1f ms", method, path, status, duration_ms, extra={"fields": fields})
            REQUEST_ID.reset(token)


class HeadRequests:
    """ASGI middleware: answers HEAD as GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self.app({**scope, "method": "GET"}, receive, without_body)
