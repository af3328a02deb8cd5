"""API keys: loading, comparison, and authentication of HTTP requests and WebSockets.

Only `/health`, `/ready`, the API descriptions (`/openapi.json`, `/asyncapi.yaml`) and the static play page
are open; none of them reveals anything about users. Every other route authenticates the request itself, so no
spelling of the path or of the `Host` header bypasses it. A server without keys answers only loopback
addresses, and rejects cross-origin requests that a browser on the same machine forwards.
"""

import hashlib
import hmac
import ipaddress
import logging
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import WebSocket
from starlette.requests import HTTPConnection

from worldmodel.errors import ConfigError
from worldmodel.serving.errors import AuthenticationError, PermissionDeniedError

LOG = logging.getLogger(__name__)

VARIABLE = "WORLDMODEL_API_KEYS"
"""Environment variable with API keys, separated by commas or spaces."""
SUBPROTOCOL = "worldmodel.v1"
KEY_SUBPROTOCOL = "worldmodel.key."
"""Prefix of the subprotocol that contains a key: browsers cannot set the headers of a WebSocket."""
ANONYMOUS = "anyone"
"""Caller id on a server without keys; stored in the records of videos."""

OVERRIDES = (
    *("max_worlds_per_key", "max_jobs_per_key", "max_videos_per_key"),
    *("requests_per_minute", "max_requests_per_key", "max_sockets_per_key"),
)
"""Settings of the server that a line of the key file may set for its key."""

_KEY = re.compile(r"[A-Za-z0-9_.~-]{16,256}")
_ADVICE = "a key is 16 to 256 letters, digits or . _ ~ -, as `openssl rand -hex 32` makes"


@dataclass(frozen=True)
class KeyOptions:
    """What the line of a key says beside the key: `KEY name=alice weight=2 max_worlds_per_key=4 admin`."""

    name: str | None = None
    """Its name in the metrics."""
    weight: float = 1.0
    """Time of the model that it gets beside a key of weight 1."""
    admin: bool = False
    """Whether it may read the metrics, and list and end the sessions of all keys."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Its own values of `OVERRIDES`."""

    @classmethod
    def parse(cls, words: Sequence[str]) -> "KeyOptions":
        """Read the words after a key.

        Raises:
            ConfigError: there is no such option, or it has a wrong value.
        """
        values: dict[str, Any] = {"limits": {}}
        for word in words:
            name, _, value = word.partition("=")
            name = name.replace("-", "_")
            try:
                if word == "admin":
                    values["admin"] = True
                elif name == "name" and re.fullmatch(r"[\w.@-]{1,64}", value):
                    values["name"] = value
                elif name == "weight" and 0 < (weight := float(value)) < math.inf:
                    values["weight"] = weight
                elif name in OVERRIDES and (limit := int(value)) >= 0:
                    values["limits"][name] = limit
                else:
                    raise ValueError
            except ValueError:
                raise ConfigError(
                    f"A key has the option {word[:80]!r}; use admin, name=NAME, weight=X, or one of "
                    f"{', '.join(OVERRIDES)} with a number."
                ) from None
        return cls(**values)


class Keys:
    """The API keys of a server, stored as hashes, and their options.

    Those of a file follow the file: a request after it has changed is compared with the new keys. A file that
    cannot be used changes nothing, and is logged once.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        """Hash the keys; without keys, no authentication is required.

        Raises:
            ConfigError: a key is too short, too long, or has characters that a header cannot contain.
        """
        keys = list(keys)
        for number, key in enumerate(keys, start=1):
            if not _KEY.fullmatch(key):
                raise ConfigError(f"API key number {number} is invalid; {_ADVICE}.")
        self._set({_hash(key): KeyOptions() for key in keys})
        self._file: Path | None = None
        self._version: tuple[int, ...] | None = ()

    @classmethod
    def load(cls, path: str | Path | None = None, environ: Mapping[str, str] = os.environ) -> "Keys":
        """Read keys from a file (one per line, `#` starts a comment) or from the environment.

        A line may have `KeyOptions` after its key.

        Raises:
            ConfigError: the file cannot be read, has no keys, or is accessible to other users; or a key is
                invalid.
        """
        if path is None:
            given = environ.get(VARIABLE)
            keys = re.split(r"[\s,]+", given.strip(" ,\n\t")) if given is not None else []
            if given is not None and not any(keys):
                raise ConfigError(f"{VARIABLE} is set but contains no key; unset it or add one.")
            return cls(keys)
        made = cls()
        made._file = Path(path)
        made._read_file()
        return made

    def _read_file(self) -> None:
        """Take the keys of the file, if it has changed."""
        if self._file is None or (version := _version(self._file)) == self._version:
            return
        self._version = version
        lines = (line.split("#")[0].split() for line in read_private(self._file, "key file").splitlines())
        read = {words[0]: KeyOptions.parse(words[1:]) for words in lines if words}
        if not read:
            raise ConfigError(f"The key file {str(self._file)!r} contains no key; write one per line.")
        self._set(dict(zip(Keys(read)._options, read.values(), strict=True)))

    def _set(self, options: dict[bytes, KeyOptions]) -> None:
        self._options = options
        self._by_caller = {_caller_id(known): each for known, each in options.items()}

    def __len__(self) -> int:
        return len(self._options)

    def __repr__(self) -> str:
        return f"Keys({len(self)})"

    def caller(self, key: str) -> str | None:
        """Return a stable id for the key that reveals nothing about it, or None for an unknown key.

        The comparison takes constant time.
        """
        try:
            self._read_file()
        except ConfigError as error:
            LOG.error("The keys stay as they were: %s", error)
        found = None
        sent = _hash(key)
        for known in self._options:
            if hmac.compare_digest(sent, known):
                found = known
        return _caller_id(found) if found is not None else None

    def options(self, caller: str) -> KeyOptions:
        """Return the options of a caller; the defaults for one without a key."""
        return self._by_caller.get(caller, KeyOptions())

    def name(self, caller: str) -> str:
        """Return the name of a caller's key, or else the caller id."""
        return self.options(caller).name or caller

    def is_admin(self, caller: str) -> bool:
        """Return whether a caller may see what is everyone's: an admin or, where no key is one, any."""
        return self.options(caller).admin or not any(each.admin for each in self._options.values())


def _version(path: Path) -> tuple[int, ...] | None:
    """Return what changes when a file is written or replaced."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _caller_id(known: bytes) -> str:
    return known.hex()[:16]


def _hash(key: str) -> bytes:
    return hashlib.sha256(b"worldmodel api key\0" + key.encode("utf-8", "surrogateescape")).digest()


def read_private(path: Path, what: str) -> str:
    """Return the text of a file with secrets, which `what` names in errors.

    Raises:
        ConfigError: it cannot be read, or other users can read it or own it.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(2**20).decode("ascii")
    except (OSError, ValueError):
        raise ConfigError(f"The {what} {str(path)!r} cannot be read; check path and content.") from None
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"The {what} {str(path)!r} is accessible to other users; run chmod 600 on it.")
    if status.st_uid not in {0, os.geteuid()}:
        raise ConfigError(f"The {what} {str(path)!r} belongs to another user; use one of your own.")
    return text


def check_bind(host: str, keys: Keys) -> None:
    """Raise `ConfigError` for an address that other machines can reach if there are no keys."""
    if not len(keys) and not _is_loopback(host):
        raise ConfigError(
            f"host is {host!r}, which other machines can reach, and there is no API key; "
            f"use 127.0.0.1, or set {VARIABLE} or a key file."
        )


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def authenticate(connection: HTTPConnection, keys: Keys) -> str:
    """Return the caller id of a request, or of a WebSocket before it is accepted.

    The key is sent as bearer token or, on a WebSocket, as the subprotocol `worldmodel.key.<key>`.

    Raises:
        AuthenticationError: the key is missing or unknown.
        PermissionDeniedError: the server has no keys and the request is cross-origin.
    """
    if len(keys):
        key = _bearer_token(connection)
        if key is None and isinstance(connection, WebSocket):
            offers = [name for name in _offered(connection) if name.startswith(KEY_SUBPROTOCOL)]
            key = offers[0].removeprefix(KEY_SUBPROTOCOL) if offers else None
        caller = keys.caller(key) if key is not None else None
        if caller is None:
            raise AuthenticationError("The API key is missing or unknown; send 'Authorization: Bearer KEY'.")
        return caller
    # A web page can reach a loopback server through the browser: directly, with its own site in Origin, or
    # by DNS rebinding, with its own name in Host.
    origin = connection.headers.get("origin")
    host = connection.headers.get("host", "")
    if (origin is not None and not _is_local(origin)) or not _is_local(f"http://{host}"):
        raise PermissionDeniedError(
            "This server has no API keys and answers only local requests; configure a key to open it."
        )
    return ANONYMOUS


def accepted_subprotocol(websocket: WebSocket) -> str | None:
    """Return the subprotocol with which to accept a WebSocket: never the one that contains the key."""
    return SUBPROTOCOL if SUBPROTOCOL in _offered(websocket) else None


def _offered(websocket: HTTPConnection) -> list[str]:
    headers = websocket.headers.getlist("sec-websocket-protocol")
    return [offer.strip() for header in headers for offer in header.split(",")]


def _bearer_token(connection: HTTPConnection) -> str | None:
    headers = connection.headers.getlist("authorization")
    scheme, _, key = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
    return key.strip() if scheme.lower() == "bearer" else None


def _is_local(origin: str) -> bool:
    try:
        host = urlsplit(origin).hostname
    except ValueError:
        return False
    return host is not None and _is_loopback(host)
