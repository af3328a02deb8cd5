"""Who may ask for what: keys, the address the server listens on, and limits for each key.

Nothing is open but `/health`, `/ready`, the descriptions of the interface (`/openapi.json`, `/asyncapi.yaml`)
and the empty play page, which say nothing about users. Every other router depends on `require_key`; a
dependency looks at the request that arrived, so no spelling of its path or `Host` gets around it. Without
keys the server answers only on this machine's own addresses, and not to pages of other sites that a browser
on this machine shows.
"""

import hashlib
import hmac
import ipaddress
import os
import re
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request, WebSocket
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import HTTPConnection

from worldmodel.errors import ConfigError
from worldmodel.serving.errors import Forbidden, TooManyRequests, Unauthorized

VARIABLE = "WORLDMODEL_API_KEYS"
"""Environment variable with keys, separated by commas or spaces."""
SUBPROTOCOL = "worldmodel.v1"
KEY_SUBPROTOCOL = "worldmodel.key."
"""Browsers cannot set headers of a WebSocket: they offer `worldmodel.v1` and this plus the key."""
ANYONE = "anyone"
"""Name of every caller of a server without keys."""

_KEY = re.compile(r"[A-Za-z0-9_.~-]{16,256}")
_ADVICE = "a key is 16 to 256 letters, digits or . _ ~ -, as `openssl rand -hex 32` makes"


class Keys:
    """The keys a server takes; it keeps only their hashes."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        """Take `keys`; none at all means that no key is asked for.

        Raises:
            ConfigError: a key is too short or has other characters than a header may carry.
        """
        keys = list(keys)
        for number, key in enumerate(keys, start=1):
            if not _KEY.fullmatch(key):
                raise ConfigError(f"API key number {number} cannot be used; {_ADVICE}.")
        self._hashes = [_hash(key) for key in keys]

    @classmethod
    def load(cls, path: str | Path | None = None, environ: Mapping[str, str] = os.environ) -> "Keys":
        """Read keys from a file, one on each line (`#` begins a comment), or else from the environment.

        Raises:
            ConfigError: the file cannot be read, holds no key, or others than its owner may read or write
                it; or a key cannot be used.
        """
        if path is None:
            given = environ.get(VARIABLE)
            keys = re.split(r"[\s,]+", given.strip(" ,\n\t")) if given is not None else []
            if given is not None and not any(keys):
                raise ConfigError(f"{VARIABLE} is set but holds no key; unset it or put one in.")
            return cls(keys)
        lines = (line.split("#")[0].strip() for line in _read_private(Path(path)).splitlines())
        keys = [line for line in lines if line]
        if not keys:
            raise ConfigError(f"The key file {str(path)!r} holds no key; write one on each line.")
        return cls(keys)

    def __len__(self) -> int:
        return len(self._hashes)

    def __repr__(self) -> str:
        return f"Keys({len(self)})"

    def caller(self, key: str) -> str | None:
        """Return a name for who sent `key` (the same every time, telling nothing of it), or None.

        The time taken depends on neither the key nor which of the server's keys it equals.
        """
        found = None
        sent = _hash(key)
        for known in self._hashes:
            if hmac.compare_digest(sent, known):
                found = known
        return found.hex()[:16] if found is not None else None


def _hash(key: str) -> bytes:
    return hashlib.sha256(b"worldmodel api key\0" + key.encode("utf-8", "surrogateescape")).digest()


def _read_private(path: Path) -> str:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(2**20).decode("ascii")
    except (OSError, ValueError):
        raise ConfigError(f"The key file {str(path)!r} cannot be read; check path and content.") from None
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"Others may read or write the key file {str(path)!r}; run chmod 600 on it.")
    if status.st_uid not in {0, os.geteuid()}:
        raise ConfigError(f"The key file {str(path)!r} belongs to another user; use one of your own.")
    return text


# At the door


def check_bind(host: str, keys: Keys) -> None:
    """Refuse to listen where other machines can reach a server without keys.

    Raises:
        ConfigError: `host` is not this machine's own address and there is no key.
    """
    if not len(keys) and not _is_loopback(host):
        raise ConfigError(
            f"host is {host!r}, which other machines can reach, and there is no API key; "
            f"use 127.0.0.1, or set {VARIABLE} or a key file."
        )


def _is_loopback(host: str) -> bool:
    """Whether a host, as a name or an address, can only be this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


_BEARER = HTTPBearer(auto_error=False, description="An API key of the server.")


async def require_key(
    request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)] = None
) -> str:
    """Return the caller's name; the dependency of every router but health's.

    The app keeps its `Keys` as `app.state.keys`.

    Raises:
        Unauthorized: the key is missing or wrong.
        Forbidden: the server has no keys and the request is a page's of another site.
    """
    return _admit(request, _bearer(request))


async def require_socket_key(websocket: WebSocket) -> str:
    """Return the caller's name of a WebSocket, before it is accepted; `require_key` for sockets.

    The key comes as for HTTP or, from browsers, as the subprotocol `worldmodel.key.<key>`.

    Raises:
        Unauthorized: the key is missing or wrong.
        Forbidden: the server has no keys and the request is a page's of another site.
    """
    sent = _bearer(websocket)
    for offer in _offers(websocket):
        if sent is None and offer.startswith(KEY_SUBPROTOCOL):
            sent = offer.removeprefix(KEY_SUBPROTOCOL)
    return _admit(websocket, sent)


def subprotocol(websocket: WebSocket) -> str | None:
    """Return the subprotocol to accept a WebSocket with: never the one that holds the key."""
    return SUBPROTOCOL if SUBPROTOCOL in _offers(websocket) else None


def _offers(websocket: WebSocket) -> list[str]:
    headers = websocket.headers.getlist("sec-websocket-protocol")
    return [offer.strip() for header in headers for offer in header.split(",")]


def _bearer(connection: HTTPConnection) -> str | None:
    headers = connection.headers.getlist("authorization")
    scheme, _, key = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
    return key.strip() if scheme.lower() == "bearer" else None


def _admit(connection: HTTPConnection, key: str | None) -> str:
    keys: Keys = connection.app.state.keys
    if len(keys):
        caller = keys.caller(key) if key is not None else None
        if caller is None:
            raise Unauthorized("The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.")
        return caller
    # Another site's page can reach this machine's servers through the browser: directly, then its address
    # stands in Origin, or by a name that it makes resolve to 127.0.0.1, then that name stands in Host.
    origin = connection.headers.get("origin")
    host = connection.headers.get("host", "")
    if (origin is not None and not _is_local(origin)) or not _is_local(f"http://{host}"):
        raise Forbidden(
            "This server has no API keys and answers only this machine; give it a key to open it."
        )
    return ANYONE


def _is_local(origin: str) -> bool:
    try:
        host = urlsplit(origin).hostname
    except ValueError:
        return False
    # "testserver" is how Starlette's in-process client calls itself; no resolver knows the name.
    return host is not None and (host == "testserver" or _is_loopback(host))


# Limits


@dataclass(frozen=True)
class KeyLimits:
    """What one key may do at the same time, and how fast."""

    max_requests: int = 16
    """In flight."""
    max_worlds: int = 8
    """Alive."""
    requests_per_s: float = 20.0
    burst: int = 40
    """Requests that may come at once after a pause."""


class Limiter:
    """Holds every key to its limits; used from one event loop."""

    def __init__(self, limits: KeyLimits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits or KeyLimits()
        self.num_rejected = 0
        """Requests and worlds refused so far."""
        self._clock = clock
        self._requests: dict[str, int] = defaultdict(int)
        self._worlds: dict[str, int] = defaultdict(int)
        self._tokens: dict[str, tuple[float, float]] = {}

    @contextmanager
    def request(self, caller: str) -> Iterator[None]:
        """Count a request while the block runs.

        Raises:
            TooManyRequests: the key has too many requests in flight, or sends them too fast.
        """
        if self._requests[caller] >= self.limits.max_requests:
            self._reject(f"This key has {self._requests[caller]} requests in flight; wait for one to end.", 1)
        self._take_token(caller)
        self._requests[caller] += 1
        try:
            yield
        finally:
            self._requests[caller] -= 1

    def open_world(self, caller: str) -> "WorldLease":
        """Count a world until the lease is released.

        Raises:
            TooManyRequests: the key has as many live worlds as it may.
        """
        if self._worlds[caller] >= self.limits.max_worlds:
            self._reject(f"This key has {self._worlds[caller]} live worlds; delete one first.", 5)
        self._worlds[caller] += 1
        return WorldLease(self._worlds, caller)

    def num_worlds(self, caller: str) -> int:
        """Return how many live worlds a caller has."""
        return self._worlds[caller]

    def _take_token(self, caller: str) -> None:
        """Let tokens drip into the caller's bucket at the allowed pace, and take one out."""
        now = self._clock()
        tokens, last = self._tokens.get(caller, (float(self.limits.burst), now))
        tokens = min(float(self.limits.burst), tokens + (now - last) * self.limits.requests_per_s)
        if tokens < 1:
            self._tokens[caller] = tokens, now
            wait_s = (1 - tokens) / self.limits.requests_per_s
            self._reject(f"This key sends requests too fast; wait {wait_s:.1f} s.", wait_s)
        self._tokens[caller] = tokens - 1, now

    def _reject(self, message: str, retry_after: float) -> None:
        self.num_rejected += 1
        raise TooManyRequests(message, retry_after)


class WorldLease:
    """A caller's place for one live world; releasing it twice does no harm."""

    def __init__(self, worlds: dict[str, int], caller: str) -> None:
        self._worlds, self._caller, self._released = worlds, caller, False

    def release(self) -> None:
        """Give the place back."""
        if not self._released:
            self._released = True
            self._worlds[self._caller] -= 1
