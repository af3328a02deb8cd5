"""WebSocket sessions, the AsyncAPI document, and the play page."""

import importlib.resources
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import APIRouter, Request, Response, WebSocket
from fastapi.responses import JSONResponse, RedirectResponse

from worldmodel.serving.auth import accepted_subprotocol, authenticate
from worldmodel.serving.context import Context, ServerContext
from worldmodel.serving.engine.shares import ask_as
from worldmodel.serving.errors import ApiError, NotFoundError, RateLimitError
from worldmodel.serving.realtime import asyncapi
from worldmodel.serving.realtime.connection import CLOSE_POLICY, ROUTE, Connection
from worldmodel.serving.realtime.events import error_event

router = APIRouter()

MAX_SOCKETS = 256
PLAY_FILES = {"play.js": "text/javascript", "controls.js": "text/javascript", "play.css": "text/css"}
PLAY_HEADERS = {
    # Nothing is loaded from other origins. The demo, on another port of this machine, may embed the page.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self' http://127.0.0.1:* http://localhost:*"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.websocket(ROUTE)
async def realtime_video(websocket: WebSocket, context: Context) -> None:
    """Serve one session."""
    try:
        caller = authenticate(websocket, context.keys)
        with _count_socket(context, caller):
            ask_as(caller, "live")
            await websocket.accept(accepted_subprotocol(websocket))
            await Connection(websocket, caller, context).run()
    except ApiError as error:
        context.metrics.request(ROUTE, "rejected")
        context.metrics.reject(error.code)
        await _deny(websocket, error)


@contextmanager
def _count_socket(context: ServerContext, caller: str) -> Iterator[None]:
    """Count the open sockets of a caller: even one without a world takes memory."""
    context.require_running()
    with context.limiter.request(caller):
        pass  # the handshake counts as a request, the session does not
    sockets = context.num_sockets
    if sockets[caller] >= context.config.of_key("max_sockets_per_key", caller):
        raise RateLimitError(f"This key has {sockets[caller]} open sockets; close one first.", 5)
    if not context.config.has_room(caller, sockets, MAX_SOCKETS):
        most = sockets.total()
        raise RateLimitError(f"The server has {most} open sockets, the most for this key; try later.", 5)
    sockets[caller] += 1
    try:
        yield
    finally:
        sockets[caller] -= 1
        sockets += Counter()  # drops keys without sockets


async def _deny(websocket: WebSocket, error: ApiError) -> None:
    """Reject a handshake with an HTTP response, where the server supports it."""
    if "websocket.http.response" not in websocket.scope.get("extensions", {}):
        await websocket.close(CLOSE_POLICY)
        return
    detail = error_event(error).error.model_dump()
    await websocket.send_denial_response(JSONResponse({"error": detail}, error.status, error.headers))


@router.get("/asyncapi.yaml", include_in_schema=False)
def asyncapi_document() -> Response:
    """Return the AsyncAPI document of the WebSocket; `/openapi.json` describes the other routes."""
    return Response(asyncapi.document_yaml(ROUTE), media_type="application/yaml")


@router.get("/", include_in_schema=False)
def root() -> Response:
    """Redirect to the play page; the target is relative, so that it holds behind a proxy's path."""
    return RedirectResponse("play")


@router.get("/play", include_in_schema=False)
def play(request: Request) -> Response:
    """Return the play page, which asks for a key if the server requires one."""
    page = _page("play.html", "text/html")
    host = request.url.hostname or ""
    if re.fullmatch(r"[\w.-]+", host, re.ASCII):
        page.headers["Content-Security-Policy"] += f" http://{host}:*"
    return page


@router.get("/play/{name}", include_in_schema=False)
def play_file(name: str) -> Response:
    """Return a file of the play page."""
    if name not in PLAY_FILES:
        raise NotFoundError("There is no such file; open /play.")
    return _page(name, PLAY_FILES[name])


def _page(name: str, media_type: str) -> Response:
    text = importlib.resources.files("worldmodel.demo").joinpath(name).read_text("utf-8")
    return Response(text, media_type=media_type, headers=PLAY_HEADERS)
