"""Liveness, readiness and metrics."""

from contextlib import suppress

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from worldmodel.serving.context import Caller, Context
from worldmodel.serving.errors import UnavailableError
from worldmodel.serving.protocol import Health
from worldmodel.serving.routes.route_class import ERRORS, AuthenticatedRoute

router = APIRouter(tags=["health"])
metrics_router = APIRouter(tags=["health"], route_class=AuthenticatedRoute, responses=ERRORS)


@router.get(
    "/health",
    response_model_exclude_none=True,
    responses={
        503: {
            "model": Health,
            "description": "The server needs a restart, or has too many connections.",
            "content": {"text/plain": {}},
        }
    },
)
async def health(context: Context, response: Response) -> Health:
    """Report whether the process should go on: not when the model computes no more; needs no key."""
    if context.watchdog.fault is None:
        return Health(status="ok")
    response.status_code = 503
    return Health(status=context.watchdog.fault)


@router.get(
    "/ready",
    response_model_exclude_none=True,
    responses={503: {"model": Health, "description": "Accepts no work."}},
)
async def ready(context: Context, response: Response) -> Health:
    """Report whether the server accepts work: the model computes, the database responds, the queue has room.

    Without a data folder that can be written, it accepts all but videos, and says so as `missing`.

    `failing`: calls to the model fail. `stuck`: one does not return. `failed`: a process of the model or the
    database is gone.
    """
    if context.watchdog.fault is not None:
        status = context.watchdog.fault
    elif context.jobs.draining or context.compute.closed:
        status = "stopping"
    else:
        try:
            status = "full" if await context.jobs.full() else "ok"
        except UnavailableError:
            status = "failed"
    if status == "ok":
        obstacle = context.jobs.storage.obstacle
        missing = None if obstacle is None else f"videos: the data folder cannot be written ({obstacle})"
        return Health(status=status, missing=missing)
    response.status_code = 503
    return Health(status=status)


@metrics_router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "Prometheus text format.", "content": {"text/plain": {}}}},
)
async def metrics(context: Context, caller: Caller) -> Response:
    """Return the server's metrics for Prometheus: to keys of the option admin, if the key file has some."""
    context.require_admin(caller)
    with suppress(UnavailableError):  # the length of the queue stays as it was last known
        await context.jobs.count_queued()
    return Response(context.metrics.text(), media_type=CONTENT_TYPE_LATEST)
