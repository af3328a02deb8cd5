"""Action spaces of Gymnasium as named keys and vectors.

Discrete         one key per value, of which one is held
MultiBinary      one key per bit
MultiDiscrete    one key per value of every axis
Box              a vector with its bounds
Dict, Tuple      all of these together, each name after its entry's
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import spaces

from worldmodel.actions import Action, action_kind, specs_by_kind
from worldmodel.config import ActionSpec
from worldmodel.errors import InputError


class ActionMapping:
    """Names the numbers of an action space, and converts its elements to actions.

    Args:
        space: the action space.
        rate: actions per second.
        names: names of the values of a Discrete space.
        details: name, unit, scale and frame of every number, in place of those found.

    Raises:
        InputError: the space has no mapping, or `details` has another length.
    """

    def __init__(
        self, space: spaces.Space, rate: float, names: Sequence[str] = (), details: Sequence[Any] = ()
    ) -> None:
        self.space = space
        specs = list(_specs(space, "", names))
        if details and len(details) != len(specs):
            raise InputError(
                f"The action spec has {len(details)} entries; use one for each of {len(specs)} numbers: "
                f"{', '.join(spec.name for spec in specs)}."
            )
        if details:
            specs = [
                ActionSpec.of({**spec.as_dict(), **each}) for spec, each in zip(specs, details, strict=True)
            ]
        self.specs = tuple(replace(spec, rate=rate) for spec in specs)

    def numbers(self, value: Any) -> np.ndarray:
        """Return an element of the space as numbers, one for each spec; a held key is 1."""
        return np.fromiter(_numbers(self.space, value), np.float32, len(self.specs))

    def element(self, action: Action) -> Any:
        """Return the element of the space that an action names; the inverse of `numbers`.

        Raises:
            InputError: the action has other keys or numbers, or does not hold one key of a Discrete space.
        """
        own = {kind.name: specs for kind, specs in specs_by_kind(self.specs)}
        # Words and other actions without numbers are for models alone.
        numbered = [name for name, _ in action.parts if action_kind(name).spec_kind]
        fits = set(numbered) <= own.keys() and all(
            action_kind(name).fits(action.part(name), specs) for name, specs in own.items()
        )
        if not fits:
            raise InputError(
                f"The environment does not take {action}; its actions are of "
                f"{', '.join(spec.name for spec in self.specs)}."
            )
        return _element(self.space, iter(np.array(action.numbers(self.specs), np.float64)))


def _specs(space: spaces.Space, prefix: str, names: Sequence[str] = ()) -> Iterator[ActionSpec]:
    stem = f"{prefix}." if prefix else ""
    if isinstance(space, spaces.Discrete | spaces.MultiBinary):
        count = int(space.n if isinstance(space, spaces.Discrete) else np.prod(space.shape))
        known = names if len(names) == count else [f"{prefix or 'action'}_{i}" for i in range(count)]
        yield from (ActionSpec(name, "key", low=0, high=1) for name in known)
    elif isinstance(space, spaces.MultiDiscrete):
        for axis, count in enumerate(space.nvec.flatten()):
            yield from (ActionSpec(f"{stem}{axis}_{i}", "key", low=0, high=1) for i in range(int(count)))
    elif isinstance(space, spaces.Box):
        for index, (low, high) in enumerate(zip(space.low.flatten(), space.high.flatten(), strict=True)):
            bounded = np.isfinite([low, high]).all() and low < high
            bounds = (float(low), float(high)) if bounded else (None, None)
            yield ActionSpec(f"{prefix or 'action'}_{index}", low=bounds[0], high=bounds[1])
    elif isinstance(space, spaces.Dict | spaces.Tuple):
        for name, entry in _entries(space):
            yield from _specs(entry, f"{stem}{name}")
    else:
        raise InputError(
            f"The action space {space} has no mapping to keys or numbers; wrap the environment so that its "
            "actions are of a Discrete, MultiBinary, MultiDiscrete, Box, Dict or Tuple space."
        )


def _numbers(space: spaces.Space, value: Any) -> Iterator[float]:
    if isinstance(space, spaces.Discrete):
        yield from (float(i == int(value) - int(space.start)) for i in range(int(space.n)))
    elif isinstance(space, spaces.MultiDiscrete):
        chosen = (np.asarray(value) - space.start).flatten()
        for count, each in zip(space.nvec.flatten(), chosen, strict=True):
            yield from (float(i == each) for i in range(int(count)))
    elif isinstance(space, spaces.Dict | spaces.Tuple):
        for name, entry in _entries(space):
            yield from _numbers(entry, value[name])
    else:
        yield from np.asarray(value, np.float64).flatten()


def _element(space: spaces.Space, numbers: Iterator[float]) -> Any:
    if isinstance(space, spaces.Discrete):
        return int(space.start) + _held(space, numbers, int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        held = [_held(space, numbers, int(count)) for count in space.nvec.flatten()]
        return (np.array(held).reshape(space.shape) + space.start).astype(space.dtype)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        found = {name: _element(entry, numbers) for name, entry in _entries(space)}
        return found if isinstance(space, spaces.Dict) else tuple(found.values())
    flat = np.fromiter(itertools.islice(numbers, math.prod(space.shape or ())), np.float64)
    return flat.reshape(space.shape).astype(space.dtype)


def _held(space: spaces.Space, numbers: Iterator[float], count: int) -> int:
    held = np.flatnonzero(np.fromiter(itertools.islice(numbers, count), np.float64))
    if len(held) != 1:
        raise InputError(f"An action of {space} holds {len(held)} keys; hold one of {count}.")
    return int(held[0])


def _entries(space: spaces.Dict | spaces.Tuple) -> list[tuple[Any, spaces.Space]]:
    return list(space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces))
