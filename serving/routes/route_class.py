"""Route classes that authenticate, limit and count every request before its body is read."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeAlias, TypeVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from worldmodel.errors import InputError
from worldmodel.media import MediaLimits
from worldmodel.serving.context import get_context, require_key
from worldmodel.serving.engine.shares import Purpose, ask_as
from worldmodel.serving.errors import ApiError, UnavailableError, UnsupportedFormatError
from worldmodel.serving.protocol import ErrorObject
from worldmodel.serving.settings import MIB, ServerConfig

Result = TypeVar("Result")
Place: TypeAlias = Callable[[], Awaitable[None]]
"""Waits for a place for a large body, which the request holds from then on."""

BODY_TIMEOUT_S, MIN_BYTES_PER_S = 10.0, 64 * 2**10
"""Time in which the body of a request must arrive, and its least rate from then on."""
CLIENT_CLOSED_REQUEST = 499
"""Status for the log when the client has disconnected, as in nginx."""


class ClientDisconnectedError(Exception):
    """The client disconnected before the response was ready."""


class AuthenticatedRoute(APIRoute):
    """Route that checks the key and the limits of the caller before it reads the body.

    Every route of a router with this class is protected, whatever dependencies its function declares.
    """

    max_json_bytes = MIB
    max_image_json_bytes: int | None = None
    """Size of a JSON body that has no video; None for routes whose JSON has no media."""
    purpose: Purpose = "step"
    """What its calls to the model are for."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def authenticated(request: Request) -> Response:
            context, outcome = get_context(request), "failed"
            try:
                caller = await require_key(request)
                ask_as(caller, self.purpose)
                if request.method == "POST":
                    context.require_running()
                if request.headers.get("content-encoding", "identity") != "identity":
                    raise UnsupportedFormatError("Send the body without compression.")
                if self.body_field is not None and not _is_json(request):
                    raise UnsupportedFormatError("Send the body as application/json.")
                with context.limiter.request(caller):
                    async with AsyncExitStack() as held:

                        async def place() -> None:
                            await held.enter_async_context(context.large_bodies_of_key[caller])
                            await held.enter_async_context(context.large_bodies)

                        limit = self._max_body_bytes(request, context.config)
                        image_limit = None if _is_form(request) else self.max_image_json_bytes
                        response = await handler(_limit_body(request, limit, image_limit, place))
                outcome = "ok"
                return response
            except (ClientDisconnectedError, ClientDisconnect):
                outcome = "cancelled"
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            except asyncio.CancelledError:
                outcome = "cancelled"
                raise
            except (ApiError, InputError, RequestValidationError, HTTPException) as error:
                status = getattr(error, "status", getattr(error, "status_code", 400))
                outcome = "rejected" if status < 500 or isinstance(error, UnavailableError) else "failed"
                if outcome == "rejected":
                    context.metrics.reject(getattr(error, "code", "invalid_request"))
                raise
            finally:
                context.metrics.request(self.path_format, outcome)

        return authenticated

    def _max_body_bytes(self, request: Request, config: ServerConfig) -> int:
        return config.max_upload_bytes + MIB if _is_form(request) else self.max_json_bytes


class VideoRoute(AuthenticatedRoute):
    """Route whose JSON may contain media in base64, which adds a third to their size."""

    max_image_json_bytes = MIB + MediaLimits.max_image_bytes * 4 // 3

    def _max_body_bytes(self, request: Request, config: ServerConfig) -> int:
        return MIB + config.max_upload_bytes * 4 // 3


class ChatRoute(VideoRoute):
    """Route that answers questions about media in its JSON."""

    purpose = "chat"


class ImageRoute(AuthenticatedRoute):
    """Route that generates images."""

    purpose = "image"


def _is_form(request: Request) -> bool:
    return request.headers.get("content-type", "").lower().startswith("multipart/")


def _is_json(request: Request) -> bool:
    """Return whether a body is declared as JSON, or not declared at all."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    return content_type == "application/json"


def _limit_body(request: Request, limit: int, image_limit: int | None, place: Place) -> Request:
    """Reject a body above the limit, by its content length or as soon as more bytes have arrived.

    One that does not mention a video is rejected above `image_limit`.
    """
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 18 or int(length) > limit:
        raise _body_too_large(limit)
    return LimitedRequest(request.scope, _limited(request.receive, limit, image_limit, place))


class LimitedRequest(Request):
    """A request whose body is parsed several times as fast as by `json`, and a large one in a thread."""

    async def json(self) -> Any:
        body = await self.body()
        parse = partial(from_json, body, allow_inf_nan=False)
        try:
            return await asyncio.to_thread(parse) if len(body) > MIB else parse()
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


def _limited(receive: Receive, limit: int, image_limit: int | None, place: Place) -> Receive:
    """Receive a body of at most `limit` bytes, which must arrive at a least rate once it is asked for.

    A place for it is taken when a MiB has arrived: bytes that are only announced take none from others.
    """
    num_bytes, complete, large = 0, False, False
    has_video, end = image_limit is None, b""
    waited_s = 0.0

    async def limited() -> Message:
        nonlocal num_bytes, complete, large, waited_s, has_video, end
        if complete:
            return await receive()
        began = asyncio.get_running_loop().time()
        patience_s = BODY_TIMEOUT_S + num_bytes / MIN_BYTES_PER_S - waited_s
        try:
            async with asyncio.timeout(patience_s):
                message = await receive()
        except TimeoutError:
            raise HTTPException(408, "The body arrives too slowly; send it again.") from None
        waited_s += asyncio.get_running_loop().time() - began
        body = message.get("body", b"")
        num_bytes, complete = num_bytes + len(body), not message.get("more_body", False)
        if num_bytes > limit:
            raise _body_too_large(limit)
        if not has_video:
            has_video, end = b"video" in end + body, body[-4:]
            if image_limit is not None and num_bytes > image_limit and not has_video:
                raise _body_too_large(image_limit)
        if num_bytes > MIB and not large:
            large = True
            await place()
        return message

    return limited


def _body_too_large(limit: int) -> HTTPException:
    # FastAPI wraps every other exception that is raised while it reads a body.
    return HTTPException(413, f"The body is larger than {limit} bytes; send less.")


async def while_connected(request: Request, call: Awaitable[Result]) -> Result:
    """Await a call, and cancel it when the client disconnects.

    Raises:
        ClientDisconnectedError: the client disconnected; the call was cancelled.
    """
    running = asyncio.ensure_future(call)
    disconnecting = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({running, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientDisconnectedError
        return running.result()
    finally:
        disconnecting.cancel()
        if not running.done():
            running.cancel()
            await asyncio.wait({running})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


_DESCRIPTIONS: dict[int, str] = {
    400: "The request is malformed, or a value in it is invalid.",
    401: "The API key is missing or unknown.",
    403: "Cross-origin request to a server without keys.",
    404: "The object does not exist, or belongs to another key.",
    408: "The body did not arrive in time.",
    409: "The request does not fit the state of the object.",
    413: "The body or an upload is too large.",
    415: "The content type of the body or the format of an upload is not supported.",
    429: "A limit is reached; Retry-After says when to retry.",
    503: "The server is starting or stopping, or has too many connections.",
    504: "The work exceeded its time limit.",
}
Responses = dict[int | str, dict[str, Any]]
BODY = (400, 408, 415)
"""Statuses of routes that read a body, for `errors`."""
OBJECT = (400, 404)
"""Statuses of routes whose path or body names an object."""


def errors(*statuses: int) -> Responses:
    """Return the OpenAPI description of a route's errors."""
    return {status: {"model": ErrorObject, "description": _DESCRIPTIONS[status]} for status in statuses}


ERRORS = errors(401, 403, 413, 429, 503)
"""Errors that every authenticated route may return; routes declare what they add to them."""
