"""Liveness, readiness and metrics."""

import asyncio

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from worldmodel.serving.context import Caller, Context
from worldmodel.serving.errors import UnavailableError
from worldmodel.serving.protocol import Health
from worldmodel.serving.routes.route_class import ERRORS, AuthenticatedRoute

router = APIRouter(tags=["health"])
metrics_router = APIRouter(tags=["health"], route_class=AuthenticatedRoute, responses=ERRORS)

MODEL_TIMEOUT_S = 5.0
"""A model thread that accepts no new work for this long counts as not ready."""


@router.get(
    "/health",
    responses={503: {"description": "The server has too many connections.", "content": {"text/plain": {}}}},
)
async def health() -> Health:
    """Report that the process is alive; needs no key."""
    return Health(status="ok")


@router.get("/ready", responses={503: {"model": Health, "description": "Accepts no work."}})
async def ready(context: Context, response: Response) -> Health:
    """Report whether the server accepts work: engine, model and database respond, the queue has room."""
    if context.jobs.draining:
        status = "stopping"
    elif not context.service.alive:
        status = "failed"
    elif not await _model_responds(context):
        status = "starting"
    else:
        try:
            status = "full" if await context.jobs.full() else "ok"
        except UnavailableError:
            status = "failed"
    if status == "ok":
        return Health(status=status)
    response.status_code = 503
    return Health(status=status)


async def _model_responds(context: Context) -> bool:
    try:
        async with asyncio.timeout(MODEL_TIMEOUT_S):
            return await context.service.compute.run(lambda: True)
    except (TimeoutError, RuntimeError):  # RuntimeError: the thread is closed
        return False


@metrics_router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "Prometheus text format.", "content": {"text/plain": {}}}},
)
async def metrics(context: Context, caller: Caller) -> Response:
    """Return the server's metrics for Prometheus."""
    return Response(context.metrics.text(), media_type=CONTENT_TYPE_LATEST)
