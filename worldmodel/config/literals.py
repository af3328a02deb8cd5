"""Check of settings that take one of a few values."""

from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin, get_type_hints

from worldmodel.errors import ConfigError, did_you_mean


def check_literals(config: Any) -> None:
    """Check the fields of a dataclass whose type is a `Literal`.

    Raises:
        ConfigError: a value is not one of them.
    """
    for name, hint in get_type_hints(type(config)).items():
        if get_origin(hint) is Literal and (value := getattr(config, name)) not in get_args(hint):
            raise ConfigError(not_one_of(name, value, get_args(hint)))


def not_one_of(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Return the message for a value that is not allowed, with the closest one that is."""
    allowed = list(allowed)
    return f"{name} is {value!r}; use one of {', '.join(allowed)}{did_you_mean(value, allowed)}."
