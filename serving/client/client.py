"""Blocking client: the coroutines of the asyncio client over an HTTP client that blocks."""

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from worldmodel.episodes import Outcome
from worldmodel.serving.client.aio import BASE_URL, AsyncClient, AsyncRemoteWorld, AsyncVideos, AsyncWorlds
from worldmodel.serving.protocol import WorldObject

P = ParamSpec("P")
T = TypeVar("T")


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise AssertionError("the blocking client suspended")


def _blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return the blocking counterpart of a coroutine method, with its signature and docstring."""

    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        return _run(method(self._async, *args, **kwargs))

    return call


def _blocking_world(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, AsyncRemoteWorld]],
) -> "Callable[Concatenate[Any, P], RemoteWorld]":
    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> "RemoteWorld":
        return RemoteWorld(_run(method(self._async, *args, **kwargs)))

    return call


class RemoteWorld:
    """A live world on a server; `close`, or leaving the `with` block, deletes it."""

    def __init__(self, world: AsyncRemoteWorld) -> None:
        self._async = world

    def __repr__(self) -> str:
        return f"RemoteWorld(id={self.id!r}, round={self.round})"

    @property
    def id(self) -> str:
        """Id of the world, with which `worlds.open` finds it again."""
        return self._async.id

    @property
    def round(self) -> int:
        """Rounds played, by the newest response; `refresh` updates it."""
        return self._async.round

    @property
    def outcome(self) -> Outcome | None:
        """Reward and end of the newest frames that were received; see `AsyncRemoteWorld`."""
        return self._async.outcome

    @property
    def confidence(self) -> float | None:
        """Confidence of the newest frames that were received; see `AsyncRemoteWorld`."""
        return self._async.confidence

    @property
    def info(self) -> WorldObject:
        """Latest description of the world by the server."""
        return self._async.info

    frames = _blocking(AsyncRemoteWorld.frames)
    futures = _blocking(AsyncRemoteWorld.futures)
    step = _blocking(AsyncRemoteWorld.step)
    reset = _blocking(AsyncRemoteWorld.reset)
    fork = _blocking_world(AsyncRemoteWorld.fork)
    snapshot = _blocking(AsyncRemoteWorld.snapshot)
    restore = _blocking(AsyncRemoteWorld.restore)
    export = _blocking(AsyncRemoteWorld.export)
    describe = _blocking(AsyncRemoteWorld.describe)
    infer_action = _blocking(AsyncRemoteWorld.infer_action)
    refresh = _blocking(AsyncRemoteWorld.refresh)
    close = _blocking(AsyncRemoteWorld.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Worlds:
    """The live worlds of this API key."""

    def __init__(self, worlds: AsyncWorlds) -> None:
        self._async = worlds

    create = _blocking_world(AsyncWorlds.create)
    load = _blocking_world(AsyncWorlds.load)
    open = _blocking_world(AsyncWorlds.open)
    list = _blocking(AsyncWorlds.list)


class Videos:
    """Videos that the server generates in the background and stores for a while."""

    def __init__(self, videos: AsyncVideos) -> None:
        self._async = videos

    create = _blocking(AsyncVideos.create)
    retrieve = _blocking(AsyncVideos.retrieve)
    list = _blocking(AsyncVideos.list)
    wait = _blocking(AsyncVideos.wait)
    content = _blocking(AsyncVideos.content)
    download = _blocking(AsyncVideos.download)
    delete = _blocking(AsyncVideos.delete)


class _BlockingCalls(AsyncClient):
    """The calls of `AsyncClient` by a blocking HTTP client, so that they never suspend."""

    _http = httpx.Client


class Client:
    """Blocking client of a server; `with` closes its connections."""

    def __init__(
        self,
        base_url: str = BASE_URL,
        api_key: str | None = None,
        *,
        timeout_s: float = 180.0,
        retries: int = 4,
    ) -> None:
        """Prepare a client; no request is sent yet. Arguments as in `AsyncClient`."""
        self._async = _BlockingCalls(base_url, api_key, timeout_s=timeout_s, retries=retries)
        self.worlds, self.videos = Worlds(self._async.worlds), Videos(self._async.videos)

    @property
    def base_url(self) -> str:
        """URL of the server."""
        return self._async.base_url

    ready = _blocking(AsyncClient.ready)
    models = _blocking(AsyncClient.models)
    model = _blocking(AsyncClient.model)
    load_model = _blocking(AsyncClient.load_model)
    unload_model = _blocking(AsyncClient.unload_model)
    load_adapter = _blocking(AsyncClient.load_adapter)
    unload_adapter = _blocking(AsyncClient.unload_adapter)
    start_images = _blocking(AsyncClient.start_images)
    describe = _blocking(AsyncClient.describe)
    generate_image = _blocking(AsyncClient.generate_image)
    close = _blocking(AsyncClient.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
