"""Shared objects of one server, and the FastAPI dependencies that give routes access to them."""

import asyncio
import secrets
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import HTTPConnection

from worldmodel.serving.auth import Keys, authenticate
from worldmodel.serving.engine.batching import Compute
from worldmodel.serving.errors import PermissionDeniedError, UnavailableError
from worldmodel.serving.metrics import Metrics
from worldmodel.serving.models import Served, ServedModels
from worldmodel.serving.rate_limits import RequestLimiter
from worldmodel.serving.realtime.events import Reason, SessionLimits
from worldmodel.serving.replicas.database import Database
from worldmodel.serving.replicas.replica import Replica
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.videos.jobs import VideoJobs
from worldmodel.serving.videos.webhooks import Webhooks
from worldmodel.serving.watchdog import Watchdog
from worldmodel.serving.worlds.registry import WorldRegistry
from worldmodel.serving.worlds.service import World

MAX_LARGE_BODIES, MAX_LARGE_BODIES_PER_KEY = 4, 2
"""Requests with a large body at the same time; others wait when a MiB of theirs has arrived."""


ABANDON_S = 1.0
"""Time for storing worlds that are at rest when the model computes no more."""


@dataclass(frozen=True)
class ServerContext:
    """Everything that routes share; one per app, in `app.state.context`."""

    models: ServedModels
    compute: Compute
    """Where all of them run."""
    config: ServerConfig
    keys: Keys
    limiter: RequestLimiter
    metrics: Metrics
    worlds: WorldRegistry
    jobs: VideoJobs
    webhooks: Webhooks
    """Tell the operator's receiver which videos have finished."""
    database: Database
    """Of orders of videos; with replicas, of worlds, too."""
    replica: Replica | None
    """This server among the replicas of its database; None for a lone server."""
    watchdog: Watchdog
    session_limits: SessionLimits
    """Limits of WebSocket sessions."""
    num_sockets: Counter[str] = field(default_factory=Counter)
    """Open WebSockets of each caller."""
    large_bodies: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_LARGE_BODIES))
    """Held by requests with large bodies, which are in memory."""
    large_bodies_of_key: defaultdict[str, asyncio.Semaphore] = field(
        default_factory=lambda: defaultdict(lambda: asyncio.Semaphore(MAX_LARGE_BODIES_PER_KEY))
    )
    sessions: dict[str, "OpenSession"] = field(default_factory=dict)
    """WebSocket sessions by their ids."""
    started_at: int = field(default_factory=lambda: int(time.time()))
    """Unix time."""

    def stop_sessions(self) -> None:
        """End all WebSocket sessions, because the server was asked to stop."""
        for session in self.sessions.values():
            session.end("server_stopping")
        self.worlds.end_kept()

    async def stop(self, timeout_s: float) -> None:
        """End all WebSocket sessions, finish videos, and leave worlds to other replicas."""
        self.stop_sessions()
        await asyncio.gather(self.jobs.drain(timeout_s), self.worlds.stop(timeout_s))

    async def abandon(self) -> None:
        """Leave all work to other servers at once, because the model computes no more."""
        self.stop_sessions()
        reason = UnavailableError(f"The model of this server is {self.watchdog.fault}; try again later.")
        await asyncio.gather(self.jobs.drain(0), self.worlds.abandon(ABANDON_S, reason))
        self.compute.abandon(reason)
        if self.replica is not None:
            await self.replica.close()

    async def unload_adapter(self, model: Served) -> None:
        """Remove an adapter; worlds and sessions of it end, and its videos fail."""
        adapters = model.service.adapters
        adapters.withdraw(model.name)
        try:
            await self._end(model)
        finally:
            await self.compute.run(adapters.remove, model.name)

    async def unload_model(self, name: str) -> None:
        """Remove a model and its adapters; worlds and sessions of it end, and its videos fail.

        Raises:
            ConflictError, NotFoundError: as of `ServedModels.withdraw`.
        """
        service = self.models.withdraw(name)
        try:
            await self._end(Served(name, service))
        finally:
            await self.models.unload(service)

    async def _end(self, model: Served) -> None:
        for session in self.sessions.values():
            if session.world is not None and model.plays(session.world):
                session.end("model_unloaded")
        await self.worlds.end_model(model)

    def require_admin(self, caller: str, alone: bool = False) -> None:
        """Refuse what only administrators may do: any key where none is one or, with `alone`, an only key."""
        allowed = self.keys.is_admin(caller)
        if alone and len(self.keys) > 1:
            allowed = self.keys.options(caller).admin
        if not allowed:
            raise PermissionDeniedError("This needs a key that has the option admin in the key file.")

    def require_running(self) -> None:
        """Refuse new work while the server shuts down."""
        if self.jobs.draining or self.watchdog.fault is not None:
            raise UnavailableError("The server is stopping and accepts no new work; try again later.")


@dataclass(eq=False)
class OpenSession:
    """A WebSocket session, as those who end it see it."""

    caller: str
    id: str = field(default_factory=lambda: f"session-{secrets.token_urlsafe(16)}")
    created_at: int = field(default_factory=lambda: int(time.time()))
    world: World | None = None
    """Its world, once that has started."""
    ended: asyncio.Future[Reason] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Has a result once somebody else than its client has ended it."""

    def end(self, reason: Reason) -> None:
        """End it, unless it has ended."""
        if not self.ended.done():
            self.ended.set_result(reason)


def get_context(connection: HTTPConnection) -> ServerContext:
    """Return the context of the app that received the request."""
    return connection.app.state.context


Context = Annotated[ServerContext, Depends(get_context)]
_BEARER = HTTPBearer(auto_error=False, description="An API key of the server.")  # only for the OpenAPI schema


async def require_key(
    request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)] = None
) -> str:
    """Return the caller id of a request."""
    return authenticate(request, get_context(request).keys)


Caller = Annotated[str, Depends(require_key)]
"""Id of the authenticated caller."""
