"""Python client of the server: `Client` blocks, `AsyncClient` offers the same calls for asyncio.

    with Client("http://127.0.0.1:8000") as client, client.worlds.create("first_frame.png") as world:
        frames = world.step("the red ball moves left").frames

Failed calls raise an `ApiError` (a `WorldModelError`) with the `code` and message of the server. Calls that
are safe to repeat are retried when the connection breaks or the server is busy. Steps are numbered, so a
retried step is played only once.
"""

from worldmodel.serving.client.aio import AsyncClient, AsyncRemoteWorld, RemoteFuture
from worldmodel.serving.client.client import Client, RemoteWorld
from worldmodel.serving.client.errors import (
    BadRequestError,
    ServerError,
    ServerUnreachableError,
    VideoFailedError,
)
from worldmodel.serving.protocol import VideoObject, WorldObject

__all__ = [
    "AsyncClient",
    "AsyncRemoteWorld",
    "BadRequestError",
    "Client",
    "RemoteFuture",
    "RemoteWorld",
    "ServerError",
    "ServerUnreachableError",
    "VideoFailedError",
    "VideoObject",
    "WorldObject",
]
