"""Loading of configurations from YAML files and `key=value` overrides.

Overrides take precedence over the file, and the file over the defaults. The results are plain dataclasses;
OmegaConf, which checks names and types, is used in this module only.
"""

import dataclasses
import importlib.resources
import re
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from worldmodel.actions import ActionConfig
from worldmodel.config.checks import not_one_of
from worldmodel.config.model import WorldModelConfig
from worldmodel.config.train import TrainConfig
from worldmodel.errors import ConfigError, did_you_mean

T = TypeVar("T")


def build(schema: type[T], values: dict[str, Any]) -> T:
    """Fill a dataclass from nested plain values, checking names and types.

    Raises:
        ConfigError: a key is unknown or a value has the wrong type; the message names it.
    """
    if schema is ActionConfig:
        return ActionConfig.of(values)  # type: ignore[return-value]
    return _merge(schema, [values])


def load(path: str | Path, overrides: list[str] | None = None, schema: type[T] = TrainConfig) -> T:
    """Read a YAML file into `schema` and apply `key=value` overrides.

    `path` is a file or the name of a shipped config (`shapes_tiny`).

    Raises:
        ConfigError: the file, a key or a value is wrong.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    source: Traversable = Path(path)
    if not source.is_file():
        source = importlib.resources.files("worldmodel.configs").joinpath(f"{Path(path).stem}.yaml")
        if not source.is_file():
            raise ConfigError(
                f"There is no config file {str(path)!r}; `worldmodel config` lists the shipped ones."
            )
    try:
        text = source.read_text(encoding="utf-8")
        layers = [OmegaConf.create(text), OmegaConf.from_dotlist(list(overrides or []))]
        layers[0] = _without_replaced(*map(OmegaConf.to_container, layers))
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a readable config: {str(error).splitlines()[0]}") from None
    return _merge(schema, layers)


def _without_replaced(values: Any, overrides: Any) -> Any:
    """Return the values of a file without architectures of which overrides name another class.

    The arguments of one are not those of the other.
    """
    if not isinstance(values, dict) or not isinstance(overrides, dict):
        return values
    replaced = {
        name
        for name, value in overrides.items()
        if isinstance(value, dict) and not value.keys().isdisjoint(("_class_name", "model_type"))
    }
    return {
        name: _without_replaced(value, overrides.get(name))
        for name, value in values.items()
        if name not in replaced
    }


def _merge(schema: type[T], layers: list[Any]) -> T:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        layers = [OmegaConf.create(layer) for layer in layers]
        actions = [found for layer in layers if (found := _take_out_action(schema, layer)) is not None]
        config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), *layers))
        if not actions:
            return config
        merged: Any = OmegaConf.to_container(OmegaConf.merge(*({"action": each} for each in actions)))
        action = ActionConfig.of(merged["action"])
    except (OmegaConfBaseException, TypeError) as error:  # the latter for a list in place of a mapping
        raise ConfigError(_message(error)) from None
    if schema is WorldModelConfig:
        return dataclasses.replace(config, action=action)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, action=action))


def _take_out_action(schema: type, layer: Any) -> Any:
    """Take the settings of the kinds of action, which read them on their own, out of those for OmegaConf."""
    from omegaconf import DictConfig

    if schema is TrainConfig and isinstance(layer, DictConfig):
        layer = layer.get("model")
    takes = schema in (TrainConfig, WorldModelConfig) and isinstance(layer, DictConfig)
    return layer.pop("action", None) if takes else None


def _message(error: Exception) -> str:
    """Return an error of OmegaConf in one line, with the key and the values that are allowed."""
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError

    key, text = getattr(error, "full_key", None), " ".join(str(error).split())
    if found := re.match(r"Invalid value '(.*?)', expected one of \[(.*?)\]", text):
        return not_one_of(key or "", found[1], re.findall(r"'(.*?)'", found[2]))
    if isinstance(error, ConfigAttributeError | ConfigKeyError) and dataclasses.is_dataclass(
        error.object_type
    ):
        known = [each.name for each in dataclasses.fields(error.object_type)]
        return f"{key} is not a setting{did_you_mean(error.key, known)}; use one of {', '.join(known)}."
    return f"{key}: {text.split(' full_key:')[0]}" if key else f"config: {text}"


def to_dict(config: Any) -> dict[str, Any]:
    """Return a dataclass as nested plain values, as `build` takes them."""
    if isinstance(config, ActionConfig):
        return config.as_dict()
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return type(value)(map(_plain, value)) if isinstance(value, list | tuple) else value
