"""The components of a model that a stage trains, by group or by module name."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from torch import nn

from worldmodel.config import TrainedConfig
from worldmodel.errors import ConfigError, did_you_mean
from worldmodel.models import lora

T = TypeVar("T")

GROUPS = ("adapters", "all")
"""Groups of `StageConfig.train` beside the modules of the model."""
LARGE = ("backbone", "generator", "codec", "vision.encoder")
"""Modules that are not adapters."""


def settings_of(name: str, train: Mapping[str, T]) -> T | None:
    """Return the value of a parameter of the model in a mapping by components, by the most specific key."""
    matching = [key for key in train if _is_below(name, key)]
    if matching:
        return train[max(matching, key=len)]
    if "adapters" in train and not any(_is_below(name, large) for large in LARGE):
        return train["adapters"]
    return train.get("all")


def is_trained(name: str, train: Mapping[str, TrainedConfig]) -> bool:
    """Return whether a stage trains a parameter: all weights of a component, or only its LoRA weights.

    The text and image encoders of a pretrained generator are never trained.
    """
    settings = settings_of(name, train)
    adapted = settings is not None and settings.lora_rank and not lora.is_new(name)
    trained = settings is not None and (not adapted or ".lora_" in name)
    return trained and not any(part in name for part in lora.FIXED)


def check_components(model: nn.Module, train: Mapping[str, TrainedConfig]) -> None:
    """Check that the keys of `StageConfig.train` exist.

    Raises:
        ConfigError: a key is neither a group nor a module of the model, a group has a `lora_rank`, or a key
            has linear layers below one that has.
    """
    names = [name for name, _ in model.named_parameters()]
    for key, settings in train.items():
        if key in GROUPS:
            if settings.lora_rank:
                raise ConfigError(
                    f"train.{key}.lora_rank is {settings.lora_rank}, but {key} is a group; set it for a "
                    "component such as backbone or generator."
                )
        else:
            check_component(key, names, "train")
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for key in train:
        # Norms and embeddings may be trained in full beside the LoRA of the linear layers around them.
        adapted = any(_is_below(name, key) or _is_below(key, name) for name in linear)
        for outer, settings in train.items():
            if adapted and settings.lora_rank and key != outer and _is_below(key, outer):
                raise ConfigError(
                    f"train.{key} has linear layers below train.{outer}, whose lora_rank freezes them; leave "
                    "out one of the two."
                )


def check_component(key: str, names: Iterable[str], setting: str) -> None:
    """Check that a key of a mapping by components is a group or a module of the model.

    Raises:
        ConfigError: it is neither.
    """
    names = list(names)
    if key not in GROUPS and not any(_is_below(name, key) for name in names):
        known = [*GROUPS, *sorted({name.split(".")[0] for name in names})]
        raise ConfigError(
            f"{setting} has {key!r}{did_you_mean(key, known)}; use {', '.join(known)} or the name of a "
            "module inside one."
        )


def _is_below(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")
