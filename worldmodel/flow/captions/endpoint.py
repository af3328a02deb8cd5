"""Requests to an OpenAI-compatible chat endpoint, with further attempts where they help."""

import base64
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import httpx

from worldmodel.errors import InputError
from worldmodel.flow.captions.answers import Answers
from worldmodel.flow.errors import StageError
from worldmodel.retry import Backoff, retry_after

T = TypeVar("T")
MAX_PAUSE_S = 60.0
"""Longest pause before another attempt."""
TEMPORARY = {408, 409, 425, 429}
"""Statuses below 500 after which the same request may succeed."""
REFUSED = {401, 403, 404}
"""Statuses that no other clip would change: a wrong key, address or model."""


class UnavailableError(InputError):
    """The endpoint gave no usable answer in all attempts; a later one may succeed.

    Attributes:
        retry_after_s: seconds that the endpoint asks to wait.
    """

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Endpoint:
    """A chat endpoint. Thread-safe.

    Args:
        address: base URL, such as `http://127.0.0.1:8000/v1`.
        model: name of the model.
        answers: where answers are kept and counted.
        api_key: sent as a bearer token, if not empty.
        max_tokens: length of an answer; 0 leaves it to the endpoint.
        retries: further attempts at a request.
        retry_delay_s: pause before the first of them; it doubles with each.
        timeout_s: how long an attempt may take.
    """

    def __init__(
        self,
        address: str,
        model: str,
        answers: Answers,
        api_key: str = "",
        max_tokens: int = 1024,
        retries: int = 6,
        retry_delay_s: float = 1.0,
        timeout_s: float = 120.0,
    ) -> None:
        self.url, self.model, self.answers = f"{address.rstrip('/')}/chat/completions", model, answers
        self.max_tokens, self.retries, self.retry_delay_s = max_tokens, retries, retry_delay_s
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.Client(headers=headers, timeout=timeout_s, limits=limits)

    def ask(
        self,
        content: Sequence[dict[str, Any]],
        parse: Callable[[str], T],
        schema: dict[str, Any] | None = None,
    ) -> T:
        """Return the parsed answer to a message, from the kept answers if it was asked before.

        Args:
            content: parts of the message; see `text_part`, `image_part` and `video_part`.
            parse: reads an answer; raises `InputError` for one that is not usable.
            schema: JSON schema that the answer is to follow.

        Raises:
            StageError: the endpoint refuses all requests, or the budget is spent.
            UnavailableError: no attempt gave a usable answer.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": list(content)}],
            "temperature": 0,
        }
        if self.max_tokens:
            body["max_tokens"] = self.max_tokens
        if schema is not None:
            named = {"name": "description", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        request = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        if (known := self.answers.find(request)) is not None:
            return parse(known)
        text, parsed = self._attempts(body, parse)
        self.answers.keep(request, text)
        return parsed

    def _attempts(self, body: dict[str, Any], parse: Callable[[str], T]) -> tuple[str, T]:
        backoff = Backoff(self.retry_delay_s, MAX_PAUSE_S, self.retries)
        for attempt in itertools.count():
            self.answers.check_budget()
            asked_s, unusable = 0.0, False
            try:
                response = self.client.post(self.url, json=body)
            except httpx.TransportError as error:
                problem = f"{self.url} did not answer ({type(error).__name__} {error})"
            except httpx.InvalidURL:
                raise StageError(f"{self.url!r} is not a URL; set the endpoint of caption.") from None
            else:
                if response.status_code == httpx.codes.OK:
                    try:
                        text = self._text(response)
                        return text, parse(text)
                    except InputError as error:
                        problem, unusable = str(error), True
                        # The same request would get the same answer.
                        body = {**body, "temperature": 0.5, "seed": attempt}
                else:
                    problem = self._problem(response)
                    asked_s = retry_after(response.headers.get("Retry-After", ""))
            pause_s = backoff.pause_s(asked_s)
            if pause_s is None:
                raise UnavailableError(problem, asked_s)
            if not unusable:  # an endpoint that answers need not be spared
                time.sleep(pause_s)
        raise AssertionError("unreachable")

    def _text(self, response: httpx.Response) -> str:
        """Return the text of a response, and count its tokens."""
        try:
            found = response.json()
            tokens = int((found.get("usage") or {}).get("total_tokens") or 0)
            text = found["choices"][0]["message"]["content"]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            tokens, text = 0, None
        self.answers.count(tokens)
        if not isinstance(text, str):
            raise InputError(f"{self.url} answered something else than a chat completion.")
        return text

    def _problem(self, response: httpx.Response) -> str:
        """Return what a status other than 200 means."""
        status = response.status_code
        problem = f"{self.url} answered {status} {response.reason_phrase}: {response.text[:200]!r}"
        if status in REFUSED:
            raise StageError(f"{problem}; check the endpoint, model and api_key_variable of caption.")
        if status < 500 and status not in TEMPORARY:
            raise UnavailableError(problem)
        return problem


def text_part(text: str) -> list[dict[str, Any]]:
    """Return the part of a message with a text, none if it is empty."""
    return [{"type": "text", "text": text}] if text else []


def image_part(jpeg: bytes) -> dict[str, Any]:
    """Return the part of a message with an image."""
    return {"type": "image_url", "image_url": {"url": _data_url("image/jpeg", jpeg)}}


def video_part(mp4: bytes) -> dict[str, Any]:
    """Return the part of a message with a video."""
    return {"type": "video_url", "video_url": {"url": _data_url("video/mp4", mp4)}}


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
