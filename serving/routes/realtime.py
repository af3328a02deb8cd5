"""Live worlds over a WebSocket, the description of its events, and the page to play on."""

import importlib.resources
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Response, WebSocket
from fastapi.responses import JSONResponse

from worldmodel.serving.auth import Limiter, require_socket_key, subprotocol
from worldmodel.serving.errors import ApiError, NotFound, TooManyRequests, Unavailable
from worldmodel.serving.realtime.connection import REFUSED, ROUTE, Connection, limits_of
from worldmodel.serving.realtime.events import refusal

router = APIRouter()

MAX_SOCKETS = 256
MAX_SOCKETS_PER_CALLER = 32


@router.websocket(ROUTE)
async def realtime_video(websocket: WebSocket) -> None:
    """Serve one live session."""
    state = websocket.app.state
    try:
        caller = await require_socket_key(websocket)
        with _admitted(state, caller):
            await websocket.accept(subprotocol(websocket))
            await Connection(websocket, caller, limits_of(state)).run()
    except ApiError as error:
        state.metrics.request(ROUTE, "rejected")
        state.metrics.reject(error.code)
        await _deny(websocket, error)


@contextmanager
def _admitted(state: Any, caller: str) -> Iterator[None]:
    """Count a caller's sockets: even one that starts no world holds memory."""
    if state.draining:
        raise Unavailable("The server is stopping and takes no new work; ask again later.")
    limiter: Limiter = state.limiter
    with limiter.request(caller):
        pass  # a handshake counts as a request, a session does not
    sockets: Counter[str] = getattr(state, "realtime_sockets", None) or Counter()
    state.realtime_sockets = sockets
    if sockets[caller] >= MAX_SOCKETS_PER_CALLER:
        raise TooManyRequests(f"This key has {sockets[caller]} sockets open; close one first.", 5)
    if sockets.total() >= MAX_SOCKETS:
        raise TooManyRequests(f"{MAX_SOCKETS} sockets are open, the most allowed; try again later.", 5)
    sockets[caller] += 1
    try:
        yield
    finally:
        sockets[caller] -= 1


async def _deny(websocket: WebSocket, error: ApiError) -> None:
    """Refuse a handshake with an answer over HTTP, where the server can give one."""
    if "websocket.http.response" not in websocket.scope.get("extensions", {}):
        await websocket.close(REFUSED)
        return
    detail = refusal(error).error.model_dump()
    await websocket.send_denial_response(JSONResponse({"error": detail}, error.status, error.headers))


ASYNCAPI = "asyncapi.yaml"
PLAY_FILES = {"play.js": "text/javascript", "play.css": "text/css"}
PLAY_HEADERS = {
    # Nothing of other origins is loaded or called. The Gradio demo, on another port of this machine, may
    # show the page inside its own.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'self' http://127.0.0.1:* http://localhost:*"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.get("/asyncapi.yaml", include_in_schema=False)
def asyncapi() -> Response:
    """Describe the events of the WebSocket, as `/openapi.json` describes the rest."""
    text = importlib.resources.files("worldmodel.serving").joinpath(ASYNCAPI).read_text("utf-8")
    return Response(text, media_type="application/yaml")


@router.get("/play", include_in_schema=False)
def play() -> Response:
    """Show the page to play on; it asks for a key where the server needs one."""
    return _page("play.html", "text/html")


@router.get("/play/{name}", include_in_schema=False)
def play_file(name: str) -> Response:
    """Return a file of the page.

    Raises:
        NotFound: the page has no such file.
    """
    if name not in PLAY_FILES:
        raise NotFound("There is no such file; open /play.")
    return _page(name, PLAY_FILES[name])


def _page(name: str, media_type: str) -> Response:
    text = importlib.resources.files("worldmodel.demo").joinpath(name).read_text("utf-8")
    return Response(text, media_type=media_type, headers=PLAY_HEADERS)
