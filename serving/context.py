"""Shared objects of one server, and the FastAPI dependencies that give routes access to them."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import HTTPConnection

from worldmodel.config import WorldModelConfig
from worldmodel.serving.auth import Keys, authenticate
from worldmodel.serving.errors import PermissionDeniedError, UnavailableError
from worldmodel.serving.metrics import Metrics
from worldmodel.serving.rate_limits import RequestLimiter
from worldmodel.serving.realtime.dropped import DroppedWorlds
from worldmodel.serving.realtime.events import SessionLimits
from worldmodel.serving.replicas.database import Database
from worldmodel.serving.replicas.replica import Replica
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.videos.jobs import VideoJobs
from worldmodel.serving.watchdog import Watchdog
from worldmodel.serving.worlds.registry import WorldRegistry
from worldmodel.serving.worlds.service import WorldService

MAX_LARGE_BODIES, MAX_LARGE_BODIES_PER_KEY = 4, 2
"""Requests with a large body at the same time; others wait when a MiB of theirs has arrived."""


ABANDON_S = 1.0
"""Time for storing worlds that are at rest when the model computes no more."""


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
    database: Database
    """Of orders of videos; with replicas, of worlds, too."""
    replica: Replica | None
    """This server among the replicas of its database; None for a lone server."""
    watchdog: Watchdog
    session_limits: SessionLimits
    """Limits of WebSocket sessions."""
    dropped: DroppedWorlds
    """Worlds of WebSocket sessions whose connection broke."""
    num_sockets: Counter[str] = field(default_factory=Counter)
    """Open WebSockets of each caller."""
    large_bodies: "LargeBodies" = field(default_factory=lambda: LargeBodies())
    """Held by requests with large bodies, which are in memory."""
    sessions: dict[str, "OpenSession"] = field(default_factory=dict)
    """WebSocket sessions by their ids."""
    started_at: int = field(default_factory=lambda: int(time.time()))
    """Unix time."""

    @property
    def model_config(self) -> WorldModelConfig:
        """Config of the served model."""
        return self.service.model.config

    def stop_sessions(self) -> None:
        """End all WebSocket sessions, because the server was asked to stop."""
        for session in self.sessions.values():
            session.stop.set()
        self.dropped.close()

    async def stop(self, timeout_s: float) -> None:
        """End all WebSocket sessions, finish videos, and leave worlds to other replicas."""
        self.stop_sessions()
        await asyncio.gather(self.jobs.drain(timeout_s), self.worlds.stop(timeout_s))

    async def abandon(self) -> None:
        """Leave all work to other servers at once, because the model computes no more."""
        self.stop_sessions()
        reason = UnavailableError(f"The model of this server is {self.watchdog.fault}; try again later.")
        await asyncio.gather(self.jobs.drain(0), self.worlds.abandon(ABANDON_S, reason))
        self.service.compute.abandon(reason)
        if self.replica is not None:
            await self.replica.close()

    def require_admin(self, caller: str) -> None:
        """Refuse what only an administrator may do, where there is one.

        Raises:
            PermissionDeniedError: the key is not an administrator's.
        """
        if not self.keys.is_admin(caller):
            raise PermissionDeniedError("This needs a key that has the option admin in the key file.")

    def require_running(self) -> None:
        """Refuse new work while the server shuts down.

        Raises:
            UnavailableError: the server is stopping.
        """
        if self.jobs.draining or self.watchdog.fault is not None:
            raise UnavailableError("The server is stopping and accepts no new work; try again later.")


@dataclass(eq=False)
class OpenSession:
    """A WebSocket session, as those who end it see it."""

    caller: str
    id: str = field(default_factory=lambda: f"session-{secrets.token_urlsafe(16)}")
    created_at: int = field(default_factory=lambda: int(time.time()))
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Ends it."""
    ended_by_admin: bool = False
    """Whether it ends because an administrator said so, and not because the server stops."""


class LargeBodies:
    """Limits the large bodies that are in memory, of all keys and of each."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(MAX_LARGE_BODIES)
        self._of_key: dict[str, asyncio.Semaphore] = {}

    @asynccontextmanager
    async def one(self, caller: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it while the block runs."""
        own = self._of_key.setdefault(caller, asyncio.Semaphore(MAX_LARGE_BODIES_PER_KEY))
        async with own, self._all:
            yield


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
