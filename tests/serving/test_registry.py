"""Registry of live worlds: limits, slots, and the idle timeout."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from worldmodel.errors import InputError
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.errors import ConflictError, NotFoundError, RateLimitError
from worldmodel.serving.metrics import Metrics
from worldmodel.serving.models import ServedModels
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.worlds.registry import Origin, WorldRegistry
from worldmodel.serving.worlds.service import WorldService


def run(model: WorldModel, body: Callable[[WorldRegistry], Coroutine[Any, Any, None]], **config: Any) -> None:
    async def whole() -> None:
        service = WorldService(model)
        try:
            models, config_ = ServedModels(service, "tiny"), ServerConfig("tiny", Path(), **config)
            await asyncio.wait_for(body(WorldRegistry(models, config_, Metrics())), 120)
        finally:
            await service.close()

    asyncio.run(whole())


def test_limits_per_key_and_in_total(model: WorldModel) -> None:
    async def body(registry: WorldRegistry) -> None:
        first = registry.reserve("alice")
        registry.reserve("alice")
        with pytest.raises(RateLimitError, match="2 live worlds"):
            registry.reserve("alice")
        registry.reserve("bob")
        with pytest.raises(RateLimitError, match="3 live worlds"):
            registry.reserve("carol")
        registry.release(first)
        registry.release(first)
        assert len(registry) == 2
        with registry.temporary("carol"):
            assert len(registry) == 3
        assert len(registry) == 2

    run(model, body, max_worlds=3, max_worlds_per_key=2)


def test_failed_start_releases_its_slot(model: WorldModel, image: np.ndarray) -> None:
    async def body(registry: WorldRegistry) -> None:
        service = registry.models.first
        settings = service.settings()
        with pytest.raises(InputError):
            await registry.start("alice", service, Origin(), settings)
        assert len(registry) == 0
        world = await registry.start("alice", service, Origin(frames=image[None]), settings)
        with pytest.raises(RateLimitError):
            await registry.fork(world)
        with pytest.raises(ConflictError, match="7"):
            await registry.step(world, 7, None)
        assert len(registry) == 1

    run(model, body, max_worlds_per_key=1)


def test_idle_worlds_are_closed(model: WorldModel, image: np.ndarray) -> None:
    async def body(registry: WorldRegistry) -> None:
        service = registry.models.first
        world = await registry.start("alice", service, Origin(frames=image[None]), service.settings())
        await registry.sweep(60)
        assert await registry.get("alice", world.world.id) is world
        await registry.sweep(-1)
        assert len(registry) == 0 and registry.owned_by("alice") == []
        with pytest.raises(NotFoundError):
            await registry.get("alice", world.world.id)
        with pytest.raises(NotFoundError):
            await registry.step(world, 1, None)

    run(model, body)
