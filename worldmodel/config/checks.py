"""Checks of settings that take one of a few values, or a number of a range."""

import math
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin, get_type_hints

from worldmodel.errors import ConfigError, did_you_mean


def check_literals(config: Any) -> None:
    """Raise `ConfigError` if a field whose type is a `Literal` has another value."""
    for name, hint in get_type_hints(type(config)).items():
        if get_origin(hint) is Literal and (value := getattr(config, name)) not in get_args(hint):
            raise ConfigError(not_one_of(name, value, get_args(hint)))


def not_one_of(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Return the message for a value that is not allowed, with the closest one that is."""
    allowed = list(allowed)
    return f"{name} is {value!r}; use one of {', '.join(allowed)}{did_you_mean(value, allowed)}."


def check_numbers(config: Any, *names: str, least: float, below: float = math.inf, of: str = "") -> None:
    """Check fields of a dataclass that are numbers, tuples of numbers, or None.

    Args:
        config: The dataclass.
        names: Its fields.
        least: The least value that each may have.
        below: A value that none may reach.
        of: What the dataclass is, for messages, such as ` of a stage`.

    Raises:
        ConfigError: a number is lower or higher, or is none.
    """
    for name in names:
        value = getattr(config, name)
        numbers = value if isinstance(value, list | tuple) else [value]  # from a file, a tuple is a list
        if not all(number is None or least <= number < below for number in numbers):
            most = "or more" if below == math.inf else f"to below {below:g}"
            raise ConfigError(f"{name}{of} is {value}; use {least:g} {most}.")
