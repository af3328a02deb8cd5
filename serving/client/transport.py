"""How the client talks to the server: what is sent, what is sent again, and which error an answer is.

Errors are kinds of `worldmodel.serving.errors.ApiError`, told by the status of the answer; only clients meet

ApiError
├── Refused             400, 422  a value that the server does not take (also an InputError)
├── ServerFailed        5xx       the server did not answer as it should
├── ConnectionFailed    –         the server cannot be reached, or went silent
└── JobFailed           –         a video that ended without pictures
"""

import asyncio
import io
import ipaddress
import itertools
import tempfile
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import httpx
import numpy as np
from PIL import Image

from worldmodel.errors import ConfigError, InputError
from worldmodel.media import Frames, sniff, write_video
from worldmodel.serving.errors import (
    ApiError,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    NotFound,
    TooLarge,
    TooManyRequests,
    Unauthorized,
    Unavailable,
    UnsupportedFormat,
)
from worldmodel.types import Action

# ruff: noqa: N818 -- they are named like the kinds of worldmodel.serving.errors

T = TypeVar("T")
Observation = str | Path | bytes | Image.Image | np.ndarray
"""A file, its bytes, a picture, or uint8 frames `[h, w, 3]` or `[t, h, w, 3]`."""
AnyAction = str | Action | Mapping[str, Any] | None

NPY = "application/x-npy"
LONGEST_PAUSE_S = 15.0
NOTHING: Mapping[str, str] = MappingProxyType({})


class Refused(ApiError, InputError):
    """The server does not take a value of the request."""


class ServerFailed(ApiError):
    """The server did not answer as it should."""

    status, type, code = 500, "server_error", "server_error"


class ConnectionFailed(ApiError):
    """The server cannot be reached, or went silent."""

    status, type, code = 0, "connection_error", "connection_failed"


class JobFailed(ApiError):
    """A video ended without pictures; `code` says why."""

    status, type, code = 0, "job_error", "failed"


_KINDS: dict[int, type[ApiError]] = {
    kind.status: kind
    for kind in (
        Unauthorized,
        Forbidden,
        NotFound,
        Conflict,
        TooLarge,
        UnsupportedFormat,
        TooManyRequests,
        Unavailable,
        DeadlineExceeded,
    )
}


# ---- the wire: the only place where waiting and asyncio differ -------------------------------------------


class Transport(Protocol):
    """Carries a request; the blocking one never suspends, so that a coroutine over it ends in one go."""

    async def send(self, request: httpx.Request) -> httpx.Response: ...
    async def sleep(self, seconds: float) -> None: ...
    async def close(self) -> None: ...


class AsyncWire:
    """Lets other tasks run meanwhile."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def send(self, request: httpx.Request) -> httpx.Response:
        return await self._http.send(request)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        await self._http.aclose()


class BlockingTransport:
    """Waits."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    async def send(self, request: httpx.Request) -> httpx.Response:
        return self._http.send(request)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def close(self) -> None:
        self._http.close()


class Link:
    """Builds requests, sends them, again where that is harmless, and turns refusals into errors."""

    def __init__(
        self, wire: Transport, base_url: str, api_key: str | None, timeout_s: float, retries: int
    ) -> None:
        self.wire, self.base_url, self.retries = wire, base_url, retries
        self._headers = {"User-Agent": "worldmodel-client"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = httpx.Timeout(timeout_s, connect=min(10.0, timeout_s))

    async def call(
        self,
        method: str,
        path: str,
        *,
        repeatable: bool = True,
        retries: int | None = None,
        headers: Mapping[str, str] = NOTHING,
        **body: Any,
    ) -> httpx.Response:
        """Send a request; `repeatable` says that sending it twice does no harm."""
        retries = self.retries if retries is None else retries
        for attempt in itertools.count():
            request = httpx.Request(
                method,
                self.base_url + path,
                headers={**self._headers, **headers},
                extensions={"timeout": self._timeout.as_dict()},
                **body,
            )
            try:
                response = await self.wire.send(request)
            except httpx.TransportError as error:
                # A connection that was never made carried nothing: trying again is always harmless.
                unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
                if attempt >= retries or not (repeatable or unsent):
                    raise ConnectionFailed(self._sentence(error)) from None
                await self.wire.sleep(min(LONGEST_PAUSE_S, 0.25 * 2**attempt))
                continue
            if response.is_success:
                return response
            failed = _error_of(response)
            if attempt >= retries or not isinstance(failed, TooManyRequests | Unavailable):
                raise failed
            await self.wire.sleep(min(LONGEST_PAUSE_S, _retry_after(response, 0.5 * 2**attempt)))
        raise AssertionError("unreachable")

    async def json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Send a request whose answer is a JSON object."""
        response = await self.call(method, path, **options)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ServerFailed(f"{self.base_url} does not answer in JSON; is it a worldmodel server?")
        return answer

    async def frames(self, method: str, path: str, **options: Any) -> Frames:
        """Send a request whose answer is frames, uint8 `[t, h, w, 3]`."""
        response = await self.call(method, path, headers={"Accept": NPY}, **options)
        try:
            frames = np.lib.format.read_array(io.BytesIO(response.content), allow_pickle=False)
        except (ValueError, EOFError):
            frames = np.empty(0)
        if frames.dtype != np.uint8 or frames.ndim != 4:
            raise ServerFailed(f"{self.base_url} does not answer with frames; is it a worldmodel server?")
        return frames

    def _sentence(self, error: httpx.TransportError) -> str:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return f"No server answers at {self.base_url}; run `worldmodel serve`, or check the address."
        if isinstance(error, httpx.TimeoutException):
            return f"{self.base_url} took too long to answer; try again, or allow more with `timeout_s`."
        return f"The connection to {self.base_url} broke off; try again."


def _error_of(response: httpx.Response) -> ApiError:
    try:
        body = response.json()["error"]
        code, message, kind_name = str(body["code"]), str(body["message"]), str(body["type"])
    except (ValueError, KeyError, TypeError):
        code, kind_name = "unknown", "unknown"
        message = f"The server answered {response.status_code}; check that it is a worldmodel server."
    status = response.status_code
    kind = _KINDS.get(status, ServerFailed if status >= 500 else Refused)
    error = kind(message)
    error.status, error.code, error.type = status, code, kind_name
    if isinstance(error, TooManyRequests):
        error.retry_after = _retry_after(response, 1.0)
    return error


def job_failed(error: Mapping[str, str] | None) -> JobFailed:
    """Return the error that a video's own record tells."""
    failed = JobFailed((error or {}).get("message") or "The video failed; ask for it again.")
    failed.code = (error or {}).get("code") or failed.code
    return failed


def _retry_after(response: httpx.Response, otherwise: float) -> float:
    told = response.headers.get("retry-after", "")
    return float(told) if told.isdecimal() else otherwise


def read_address(base_url: str) -> tuple[str, bool]:
    """Return the address without its last slash, and whether it is on this machine."""
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError):
        url = httpx.URL("")
    if url.scheme not in {"http", "https"} or not url.host:
        raise ConfigError(f"{base_url!r} is no address of a server; use one like 'http://127.0.0.1:8000'.")
    try:
        here = ipaddress.ip_address(url.host).is_loopback
    except ValueError:
        here = url.host == "localhost"
    return str(url).rstrip("/"), here


# ---- what is sent ----------------------------------------------------------------------------------------


def as_upload(name: str, observation: Observation, fps: float) -> dict[str, tuple[str, bytes, str]]:
    """Return an observation as a form's file; its bytes are checked where they are decoded, at the server."""
    if isinstance(observation, np.ndarray):
        data = _encoded(observation, fps)
    elif isinstance(observation, Image.Image):
        data = _png(observation)
    elif isinstance(observation, bytes):
        data = observation
    else:
        try:
            data = Path(observation).expanduser().read_bytes()
        except (OSError, ValueError, RuntimeError):
            raise InputError(
                f"{str(observation)!r} cannot be read; pass the path of a picture or video."
            ) from None
    kind = sniff.detect_format(data[:16])
    return {name: ("upload", data, "video/mp4" if kind == "mp4" else f"image/{kind or 'png'}")}


def _encoded(array: np.ndarray, fps: float) -> bytes:
    if array.dtype != np.uint8 or not array.size or array.ndim not in {3, 4} or array.shape[-1] != 3:
        raise InputError(
            f"The frames are {array.dtype} {list(array.shape)}; pass uint8 [h, w, 3] or [t, h, w, 3]."
        )
    if array.ndim == 3:
        return _png(Image.fromarray(np.ascontiguousarray(array)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        write_video(array, path, fps)
        return path.read_bytes()


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def as_json(action: AnyAction) -> dict[str, Any] | None:
    """Return an action as JSON; None lets time pass."""
    return Action.of(action).as_dict() or None


def given(**options: Any) -> dict[str, Any]:
    """Leave out what was not given, so that the server's own value holds."""
    return {key: value for key, value in options.items() if value is not None}


def read(kind: type[T], answer: Mapping[str, Any]) -> T:
    """Read an answer, passing over fields that a newer server may have."""
    try:
        return kind(**{item.name: answer[item.name] for item in fields(kind) if item.name in answer})  # type: ignore[arg-type]
    except TypeError:
        raise ServerFailed("The server's answer lacks fields; update the client or the server.") from None
