"""Checks of the parts of actions that are lists of numbers or mappings."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from worldmodel.errors import InputError

MAX_NUMBER = 1e6
"""Largest magnitude of a number in an action; much larger ones overflow in half precision."""


class NumberSpec(Protocol):
    """What kinds of action read of the spec of a number; `ActionSpec` has it."""

    @property
    def name(self) -> str: ...
    @property
    def unit(self) -> str: ...
    @property
    def scale(self) -> float: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...


def parse_numbers(name: str, value: Any) -> tuple[float, ...]:
    """Parse a list of numbers; strings and booleans are not numbers."""
    try:
        listed = [] if isinstance(value, str | bytes | Mapping) else list(value)
        if not listed or any(isinstance(x, str | bytes | bool) for x in listed):
            raise TypeError
        return tuple(float(x) for x in listed)
    except (TypeError, ValueError, OverflowError):
        raise InputError(
            f"The {name} of an action is {reprlib.repr(value)}; pass a list of numbers."
        ) from None


def check_numbers(name: str, numbers: Sequence[float], count: int) -> None:
    """Raise `InputError` unless there are `count` finite numbers of at most `MAX_NUMBER`."""
    if len(numbers) != count:
        raise InputError(f"The {name} of the action has {len(numbers)} numbers; pass {count}.")
    if not all(abs(x) <= MAX_NUMBER for x in numbers):
        raise InputError(
            f"The {name} of the action, {list(numbers)}, is not finite or beyond {MAX_NUMBER:g}; "
            "pass smaller numbers."
        )


def check_fields(subject: str, value: Mapping[str, Any], fields: Sequence[str]) -> None:
    """Raise `InputError` if a mapping has a key that is not among the fields."""
    for name in value:
        if name not in fields:
            raise InputError(f"{subject} has no field {str(name)!r}; use {', '.join(fields)}.")
