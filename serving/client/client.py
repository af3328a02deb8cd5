"""Client of the server: worlds that live there, videos that are made there, words about pictures.

    with Client("http://127.0.0.1:8000") as client, client.worlds.create("first_frame.png") as world:
        frames = world.step("the red ball moves left")

`AsyncClient` has the same calls for asyncio; `Client` runs its coroutines over a wire that waits. What fails
raises a kind of `worldmodel.serving.errors.ApiError` (a `WorldModelError`) with the server's `code` and its
one sentence. Calls that can be repeated without harm are sent again when the connection breaks or the server
is full; a step carries its number, so that it is played once however often it is sent.
"""

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from worldmodel.serving.client.aio import (
    BASE_URL,
    AsyncClient,
    AsyncRemoteWorld,
    AsyncVideos,
    AsyncWorlds,
    Video,
    WorldInfo,
)
from worldmodel.serving.client.transport import (
    BlockingTransport,
    ConnectionFailed,
    JobFailed,
    Link,
    Refused,
    ServerFailed,
    read_address,
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

P = ParamSpec("P")
T = TypeVar("T")


def _finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine over a wire that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise AssertionError("a blocking wire suspended")


def _waiting(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Make the waiting twin of a coroutine method, with its signature and its docstring."""

    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        return _finish(method(self._other, *args, **kwargs))

    return call


def _waiting_world(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, AsyncRemoteWorld]],
) -> "Callable[Concatenate[Any, P], RemoteWorld]":
    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> "RemoteWorld":
        return RemoteWorld(_finish(method(self._other, *args, **kwargs)))

    return call


class RemoteWorld:
    """A world that lives on a server; ends when the `with` block does, or by `close`."""

    def __init__(self, other: AsyncRemoteWorld) -> None:
        self._other = other

    def __repr__(self) -> str:
        return f"RemoteWorld(id={self.id!r}, round={self.round})"

    @property
    def id(self) -> str:
        """Its name on the server, which is all that is needed to `open` it again."""
        return self._other.id

    @property
    def round(self) -> int:
        """Rounds played, as far as this client knows."""
        return self._other.round

    @property
    def info(self) -> WorldInfo:
        """What the server said of it last."""
        return self._other.info

    frames = _waiting(AsyncRemoteWorld.frames)
    step = _waiting(AsyncRemoteWorld.step)
    reset = _waiting(AsyncRemoteWorld.reset)
    fork = _waiting_world(AsyncRemoteWorld.fork)
    snapshot = _waiting(AsyncRemoteWorld.snapshot)
    restore = _waiting(AsyncRemoteWorld.restore)
    describe = _waiting(AsyncRemoteWorld.describe)
    infer_action = _waiting(AsyncRemoteWorld.infer_action)
    refresh = _waiting(AsyncRemoteWorld.refresh)
    close = _waiting(AsyncRemoteWorld.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Worlds:
    """The live worlds of this client's key."""

    def __init__(self, other: AsyncWorlds) -> None:
        self._other = other

    create = _waiting_world(AsyncWorlds.create)
    open = _waiting_world(AsyncWorlds.open)
    list = _waiting(AsyncWorlds.list)


class Videos:
    """Videos that the server makes in the background and keeps for a while."""

    def __init__(self, other: AsyncVideos) -> None:
        self._other = other

    create = _waiting(AsyncVideos.create)
    retrieve = _waiting(AsyncVideos.retrieve)
    list = _waiting(AsyncVideos.list)
    wait = _waiting(AsyncVideos.wait)
    content = _waiting(AsyncVideos.content)
    download = _waiting(AsyncVideos.download)
    delete = _waiting(AsyncVideos.delete)


class Client:
    """A server's client; `with` closes its connections."""

    def __init__(
        self,
        base_url: str = BASE_URL,
        api_key: str | None = None,
        *,
        timeout_s: float = 180.0,
        retries: int = 4,
    ) -> None:
        """Prepare to talk to the server at `base_url`; nothing is sent yet. As `AsyncClient`."""
        address, here = read_address(base_url)
        wire = BlockingTransport(httpx.Client(trust_env=not here))
        self._other = AsyncClient.over(Link(wire, address, api_key, timeout_s, retries))
        self.worlds, self.videos = Worlds(self._other.worlds), Videos(self._other.videos)

    @property
    def base_url(self) -> str:
        """Address of the server."""
        return self._other.base_url

    ready = _waiting(AsyncClient.ready)
    models = _waiting(AsyncClient.models)
    describe = _waiting(AsyncClient.describe)
    imagine = _waiting(AsyncClient.imagine)
    close = _waiting(AsyncClient.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
