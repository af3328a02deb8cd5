"""Errors with an HTTP status.

ApiError (worldmodel.errors.WorldModelError)
├── AuthenticationError     401  missing or unknown API key
├── PermissionDeniedError   403  cross-origin request to a server without keys
├── NotFoundError           404  no such video or world, or it belongs to another key
├── ConflictError           409  the request does not fit the current state
├── TooLargeError           413  upload above a limit (also an InputError)
├── UnsupportedFormatError  415  upload in a format that is not decoded (also an InputError)
├── RateLimitError          429  limit reached or queue full; `retry_after` is in seconds
├── UnavailableError        503  starting, stopping, or no decoder free
└── DeadlineExceededError   504  not finished within the time limit

A `code` other than the class's says more: `step_out_of_order`, `world_held`, `model_not_found`.
The app answers each with its `status`, its `headers` and `{"error": {"type", "code", "message"}}`. An
`InputError` is answered with 400. Other errors could reveal server internals and are answered with a generic
500.
"""

import math

from worldmodel.errors import InputError, WorldModelError


class ApiError(WorldModelError):
    """Base class of errors with an HTTP status."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code or self.code

    @property
    def headers(self) -> dict[str, str]:
        """Extra response headers."""
        return {}


class AuthenticationError(ApiError):
    """The API key is missing or unknown."""

    status, type, code = 401, "authentication_error", "invalid_api_key"

    @property
    def headers(self) -> dict[str, str]:
        """The authentication scheme."""
        return {"WWW-Authenticate": "Bearer"}


class PermissionDeniedError(ApiError):
    """The caller is not allowed to do this, with or without a key."""

    status, type, code = 403, "permission_error", "forbidden"


class NotFoundError(ApiError):
    """The caller owns no object with this id."""

    status, type, code = 404, "not_found_error", "not_found"


class ConflictError(ApiError):
    """The request does not fit the current state of the object."""

    status, type, code = 409, "conflict_error", "conflict"


class TooLargeError(ApiError, InputError):
    """An upload or a request body is above a limit."""

    status, code = 413, "too_large"


class UnsupportedFormatError(ApiError, InputError):
    """The upload is in a format that is not decoded."""

    status, code = 415, "unsupported_format"


class RateLimitError(ApiError):
    """A limit of the key or of the server is reached; `retry_after` is in seconds."""

    status, type, code = 429, "rate_limit_error", "too_many_requests"

    def __init__(self, message: str, retry_after: float = 1.0, code: str | None = None) -> None:
        super().__init__(message, code)
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        """When to retry, in whole seconds."""
        return {"Retry-After": str(max(1, math.ceil(self.retry_after)))}


class UnavailableError(ApiError):
    """The server cannot take work at the moment."""

    status, type, code = 503, "server_error", "unavailable"

    @property
    def headers(self) -> dict[str, str]:
        """When to retry, in seconds."""
        return {"Retry-After": "5"}


class DeadlineExceededError(ApiError):
    """The work was not finished within its time limit."""

    status, type, code = 504, "server_error", "deadline_exceeded"


BY_STATUS: dict[int, type[ApiError]] = {error.status: error for error in ApiError.__subclasses__()}
"""The classes above by their status."""
