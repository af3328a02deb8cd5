"""Errors that only clients see, and the mapping from HTTP responses to error classes.

ApiError (worldmodel.serving.errors)
├── BadRequestError         400, 422  a value that the server does not accept (also an InputError)
├── ServerError             5xx       unexpected response
├── ServerUnreachableError  –         no connection, or the connection broke
└── VideoFailedError        –         video generation failed
"""

import httpx

from worldmodel.errors import InputError
from worldmodel.retry import retry_after
from worldmodel.serving.errors import BY_STATUS, ApiError, RateLimitError


class BadRequestError(ApiError, InputError):
    """The server does not accept a value of the request."""


class ServerError(ApiError):
    """The server failed, or its response is not what this client expects."""

    status, type, code = 500, "server_error", "server_error"


class ServerUnreachableError(ApiError):
    """The server could not be reached, or the connection broke."""

    status, type, code = 0, "connection_error", "connection_failed"


class VideoFailedError(ApiError):
    """Generating a video failed; `code` gives the reason."""

    status, type, code = 0, "job_error", "failed"


def error_from_response(response: httpx.Response) -> ApiError:
    """Return the exception for an error response."""
    try:
        body = response.json()["error"]
        code, message, type_name = str(body["code"]), str(body["message"]), str(body["type"])
    except (ValueError, KeyError, TypeError):
        code = type_name = "unknown"
        message = f"The server answered {response.status_code}; check that it is a worldmodel server."
    status = response.status_code
    error = BY_STATUS.get(status, ServerError if status >= 500 else BadRequestError)(message)
    error.status, error.code, error.type = status, code, type_name
    if isinstance(error, RateLimitError):
        error.retry_after = retry_after(response.headers.get("retry-after", ""), default=1.0)
    return error
