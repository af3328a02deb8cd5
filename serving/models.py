"""The models of a server: the one it was started with, and others that an administrator adds later.

All run in one thread with one scheduler, which shares its time among keys, whatever models they choose. Every
model has its own engine and denoising loop, so a batch has calls of one.
"""

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from worldmodel import allocator
from worldmodel.config import WorldModelConfig
from worldmodel.errors import ConfigError, InputError, ModelError
from worldmodel.serving import loading
from worldmodel.serving.engine import limits
from worldmodel.serving.errors import ConflictError, NotFoundError
from worldmodel.serving.settings import EngineOptions
from worldmodel.serving.worlds.service import World, WorldService

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    """A model as a request names it."""

    name: str
    service: WorldService
    adapter: str | None = None
    """The adapter, if it is the name of one."""

    @property
    def config(self) -> WorldModelConfig:
        """Config of the model."""
        return self.service.model.config

    def plays(self, world: World) -> bool:
        """Return whether it plays a world: a model also those of its adapters."""
        return world.service is self.service and self.adapter in (None, world.settings.adapter)


class ModelUnloadedError(NotFoundError):
    """The model of a world was removed."""

    code = "model_unloaded"

    def __init__(self, name: str) -> None:
        super().__init__(f"The model {name!r} was unloaded; start another world.")


class ServedModels:
    """Models by the names under which requests choose them."""

    def __init__(self, first: WorldService, name: str, options: EngineOptions | None = None) -> None:
        """Serve a model, which stays; `options` are those of all models that are added."""
        self.first, self.device = first, first.model.device
        self._options = options or EngineOptions()
        self._services: dict[str, WorldService] = {}
        self._loading = asyncio.Lock()
        self._reserved: set[str] = set()
        self._register(name, first)

    def __iter__(self) -> Iterator[WorldService]:
        return iter(tuple(self._services.values()))  # it may change meanwhile

    @property
    def names(self) -> list[str]:
        """Names of all models and adapters."""
        return [name for service in self for name in (service.name, *service.engine.adapters)]

    def get(self, name: str | None) -> Served | None:
        """Return the model or adapter of a name, by default the first model; None if it is unknown."""
        if name is None:
            return Served(self.first.name, self.first)
        if name in self._services:
            return Served(name, self._services[name])
        owner = next((service for service in self if name in service.engine.adapters), None)
        return None if owner is None else Served(name, owner, name)

    def find(self, name: str | None) -> Served:
        """Return the model or adapter of a name.

        Raises:
            NotFoundError: the server has no such model.
        """
        if (found := self.get(name)) is None:
            raise _unknown()
        return found

    @contextmanager
    def _reserve(self, name: str) -> Iterator[None]:
        """Keep a name from other requests while what shall have it is loaded."""
        if name in self._reserved or name in self.names:
            raise ConflictError(f"There is a model {name!r}; unload it first, or choose another name.")
        self._reserved.add(name)
        try:
            yield
        finally:
            self._reserved.remove(name)

    def check_served(self, world: World) -> None:
        """Raise `ModelUnloadedError` if the model of a world that has just started was unloaded meanwhile."""
        model, adapter = self.get(world.service.name), world.settings.adapter
        if model is None or not model.plays(world) or adapter not in (None, *world.service.engine.adapters):
            raise ModelUnloadedError(adapter or world.service.name)

    def of_digest(self, digest: str) -> WorldService | None:
        """Return the model whose `Identity` has a digest."""
        return next((service for service in self if service.identity.model == digest), None)

    def stats(self) -> dict[str, float]:
        """Return the sums of the statistics of all models."""
        sums: Counter[str] = Counter()
        for service in self:
            sums.update(service.stats())
        return dict(sums)

    async def close(self) -> None:
        """Close all models, and the thread that runs them."""
        for service in self:
            await service.close()

    async def add(self, name: str, folder: Path) -> Served:
        """Load a model, and serve it once it has played a round; others go on meanwhile.

        Raises:
            ConflictError: there is a model or an adapter of this name.
            InputError: the folder does not hold a model, or the model does not fit in memory; the models that
                are served stay as they were.
        """
        with self._reserve(name):
            async with self._loading:
                service = await self._load(folder)
                try:
                    await service.play_test_round()
                except Exception:
                    LOG.exception("The model in %s cannot be served.", folder)
                    await self.unload(service)
                    raise InputError(
                        f"The model in {folder.name!r} is loaded, but cannot play a round; the log says why."
                    ) from None
                return self._register(name, service)

    async def add_adapter(self, name: str, folder: Path, base: str | None = None) -> Served:
        """Add an adapter to a model, by default the first one.

        Raises:
            ConflictError: there is a model or an adapter of this name.
            InputError: the folder has no adapter that fits the model, or `base` is an adapter.
            NotFoundError: there is no model `base`, or it was unloaded meanwhile.
        """
        model = self.find(base)
        if model.adapter is not None:
            raise InputError(f"{base!r} is an adapter; name its model, {model.service.name!r}.")

        def attach() -> None:  # in the thread that runs the model, which may have been unloaded meanwhile
            if model.service not in self:
                raise ModelUnloadedError(model.name)
            model.service.adapters.add(name, folder)

        with self._reserve(name):
            try:
                await model.service.compute.run(attach)
            except ModelError as error:
                raise InputError(str(error)) from None
        return self.find(name)

    def withdraw(self, name: str) -> WorldService:
        """Let requests choose a model no longer, and return it.

        Raises:
            ConflictError: the server was started with it.
            NotFoundError: there is none of this name.
        """
        if name == self.first.name:
            raise ConflictError(
                f"The server was started with {name!r}, which cannot be unloaded; stop the server instead."
            )
        if name not in self._services:
            raise _unknown()
        return self._services.pop(name)

    async def unload(self, service: WorldService) -> None:
        """End the calls of a model that was withdrawn, and give its memory back."""
        await service.discard()
        gc.collect()  # what holds a model refers to itself
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        allocator.trim()

    def _register(self, name: str, service: WorldService) -> Served:
        service.name = name
        service.max_rounds = self.first.max_rounds
        self._services[name] = service
        return Served(name, service)

    async def _load(self, folder: Path) -> WorldService:
        device, compute = self.device, self.first.compute
        # A thread of its own, as calls to other models go on in theirs. It ends at once, since threads of
        # OpenMP that it left behind would slow down all later rounds.
        pool = ThreadPoolExecutor(1, "loading")
        try:
            limits.check_weights(folder, device)
            loaded = await asyncio.get_running_loop().run_in_executor(
                pool, loading.load, str(folder.resolve()), device, self._options
            )
        except (ConfigError, ModelError, torch.OutOfMemoryError) as error:
            raise InputError(str(error)) from None
        finally:
            pool.shutdown(wait=False)
        return await loading.start(loaded, compute, self._options)


def _unknown() -> NotFoundError:
    return NotFoundError(
        "The server has no model with this name; GET /v1/models lists its models.", "model_not_found"
    )
