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

from worldmodel.config.literals import did_you_mean, not_one_of
from worldmodel.config.train import TrainConfig
from worldmodel.errors import ConfigError

T = TypeVar("T")


def build(schema: type[T], values: dict[str, Any]) -> T:
    """Fill a dataclass from nested plain values, checking names and types.

    Raises:
        ConfigError: a key is unknown or a value has the wrong type; the message names it.
    """
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
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a readable config: {str(error).splitlines()[0]}") from None
    return _merge(schema, layers)


def _merge(schema: type[T], layers: list[Any]) -> T:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), *layers)
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except (OmegaConfBaseException, TypeError) as error:  # the latter for a list in place of a mapping
        raise ConfigError(_message(error)) from None


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
        return f"{key} is not a setting{did_you_mean(str(error.key), known)}; use one of {', '.join(known)}."
    return f"{key}: {text.split(' full_key:')[0]}" if key else f"config: {text}"


def to_dict(config: Any) -> dict[str, Any]:
    """Return a dataclass as nested plain values, as `build` takes them."""
    return dataclasses.asdict(config)
