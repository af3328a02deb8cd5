"""Replicas of a server in Ray Serve: the app in each, and what pins worlds to replicas by their ids.

The replicas share worlds and videos through the database, so a world goes on at any of them: pinning avoids
that worlds move, and is not needed for correctness.
"""

import re
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

MAX_REQUESTS = 1024
"""Requests and sockets of a replica at the same time. Its app has lower limits, and answers with 429."""
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
"""Sends requests of one session to one replica; other requests to any."""
SESSION = b"x-session-id"
"""Header with the session of a request."""
WORLD = re.compile(r"/v1/worlds/([\w-]+)")


class WorldSessions:
    """Makes the world in the path of a request its session, in Ray's proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if found := WORLD.search(scope.get("path", "")):
            others = [(name, value) for name, value in scope["headers"] if name != SESSION]
            scope = {**scope, "headers": [*others, (SESSION, found[1].encode())]}
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """Return the middlewares of Ray's proxy, which RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names."""
    return [Middleware(WorldSessions)]


class ReplicaApp:
    """An ASGI app that is made in its replica by its first call, the lifespan's."""

    def __init__(self, load: Callable[[], Awaitable[FastAPI]]) -> None:
        self._load = load
        self._app: FastAPI | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            self._app = await self._load()
        await self._app(scope, receive, send)

    @property
    def alive(self) -> bool:
        """Whether its model still computes."""
        return self._app is None or self._app.state.context.watchdog.fault is None


def application(
    load: Callable[[], Awaitable[FastAPI]], num_replicas: int, actor_options: dict[str, Any]
) -> serve.Application:
    """Return an application of replicas that each load an app; Ray starts those again that fail."""

    def build() -> ReplicaApp:
        return ReplicaApp(load)

    @serve.deployment(
        name="worldmodel",
        num_replicas=num_replicas,
        max_ongoing_requests=MAX_REQUESTS,
        ray_actor_options=actor_options,
        health_check_period_s=2,
        # A busy replica has no substitute: its worlds would move.
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER, request_router_kwargs={"num_fallback_replicas": 0}
        ),
    )
    @serve.ingress(build)
    class Replica:
        async def check_health(self) -> None:
            """Fail if the model computes no more; Ray then replaces the replica."""
            if not self.app.alive:  # type: ignore[attr-defined] -- of serve.ingress
                raise RuntimeError("The model computes no more.")

    return Replica.bind()  # type: ignore[attr-defined]
