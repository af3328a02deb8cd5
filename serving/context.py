"""Shared objects of one server, and the FastAPI dependencies that give routes access to them."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import HTTPConnection

from worldmodel.config import WorldModelConfig
from worldmodel.serving.auth import Keys, authenticate
from worldmodel.serving.errors import UnavailableError
from worldmodel.serving.metrics import Metrics
from worldmodel.serving.rate_limits import RequestLimiter
from worldmodel.serving.realtime.events import SessionLimits
from worldmodel.serving.replicas.lease import Lease
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.videos.jobs import VideoJobs
from worldmodel.serving.worlds.registry import WorldRegistry
from worldmodel.serving.worlds.service import WorldService

MAX_LARGE_BODIES = 4
"""Requests with a large body that are served at the same time; others wait before theirs is read."""


@dataclass(frozen=True)
class ServerContext:
    """Everything that routes share; one per app, in `app.state.context`."""

    service: WorldService
    config: ServerConfig
    keys: Keys
    limiter: RequestLimiter
    metrics: Metrics
    worlds: WorldRegistry
    jobs: VideoJobs
    lease: Lease
    """This server among the replicas of its database."""
    session_limits: SessionLimits
    """Limits of WebSocket sessions."""
    num_sockets: Counter[str] = field(default_factory=Counter)
    """Open WebSockets of each caller."""
    large_bodies: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_LARGE_BODIES))
    """Held by requests with large bodies, which are in memory."""
    sessions: set[asyncio.Event] = field(default_factory=set)
    """One event for each WebSocket session, which ends the session."""
    started_at: int = field(default_factory=lambda: int(time.time()))
    """Unix time."""

    @property
    def model_config(self) -> WorldModelConfig:
        """Config of the served model."""
        return self.service.model.config

    def stop_sessions(self) -> None:
        """End all WebSocket sessions, because the server was asked to stop."""
        for event in self.sessions:
            event.set()

    async def stop(self, timeout_s: float) -> None:
        """End all WebSocket sessions, finish videos, and leave worlds to other replicas."""
        self.stop_sessions()
        await asyncio.gather(self.jobs.drain(timeout_s), self.worlds.stop(timeout_s))

    def require_running(self) -> None:
        """Refuse new work while the server shuts down.

        Raises:
            UnavailableError: the server is stopping.
        """
        if self.jobs.draining:
            raise UnavailableError("The server is stopping and accepts no new work; try again later.")


def get_context(connection: HTTPConnection) -> ServerContext:
    """Return the context of the app that received the request."""
    return connection.app.state.context


Context = Annotated[ServerContext, Depends(get_context)]
_BEARER = HTTPBearer(auto_error=False, description="An API key of the server.")  # only for the OpenAPI schema


async def require_key(
    request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)] = None
) -> str:
    """Return the caller id of a request.

    Raises:
        AuthenticationError: the key is missing or unknown.
        PermissionDeniedError: the server has no keys and the request is cross-origin.
    """
    return authenticate(request, get_context(request).keys)


Caller = Annotated[str, Depends(require_key)]
"""Id of the authenticated caller."""
