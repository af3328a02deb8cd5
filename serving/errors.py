"""Errors with an HTTP status: what a request, rather than a value in it, did wrong.

ApiError (worldmodel.errors.WorldModelError)
├── Unauthorized        401  no key, or a wrong one
├── Forbidden           403  a page of another site
├── NotFound            404  no such video or world, or somebody else's
├── Conflict            409  not now: a video that is not finished, a step that was already taken
├── TooLarge            413  an upload above a limit (also an InputError)
├── UnsupportedFormat   415  an upload of a kind that is not decoded (also an InputError)
├── TooManyRequests     429  above a limit of the key or a full queue; `retry_after` says when
├── Unavailable         503  starting, stopping or out of decoders
└── DeadlineExceeded    504  not done in the time that was given

The app answers each with its `status`, its `headers` and `{"error": {"type", "code", "message"}}`. An
`InputError` is answered as 400; every other error may name the server's own places, and is a 500 that says
nothing.
"""

# ruff: noqa: N818 -- they bear the names of the statuses

import math

from worldmodel.errors import InputError, WorldModelError


class ApiError(WorldModelError):
    """Base of the errors that name their HTTP status."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer, besides its content type."""
        return {}


class Unauthorized(ApiError):
    """No key came with the request, or one that the server does not know."""

    status, type, code = 401, "authentication_error", "invalid_api_key"

    @property
    def headers(self) -> dict[str, str]:
        """Says how to send a key."""
        return {"WWW-Authenticate": "Bearer"}


class Forbidden(ApiError):
    """The caller may not do this, with or without a key."""

    status, type, code = 403, "permission_error", "forbidden"


class NotFound(ApiError):
    """Nothing of this id belongs to the caller."""

    status, type, code = 404, "not_found_error", "not_found"


class Conflict(ApiError):
    """The request does not fit the state that the thing is in."""

    status, type, code = 409, "conflict_error", "conflict"


class TooLarge(ApiError, InputError):
    """An upload or a body is above a limit."""

    status, code = 413, "too_large"


class UnsupportedFormat(ApiError, InputError):
    """An upload is of a kind that is not decoded."""

    status, code = 415, "unsupported_format"


class TooManyRequests(ApiError):
    """A limit of the key or the queue is reached; `retry_after` is in seconds."""

    status, type, code = 429, "rate_limit_error", "too_many_requests"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        """Says when to come again, in whole seconds."""
        return {"Retry-After": str(max(1, math.ceil(self.retry_after)))}


class Unavailable(ApiError):
    """The server cannot take work just now."""

    status, type, code = 503, "server_error", "unavailable"

    @property
    def headers(self) -> dict[str, str]:
        """Says when to come again."""
        return {"Retry-After": "5"}


class DeadlineExceeded(ApiError):
    """The work was not done in the time that was given for it."""

    status, type, code = 504, "server_error", "deadline_exceeded"
