"""Whether the server lives, whether it takes work, and its numbers."""

import asyncio

from fastapi import APIRouter, Request, Response

from worldmodel.serving.metrics import CONTENT_TYPE
from worldmodel.serving.protocol import Health
from worldmodel.serving.routes.route_class import ERRORS, Caller, GuardedRoute

router = APIRouter(tags=["health"])
numbers = APIRouter(tags=["health"], route_class=GuardedRoute, responses=ERRORS)

ANSWER_S = 5.0
"""A model that does nothing at all for so long is not ready."""


@router.get("/health", response_model=Health)
async def health() -> Health:
    """Say that the process lives; it needs no key."""
    return Health(status="ok")


@router.get(
    "/ready", response_model=Health, responses={503: {"model": Health, "description": "It takes no work."}}
)
async def ready(request: Request, response: Response) -> Health:
    """Say whether new work is taken: the model answers, the queue has room, nobody told it to stop."""
    state = request.app.state
    if state.draining:
        status = "stopping"
    elif not await _answers(request):
        status = "starting"
    elif state.jobs.full:
        status = "full"
    else:
        return Health(status="ok")
    response.status_code = 503
    return Health(status=status)


async def _answers(request: Request) -> bool:
    """Whether the model's thread comes to something new in time."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await request.app.state.service.compute.run(lambda: True)
    except (TimeoutError, RuntimeError):  # RuntimeError: the thread has been closed
        return False


@numbers.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "Prometheus' text format.", "content": {"text/plain": {}}}},
)
async def metrics(request: Request, caller: Caller) -> Response:
    """Return the server's numbers for Prometheus."""
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE)
