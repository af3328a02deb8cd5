"""The FastAPI application: routes, lifespan, error handlers and the OpenAPI schema."""

import asyncio
import itertools
import logging
import math
import re
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from sqlalchemy import URL
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import Match, Route

from worldmodel import __version__
from worldmodel.errors import InputError, OutputError
from worldmodel.serving import tracing
from worldmodel.serving.auth import Keys
from worldmodel.serving.connections import UnreadBodies
from worldmodel.serving.context import ServerContext
from worldmodel.serving.errors import ApiError, UnavailableError
from worldmodel.serving.logs import HEADER, HeadRequests, RequestLog
from worldmodel.serving.media import decoding
from worldmodel.serving.metrics import Metrics
from worldmodel.serving.models import ServedModels
from worldmodel.serving.protocol import (
    EditRequest,
    ErrorBody,
    ErrorObject,
    ExtendRequest,
    ResetRequest,
    VideoRequest,
    WorldRequest,
)
from worldmodel.serving.rate_limits import RequestLimiter
from worldmodel.serving.realtime.events import SessionLimits
from worldmodel.serving.replicas.database import Database, FolderLock
from worldmodel.serving.replicas.replica import Replica
from worldmodel.serving.routes import (
    chat,
    derived_videos,
    health,
    images,
    models,
    parsing,
    realtime,
    sessions,
    videos,
    worlds,
)
from worldmodel.serving.settings import MAX_SOCKET_UPLOAD_BYTES, EngineOptions, HttpOptions, ServerConfig
from worldmodel.serving.videos.jobs import VideoJobs
from worldmodel.serving.videos.storage import Storage
from worldmodel.serving.videos.webhooks import Webhooks
from worldmodel.serving.watchdog import Watchdog
from worldmodel.serving.worlds.registry import WorldRegistry
from worldmodel.serving.worlds.service import WorldService
from worldmodel.serving.worlds.store import WorldStore

LOG = logging.getLogger(__name__)

CODES = {404: "not_found", 416: "invalid_range", 408: "timeout", 405: "method_not_allowed", 413: "too_large"}
ROUTERS = (
    *(
        module.router
        for module in (worlds, videos, derived_videos, chat, images, health, realtime, models, sessions)
    ),
    health.metrics_router,
)
INTERNAL_ERROR = "Internal server error; try again, and report it if it persists."
MAX_MESSAGE_CHARACTERS = 300
SAVE_TIMEOUT_S = 5.0
"""Time for storing worlds that are at rest when the app is closed."""


def create_app(service: WorldService, config: ServerConfig, options: EngineOptions | None = None) -> FastAPI:
    """Create the app. The server is registered at once; background tasks start with the lifespan.

    `options` are those of models that are added later.

    Raises:
        OutputError: the data folder cannot be used, or servers of another model use the database, or another
            server uses the folder without sharing a database.
        ConfigError, DatabaseError: the database cannot be used.
    """
    app = FastAPI(
        title="worldmodel",
        version=__version__,
        summary="Interactive world models: live worlds, videos, and questions about images and videos.",
        docs_url=None,  # these pages load scripts from other sites
        redoc_url=None,
        redirect_slashes=False,  # the redirect target would be built from the Host header
        lifespan=_lifespan,
        exception_handlers=HANDLERS,
        root_path=config.http.root_path,
    )
    _add_middleware(app, config.http)
    app.state.context = create_context(service, config, options)
    for router in ROUTERS:
        app.include_router(router)
    app.openapi = lambda: _openapi_schema(app)
    return app


def _add_middleware(app: FastAPI, options: HttpOptions) -> None:
    """Add what surrounds all routes, innermost first."""
    app.add_middleware(HeadRequests)
    app.add_middleware(UnreadBodies)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "idempotency-key", HEADER],
            expose_headers=["openai-poll-after-ms", "retry-after", HEADER],
        )
    if options.trusted_hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=options.trusted_hosts)
    app.add_middleware(RequestLog)
    app.state.traces = tracing.configure(options.traces)
    if app.state.traces is not None:
        tracing.instrument(app, app.state.traces)


def create_context(
    service: WorldService, config: ServerConfig, options: EngineOptions | None = None
) -> ServerContext:
    """Create the shared objects of an app."""
    service.max_rounds = config.max_rounds
    models = ServedModels(service, config.model_name, options)
    keys = config.keys or Keys()
    metrics = Metrics()
    storage = Storage(config.data_dir)
    database = _open_database(storage, config)
    replica = Replica(database, service.identity.model, storage.identity()) if config.database else None
    registry = WorldRegistry(models, config, metrics, WorldStore(replica) if replica else None)
    metrics.observe(models.stats, num_worlds=lambda: len(registry))
    limiter = RequestLimiter(
        lambda caller: (
            config.of_key("max_requests_per_key", caller),
            config.of_key("requests_per_minute", caller) / 60,
        ),
        burst=max(1, math.ceil(config.requests_per_minute / 6)),
    )
    session_limits = SessionLimits(
        start_timeout_s=120.0,
        idle_timeout_s=config.idle_timeout_s,
        max_session_s=3600.0,
        send_timeout_s=20.0,
        max_message_bytes=32 * 2**10,
        max_upload_bytes=min(config.max_upload_bytes, MAX_SOCKET_UPLOAD_BYTES),
        max_queued_interactions=8,
        max_messages_per_s=30.0,
        max_rounds=service.max_rounds,
        max_snapshots=service.max_snapshots,
        max_inference_steps=service.max_steps,
    )
    service.compute.weight_of = lambda caller: keys.options(caller).weight
    service.compute.used = lambda caller, purpose, seconds: metrics.model_seconds.labels(
        key=keys.name(caller), purpose=purpose
    ).inc(seconds)
    watchdog = Watchdog(service, config.step_deadline_s)
    webhooks = Webhooks(config.http, keys, database, replica)
    jobs = VideoJobs(models, config, metrics, storage, database, watchdog, webhooks, replica)
    return ServerContext(
        models=models,
        compute=service.compute,
        config=config,
        keys=keys,
        limiter=limiter,
        metrics=metrics,
        worlds=registry,
        jobs=jobs,
        webhooks=webhooks,
        database=database,
        replica=replica,
        watchdog=watchdog,
        session_limits=session_limits,
    )


def _open_database(storage: Storage, config: ServerConfig) -> Database:
    """Open the database of orders, and lock the data folder; without one that can be written, in memory.

    Raises:
        OutputError: replicas could not write the data folder, or another server uses it.
        ConfigError, DatabaseError: the database cannot be used.
    """
    if storage.obstacle is None:
        own = URL.create("sqlite", database=str((config.data_dir / "server.db").absolute()))
        return Database(config.database or own, FolderLock(config.data_dir, config.database is not None))
    obstacle = f"The data folder {str(config.data_dir)!r} cannot be written ({storage.obstacle})"
    if config.database is not None:
        raise OutputError(f"{obstacle}; choose another --data-dir, which all replicas share.")
    LOG.warning("%s, so this server takes no videos; choose another --data-dir for them.", obstacle)
    memory = {"mode": "memory", "cache": "shared", "uri": "true"}
    return Database(URL.create("sqlite", database=f"file:{secrets.token_hex(8)}", query=memory))


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    context: ServerContext = app.state.context
    if context.replica is not None:
        context.replica.start()
    context.jobs.start()
    context.webhooks.start()
    context.watchdog.start(context.abandon)
    sweeper = asyncio.create_task(_sweep(context))
    try:
        yield
    finally:
        sweeper.cancel()
        with suppress(asyncio.CancelledError):
            await sweeper
        await context.watchdog.close()
        context.worlds.end_kept()
        await context.jobs.close()
        await context.webhooks.close()
        await context.worlds.stop(SAVE_TIMEOUT_S)
        if context.replica is not None:
            await context.replica.close()
        context.database.close()
        await context.models.close()
        await asyncio.to_thread(decoding.close_decoder)
        if app.state.traces is not None:
            await asyncio.to_thread(app.state.traces.shutdown)


async def _sweep(context: ServerContext) -> None:
    """Periodically close idle worlds and delete expired videos."""
    while True:
        await asyncio.sleep(min(30.0, context.config.idle_timeout_s / 4))
        try:
            await context.worlds.sweep()
            await context.jobs.sweep()
        except (OSError, UnavailableError):  # deleting is retried in the next sweep
            LOG.exception("Idle worlds or expired videos cannot be deleted.")


# Errors


def _response(
    status: int, code: str, message: str, kind: str = ApiError.type, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return the response that all errors share."""
    content = ErrorObject(error=ErrorBody(type=kind, code=code, message=message)).model_dump()
    return JSONResponse(content, status, headers)


def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    code, headers = CODES.get(error.status_code, "invalid_request"), error.headers
    if error.status_code == 405:  # Starlette names the methods of the first route only
        headers = {"allow": ", ".join(sorted(_methods(request)))}
    return _response(error.status_code, code, f"{error.detail.rstrip('.')}.", headers=headers)


def _methods(request: Request) -> set[str]:
    """Return the methods of all routes with the path of a request."""
    routes = [
        route
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    ]
    named = [route for route in routes if not route.param_convertors]  # /v1/videos/edits is not a video
    methods = {method for route in named or routes for method in route.methods or ()}
    return methods | ({"HEAD"} if "GET" in methods else set())


HANDLERS: dict[Any, Any] = {
    ApiError: lambda _, error: _response(error.status, error.code, str(error), error.type, error.headers),
    InputError: lambda _, error: _response(400, "invalid_input", str(error)),
    RequestValidationError: lambda _, error: _response(400, "invalid_request", _describe(error)),
    HTTPException: _http_error,
    # Details of internal errors are hidden; uvicorn logs them.
    # uvicorn closes the connection of an exception, so a client must not send its next request there.
    Exception: lambda _, __: _response(
        500, "internal_error", INTERNAL_ERROR, "server_error", {"connection": "close"}
    ),
}


def _describe(error: RequestValidationError) -> str:
    """Name the invalid field and the problem without repeating the input."""
    first = max(error.errors(), key=lambda each: len(each["loc"]))  # of a union, the member that fits best
    path = [str(part)[:64] for part in first["loc"][1:]]
    # Pydantic adds the names of models and types, and the tags of unions, which are not fields.
    named = [part for part, below in itertools.pairwise([*path, ""]) if _is_field(part, below)]
    field = ".".join(named) or str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return f"There is no field {field!r}; omit it."
    if first["type"] in ("missing", "json_invalid"):
        return f"{field!r} is missing." if first["type"] == "missing" else "The body is not JSON."
    return f"{field!r} is invalid: {first['msg']}."[:MAX_MESSAGE_CHARACTERS]


def _is_field(part: str, below: str) -> bool:
    return part != below and not part[:1].isupper() and not re.search(r"[-\[(]", part)


# OpenAPI


def _openapi_schema(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI schema, with the schemas that `parsing.body_schema` refers to."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title,
            version=app.version,
            summary=app.summary,
            routes=app.routes,
        )
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        components |= parsing.referenced_schemas(
            VideoRequest, EditRequest, ExtendRequest, WorldRequest, ResetRequest
        )
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # validation errors are answered with 400
        app.openapi_schema = schema
    return app.openapi_schema
