"""Access to the page from other machines: its key, its address in the local network, and a QR code."""

import hmac
import io
import ipaddress
import os
import re
import secrets
import socket
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from worldmodel.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

KEY_VARIABLE = "WORLDMODEL_DEMO_KEY"
"""Environment variable with the key of the page; without it there is a new one each time."""
COOKIE = "worldmodel_key"
REFUSED = "This page needs its key; open the address that `worldmodel demo` has printed, which contains it."
STARTUP = "/gradio_api/startup-events"
"""What Gradio asks of its own page when it starts; it shows nothing."""


def is_reachable(host: str) -> bool:
    """Return whether other machines reach what listens at `host`."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def new_key() -> str:
    """Return the key of the environment, or else a new one.

    Raises:
        ConfigError: that of the environment can be guessed, or does not fit into an address.
    """
    key = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(16)
    if not re.fullmatch(r"[\w.~-]{16,256}", key, re.ASCII):
        raise ConfigError(
            f"{KEY_VARIABLE} has {len(key)} characters, or others than letters, digits and . _ ~ -; "
            "use 16 to 256 of those, as `openssl rand -hex 16` makes, or unset it."
        )
    return key


def address_of(host: str, port: int, key: str) -> str:
    """Return the address of the page in the local network, with its key."""
    name = _own_address() if host == "0.0.0.0" else host  # noqa: S104 -- the user asked for it
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/?key={key}"


def _own_address() -> str:
    """Return the address that this machine has in the network of its default route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address of documentation; nothing is sent
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"  # there is no network


def qr_code(address: str) -> str:
    """Return an address as a QR code of block characters, for a terminal."""
    import segno

    lines = io.StringIO()
    segno.make(address, error="l", micro=False).terminal(lines, compact=True, border=2)
    return lines.getvalue()


class RequireKey:
    """ASGI middleware that answers only requests with the key: in the address once, then in a cookie."""

    def __init__(self, app: "ASGIApp", key: str) -> None:
        """Protect `app` by a key."""
        self.app, self.key = app, key

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answer one request."""
        from starlette.responses import PlainTextResponse, RedirectResponse

        if scope["type"] == "lifespan" or scope.get("path") == STARTUP:
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = parse_qs(scope["query_string"].decode("latin-1")).get("key", [""])[0]
        if self._is(_cookie(headers.get(b"cookie", b"").decode("latin-1"))):
            await self.app(scope, receive, send)
        elif scope["type"] == "http" and self._is(given):
            # The key leaves the address, which may be shown to others or stored.
            response = RedirectResponse("/", status_code=303)
            response.set_cookie(COOKIE, self.key, httponly=True, samesite="lax", max_age=30 * 86_400)
            await response(scope, receive, send)
        elif scope["type"] == "http":
            await PlainTextResponse(REFUSED, status_code=401)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _is(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.key.encode())


def _cookie(header: str) -> str:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None else ""
