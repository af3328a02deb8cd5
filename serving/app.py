"""The application: what it consists of, and how it begins and ends."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from worldmodel import __version__
from worldmodel.errors import InputError
from worldmodel.serving.auth import KeyLimits, Keys, Limiter
from worldmodel.serving.errors import ApiError
from worldmodel.serving.media import decoding
from worldmodel.serving.metrics import Metrics
from worldmodel.serving.protocol import ErrorBody, ErrorObject, ResetRequest, VideoRequest, WorldRequest
from worldmodel.serving.routes import chat, health, images, parsing, realtime, videos, worlds
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.videos.jobs import Jobs
from worldmodel.serving.worlds.registry import HeldWorlds
from worldmodel.serving.worlds.service import WorldService

LOG = logging.getLogger(__name__)

CODES = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}
BROKEN = "The server made a mistake; try again, and report it if it stays."
MAX_MESSAGE = 300


def create_app(service: WorldService, config: ServerConfig) -> FastAPI:
    """Put the server together; the data folder is taken at once, the rest begins with the app's lifespan.

    Raises:
        OutputError: the data folder cannot be used.
    """
    model = service.model.config
    service.max_rounds = config.max_rounds
    metrics = Metrics(chunk_deadline_s=model.chunk_frames / model.fps)
    metrics.watch(service.stats)
    limiter = Limiter(
        KeyLimits(
            max_requests=config.max_requests_per_key,
            max_worlds=config.max_worlds_per_key,
            requests_per_s=config.requests_per_minute / 60,
            burst=max(1, math.ceil(config.requests_per_minute / 6)),
        )
    )
    app = FastAPI(
        title="worldmodel",
        version=__version__,
        summary="Steer a world round after round: live worlds, videos, words about pictures.",
        docs_url=None,  # their pages load scripts from other sites
        redoc_url=None,
        redirect_slashes=False,  # the address that it redirects to is made from the Host header
        lifespan=_lifespan,
        exception_handlers=HANDLERS,
    )
    app.state.service, app.state.config, app.state.metrics = service, config, metrics
    app.state.keys, app.state.limiter = config.keys or Keys(), limiter
    app.state.worlds = HeldWorlds(service, config, limiter, metrics)
    app.state.jobs = Jobs(service, config, metrics)
    app.state.started_at, app.state.draining = int(time.time()), False
    for module in (worlds, videos, chat, images, health, realtime):
        app.include_router(module.router)
    app.include_router(chat.models)
    app.include_router(health.numbers)
    app.openapi = lambda: _schema(app)
    return app


async def drain(app: FastAPI, timeout_s: float) -> None:
    """Take no new work, and give what is under way some time to end."""
    app.state.draining = True
    await app.state.jobs.drain(timeout_s)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    sweeper = asyncio.create_task(_sweep(app))
    try:
        yield
    finally:
        app.state.draining = True
        sweeper.cancel()
        with suppress(asyncio.CancelledError):
            await sweeper
        await app.state.jobs.close()
        await app.state.service.close()
        await asyncio.to_thread(decoding.close_decoder)


async def _sweep(app: FastAPI) -> None:
    """Close worlds that nobody uses and remove videos whose time is over, for ever."""
    pause_s = min(30.0, app.state.config.idle_timeout_s / 4)
    while True:
        await asyncio.sleep(pause_s)
        try:
            app.state.worlds.sweep()
            await app.state.jobs.sweep()
        except OSError:  # a file that cannot be removed now is tried again
            LOG.exception("Old videos cannot be removed.")


# Errors


def _answer(status: int, kind: str, code: str, message: str, headers: Mapping[str, str]) -> JSONResponse:
    """Return an error in the one shape that all have."""
    content = ErrorObject(error=ErrorBody(type=kind, code=code, message=message)).model_dump()
    return JSONResponse(content, status, headers)


def _refused(_: Request, error: ApiError) -> JSONResponse:
    return _answer(error.status, error.type, error.code, str(error), error.headers)


def _unusable(_: Request, error: InputError) -> JSONResponse:
    return _answer(400, ApiError.type, "invalid_input", str(error), {})


def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
    return _answer(400, ApiError.type, "invalid_request", _sentence(error), {})


def _http(_: Request, error: HTTPException) -> JSONResponse:
    code = CODES.get(error.status_code, "invalid_request")
    return _answer(
        error.status_code, ApiError.type, code, f"{error.detail.rstrip('.')}.", error.headers or {}
    )


def _broken(_: Request, error: Exception) -> JSONResponse:
    """Say nothing of the server's own mistakes; uvicorn writes them to its log."""
    return _answer(500, "server_error", "internal_error", BROKEN, {})


HANDLERS: dict[Any, Any] = {
    ApiError: _refused,
    InputError: _unusable,
    RequestValidationError: _invalid,
    HTTPException: _http,
    Exception: _broken,
}


def _sentence(error: RequestValidationError) -> str:
    """Say which field is wrong and how, without repeating what was sent."""
    first = error.errors()[0]
    place = ".".join(str(part)[:64] for part in first["loc"][1:]) or str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return f"There is no field {place!r}; leave it out."
    if first["type"] in ("missing", "json_invalid"):
        return f"{place!r} is missing." if first["type"] == "missing" else "The body is not JSON."
    return f"{place!r} cannot be used: {first['msg']}."[:MAX_MESSAGE]


# OpenAPI


def _schema(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI schema, with the parts that bodies read by hand refer to."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title,
            version=app.version,
            summary=app.summary,
            routes=app.routes,
        )
        parts = schema.setdefault("components", {}).setdefault("schemas", {})
        parts |= parsing.schemas(VideoRequest, WorldRequest, ResetRequest)
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # answered 400
        app.openapi_schema = schema
    return app.openapi_schema
