"""Registry of worlds by name; their classes are imported on first use."""

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

from worldmodel.config import WorldModelConfig
from worldmodel.episodes import StartImage
from worldmodel.errors import ConfigError, InputError
from worldmodel.worlds.base import World

if TYPE_CHECKING:
    from worldmodel.eval.suite import EvalSuite
    from worldmodel.models.world_model import WorldModel

_CLASSES: dict[str, str | type[World]] = {
    "shapes": "worldmodel.shapes.world:ShapesWorld",
    "crafter": "worldmodel.games.worlds:CrafterWorld",
}
"""The class of every world, or its name as `module:class`."""


def register_world(name: str, target: str | type[World]) -> None:
    """Register a world under a name.

    Args:
        name: Value of `model.world`.
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


def suite_of(config: WorldModelConfig) -> "EvalSuite":
    """Return the suite of a model's world.

    Raises:
        InputError: The model names no world, or its world cannot evaluate it.
        ConfigError: There is no world of this name.
    """
    suite = get_world(config.world).eval_suite() if config.world else None
    if suite is None:
        raise InputError(
            f"model.world is {config.world}, which has no evaluation suite; pass recorded episodes "
            "(worldmodel eval MODEL --data SOURCE)."
        )
    suite.check(config)
    return suite


def start_images(model: "WorldModel") -> Sequence[StartImage]:
    """Return the start images of a model: its own or, if it has none, its world's."""
    if model.start_images or model.config.world not in world_names():
        return model.start_images
    return get_world(model.config.world).start_images()
