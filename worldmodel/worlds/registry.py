"""Registry of worlds by name; their classes are imported on first use."""

from functools import lru_cache
from importlib import import_module

from worldmodel.errors import ConfigError
from worldmodel.worlds.base import World

_CLASSES: dict[str, str | type[World]] = {"shapes": "worldmodel.worlds.shapes.world:ShapesWorld"}
"""The class of every world, or its name as `module:class`."""


def register_world(name: str, target: str | type[World]) -> None:
    """Register a world under a name.

    Args:
        name: Value of `model.world` and `data.sources.NAME.kind`.
        target: A subclass of `World` that takes no arguments, or its name as `module:class`.
    """
    _CLASSES[name] = target
    get_world.cache_clear()


def world_names() -> list[str]:
    """Return the names of all registered worlds."""
    return list(_CLASSES)


@lru_cache
def get_world(name: str) -> World:
    """Return a world by its name.

    Raises:
        ConfigError: No world has this name.
    """
    if name not in _CLASSES:
        raise ConfigError(f"There is no world {name!r}; use one of {', '.join(_CLASSES)}.")
    target = _CLASSES[name]
    if isinstance(target, str):
        module, _, attribute = target.partition(":")
        target = getattr(import_module(module), attribute)
    return target()
