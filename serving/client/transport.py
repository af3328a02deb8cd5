"""HTTP transport of the clients: blocking and asyncio requests, retries, and response parsing."""

import asyncio
import io
import ipaddress
import time
from collections.abc import Mapping
from inspect import isawaitable
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import httpx
import numpy as np
from pydantic import BaseModel, ValidationError

from worldmodel.episodes import Outcome
from worldmodel.errors import ConfigError
from worldmodel.media import Frames
from worldmodel.retry import Backoff, retry_after
from worldmodel.serving.client.errors import ServerError, ServerUnreachableError, error_from_response
from worldmodel.serving.errors import RateLimitError, UnavailableError

Model = TypeVar("Model", bound=BaseModel)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
NO_PARAMS: Mapping[str, str] = MappingProxyType({})


async def settled(value: Any) -> Any:
    """Return the result of a call, which an asyncio client still has to wait for.

    A coroutine that awaits only calls of a blocking client never suspends, so it finishes in one `send`.
    """
    return await value if isawaitable(value) else value


class ReceivedFrames(NamedTuple):
    """Frames of a response, uint8 `[t, h, w, 3]`, and what the model says of them."""

    frames: Frames
    outcome: Outcome | None
    confidence: float | None


class HttpApi:
    """Builds requests, retries those that are safe to repeat, and raises typed errors."""

    def __init__(
        self,
        http: type[httpx.Client] | type[httpx.AsyncClient],
        base_url: str,
        api_key: str | None,
        timeout_s: float,
        retries: int,
    ) -> None:
        self.base_url, loopback = parse_base_url(base_url)
        self.retries = retries
        headers = {"User-Agent": "worldmodel-client"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        # Proxy settings of the environment do not apply to loopback addresses.
        self.http = http(
            base_url=self.base_url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)),
            trust_env=not loopback,
        )
        self._pause = time.sleep if isinstance(self.http, httpx.Client) else asyncio.sleep

    async def pause(self, seconds: float) -> None:
        """Wait."""
        await settled(self._pause(seconds))

    async def close(self) -> None:
        """Close the connections."""
        await settled(self.http.close() if isinstance(self.http, httpx.Client) else self.http.aclose())

    async def request(
        self,
        method: str,
        path: str,
        *,
        idempotent: bool = True,
        retries: int | None = None,
        **options: Any,
    ) -> httpx.Response:
        """Send a request and return a successful response; `idempotent` requests may be sent twice.

        Raises:
            ApiError: the server refused the request, or could not be reached.
        """
        retries = self.retries if retries is None else retries
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, retries)
        while True:
            try:
                response: httpx.Response = await settled(self.http.request(method, path, **options))
            except httpx.TransportError as error:
                # Nothing was sent on a connection that was never made: a retry is always safe.
                unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
                pause_s = backoff.pause_s() if idempotent or unsent else None
                if pause_s is None:
                    raise ServerUnreachableError(self._describe(error)) from None
            else:
                if response.is_success:
                    return response
                failure = error_from_response(response)
                temporary = isinstance(failure, RateLimitError | UnavailableError)
                asked_s = retry_after(response.headers.get("retry-after", ""))
                pause_s = backoff.pause_s(asked_s) if temporary else None
                if pause_s is None:
                    raise failure
            await self.pause(pause_s)

    async def json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Send a request and return the JSON object of the response."""
        response = await self.request(method, path, **options)
        try:
            body = response.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise ServerError(f"{self.base_url} did not return JSON; is it a worldmodel server?")
        return body

    async def frames(
        self, method: str, path: str, params: Mapping[str, str] = NO_PARAMS, **options: Any
    ) -> ReceivedFrames:
        """Send a request and return the frames of the response."""
        response = await self.request(method, path, params={"format": "npy", **params}, **options)
        frames = self.read_npy(response.content)
        reward = response.headers.get("x-reward")
        ended = response.headers.get("x-ended") == "true"
        outcome = None if reward is None else Outcome(float(reward), ended)
        confidence = response.headers.get("x-confidence")
        return ReceivedFrames(frames, outcome, None if confidence is None else float(confidence))

    def read_npy(self, data: bytes) -> np.ndarray:
        """Return the frames of a .npy file, uint8 `[t, h, w, 3]`."""
        try:
            frames = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        except (ValueError, EOFError):
            frames = np.empty(0)
        if frames.dtype != np.uint8 or frames.ndim != 4:
            raise ServerError(f"{self.base_url} did not return frames; is it a worldmodel server?")
        return frames

    def _describe(self, error: httpx.TransportError) -> str:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return f"Cannot connect to {self.base_url}; run `worldmodel serve`, or check the address."
        if isinstance(error, httpx.TimeoutException):
            return f"{self.base_url} did not answer in time; retry, or raise `timeout_s`."
        return f"The connection to {self.base_url} broke; retry."


def parse_base_url(base_url: str) -> tuple[str, bool]:
    """Return the URL without a trailing slash, and whether it is a loopback address.

    Raises:
        ConfigError: it is not an http or https URL.
    """
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError):
        url = httpx.URL("")
    if url.scheme not in {"http", "https"} or not url.host:
        raise ConfigError(f"{base_url!r} is not a server URL; use one like 'http://127.0.0.1:8000'.")
    try:
        loopback = ipaddress.ip_address(url.host).is_loopback
    except ValueError:
        loopback = url.host == "localhost"
    return str(url).rstrip("/"), loopback


def parse(cls: type[Model], body: Mapping[str, Any]) -> Model:
    """Read a JSON object, ignoring fields that a newer server may add."""
    try:
        return cls.model_validate(body)
    except ValidationError:
        raise ServerError("The server's response lacks fields; update the client or the server.") from None
