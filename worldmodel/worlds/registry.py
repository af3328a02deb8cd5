"""The names of worlds and the classes behind them, imported when a world is first used."""

from functools import lru_cache
from importlib import import_module

from worldmodel.errors import ConfigError
from worldmodel.worlds.base import World

_CLASSES = {"shapes": "worldmodel.worlds.shapes.world:ShapesWorld"}
"""`module:class` of every world."""


def register_world(name: str, target: str) -> None:
    """Make a world of your own available under a name.

    Args:
        name: What `model.world` and `data.sources.NAME.kind` call it.
        target: Its class as `module:class`, a subclass of `World` that takes no arguments.
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
    module, _, attribute = _CLASSES[name].partition(":")
    return getattr(import_module(module), attribute)()
