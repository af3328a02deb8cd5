"""Clients of the server: `Client` waits, `AsyncClient` has the same calls for asyncio."""

from worldmodel.serving.client.client import (
    AsyncClient,
    AsyncRemoteWorld,
    Client,
    ConnectionFailed,
    JobFailed,
    Refused,
    RemoteWorld,
    ServerFailed,
    Video,
    WorldInfo,
)

__all__ = [
    "AsyncClient",
    "AsyncRemoteWorld",
    "Client",
    "ConnectionFailed",
    "JobFailed",
    "Refused",
    "RemoteWorld",
    "ServerFailed",
    "Video",
    "WorldInfo",
]
