"""The door of every route but health's: key, limits and size come before the body is read."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from worldmodel.errors import InputError
from worldmodel.serving.auth import require_key
from worldmodel.serving.errors import ApiError, Unavailable
from worldmodel.serving.protocol import ErrorObject
from worldmodel.serving.settings import MIB, ServerConfig

Result = TypeVar("Result")

Caller = Annotated[str, Depends(require_key)]
"""Name of who sent the request."""

GONE = 499
"""Status of an answer that nobody waits for any more, as nginx counts it."""


class ClientLeft(Exception):  # noqa: N818 -- nothing is wrong with it
    """The client went away before its answer was there."""


class GuardedRoute(APIRoute):
    """A route that asks for a key and holds the caller to limits before a byte of the body is read.

    Routes of a router with this class are closed by construction, whatever their functions declare.
    """

    max_json_bytes = MIB

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            state, outcome = request.app.state, "failed"
            try:
                caller = await require_key(request)
                if state.draining and request.method == "POST":
                    raise Unavailable("The server is stopping and takes no new work; ask again later.")
                with state.limiter.request(caller):
                    response = await answer(_bounded(request, self._limit(request)))
                outcome = "ok"
                return response
            except ClientLeft:
                outcome = "cancelled"
                return Response(status_code=GONE)
            except asyncio.CancelledError:
                outcome = "cancelled"
                raise
            except (ApiError, InputError, RequestValidationError, HTTPException) as error:
                status = getattr(error, "status", getattr(error, "status_code", 400))
                outcome = "rejected" if status < 500 or isinstance(error, Unavailable) else "failed"
                if outcome == "rejected":
                    state.metrics.reject(getattr(error, "code", "invalid_request"))
                raise
            finally:
                state.metrics.request(self.path_format, outcome)

        return guarded

    def _limit(self, request: Request) -> int:
        config: ServerConfig = request.app.state.config
        kind = request.headers.get("content-type", "")
        return config.max_upload_bytes + MIB if kind.startswith("multipart/") else self.max_json_bytes


class MediaInJsonRoute(GuardedRoute):
    """A guarded route whose JSON holds media in base64, which is a third longer than the media."""

    def _limit(self, request: Request) -> int:
        config: ServerConfig = request.app.state.config
        return MIB + config.max_upload_bytes * 4 // 3


def _bounded(request: Request, limit: int) -> Request:
    """Refuse a body above the limit: by its announced length, or as soon as more has come."""
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 18 or int(length) > limit:
        raise _too_large(limit)
    return Request(request.scope, _counted(request.receive, limit))


def _counted(receive: Receive, limit: int) -> Receive:
    num_bytes = 0

    async def counted() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > limit:
            raise _too_large(limit)
        return message

    return counted


def _too_large(limit: int) -> HTTPException:
    # An HTTPException, which is the one error that passes FastAPI's reading of a body as it is.
    return HTTPException(413, f"The body is larger than {limit} bytes; send less.")


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work, but only as long as its client is there.

    Raises:
        ClientLeft: the client went away; the work was cancelled.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorObject, "description": about}
    for status, about in {
        400: "The request is malformed, or a value in it cannot be used.",
        401: "The key is missing or wrong.",
        403: "A page of another site asked a server without keys.",
        404: "There is nothing of this name, or it is somebody else's.",
        406: "No format that is asked for can be given.",
        409: "The request does not fit the state of things.",
        413: "The body or an upload is too large.",
        415: "The body or an upload is of a kind that is not taken.",
        429: "A limit is reached; Retry-After says when to come again.",
        503: "The server is starting or stopping.",
        504: "The work took longer than is allowed.",
    }.items()
}
"""Errors that every guarded route may answer."""
