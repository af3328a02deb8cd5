"""Action spaces, and the conversion of their elements to actions of a world."""

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, get_args

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from worldmodel.config import ActionConfig
from worldmodel.config import build as build_config
from worldmodel.errors import ConfigError, InputError
from worldmodel.types import Action, Camera, Pose

ActionType = Literal["keys", "key", "vector", "mouse", "camera", "text"]
"""Types of action; the first that the model supports is the default. `key` is exactly one of the keys."""
ActionTypes = ActionType | tuple[ActionType, ...]
"""One type, or several whose actions are combined."""
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " "
CAMERA_SIZE = 6
"""Size of a camera action: translation x, y, z, and rotation as axis times angle (radians)."""


def resolve_action_types(
    requested: ActionType | Sequence[ActionType] | None, config: ActionConfig
) -> ActionTypes:
    """Return the requested type or types, or the first that the model supports.

    Raises:
        ConfigError: the model does not support a requested type.
    """
    supported: list[ActionType] = [
        name for name in get_args(ActionType) if config.takes["keys" if name == "key" else name]
    ]
    if not supported:
        raise ConfigError(
            "This world takes no actions; enable keys, vector, mouse, camera or text in the model's "
            "config.action."
        )
    if requested is None:
        return supported[0]
    several = isinstance(requested, tuple | list)
    types: list[ActionType] = list(requested) if several else [requested]  # type: ignore[list-item]
    for each in types:
        if each not in supported:
            raise ConfigError(f"actions is {each!r}, but this world takes {' or '.join(supported)}.")
    if not types or len({"keys" if each == "key" else each for each in types}) < len(types):
        raise ConfigError(f"actions is {types}; name each type once, of {', '.join(supported)}.")
    return tuple(types) if several else types[0]


def action_space(action_types: ActionTypes, config: ActionConfig) -> spaces.Space:
    """Return the space of one or several action types; the model accepts every sample.

    With several actions in a round, it is the batched space of so many.
    """
    space = _space(action_types, config)
    return space if config.per_round == 1 else batch_space(space, config.per_round)


def _space(action_types: ActionTypes, config: ActionConfig) -> spaces.Space:
    if isinstance(action_types, tuple):
        return spaces.Dict({each: _space(each, config) for each in action_types})
    if action_types == "keys":
        return spaces.MultiBinary(len(config.keys))
    if action_types == "key":
        return spaces.Discrete(len(config.keys))
    if action_types == "vector":
        shape = (config.vector_size,)
        low, high = (
            np.float32(np.broadcast_to(bound, shape))
            for bound in (config.vector_low or -1, config.vector_high or 1)
        )
        return spaces.Box(low, high, shape, np.float32)
    if action_types in ("mouse", "camera"):
        return spaces.Box(-1, 1, (2 if action_types == "mouse" else CAMERA_SIZE,), np.float32)
    # One character is at most one token, and some tokenizers prepend a space.
    length = max(1, config.max_text_tokens - 1)
    return spaces.Text(max_length=length, min_length=0, charset=CHARACTERS)


def to_action(action_types: ActionTypes, value: Any, config: ActionConfig) -> Action:
    """Convert an element of the action space.

    A blank text, and keys of which none is pressed, are the null action. Texts may be longer than the space
    allows, up to the model's own limit.

    Raises:
        InputError: the value is not in the action space.
    """
    if config.per_round == 1:
        return _to_action(action_types, value, config)
    chunk = split_actions(value)
    if len(chunk) != config.per_round:
        raise InputError(
            f"An action of this environment is {config.per_round} actions, those of a round in order, not "
            f"{describe_value(value)}."
        )
    return Action(chunk=tuple(_to_action(action_types, each, config) for each in chunk))


def _to_action(action_types: ActionTypes, value: Any, config: ActionConfig) -> Action:
    if not isinstance(action_types, tuple):
        return Action(**_fields(action_types, value, config))
    if not isinstance(value, Mapping) or set(value) != set(action_types):
        raise InputError(
            f"An action of this environment is a mapping of {', '.join(action_types)}, not "
            f"{describe_value(value)}."
        )
    parts: dict[str, Any] = {}
    for each in action_types:
        parts |= _fields(each, value[each], config)
    return Action(**parts)


def _fields(action_type: ActionType, value: Any, config: ActionConfig) -> dict[str, Any]:
    """Return the fields of `Action` that one type sets."""
    if action_type == "text":
        if not isinstance(value, str):
            raise InputError(f"An action of this environment is a sentence, not {describe_value(value)}.")
        return {"text": value.strip() or None}
    try:
        numbers = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        numbers = np.empty((0, 0))
    if action_type == "keys":
        if numbers.shape != (len(config.keys),) or not np.isin(numbers, (0, 1)).all():
            raise InputError(
                f"An action of this environment is {len(config.keys)} zeros and ones, one for each key "
                f"({', '.join(config.keys)}), not {describe_value(value)}."
            )
        return {"keys": tuple(key for key, on in zip(config.keys, numbers, strict=True) if on)}
    if action_type == "key":
        if numbers.shape != () or float(numbers) not in range(len(config.keys)):
            raise InputError(
                f"An action of this environment is a number from 0 to {len(config.keys) - 1}, that of a key "
                f"({', '.join(config.keys)}), not {describe_value(value)}."
            )
        return {"keys": (config.keys[int(numbers)],)}
    size = {"vector": config.vector_size, "mouse": 2, "camera": CAMERA_SIZE}[action_type]
    if numbers.shape != (size,) or not np.isfinite(numbers).all():
        raise InputError(
            f"An action of this environment is {size} finite numbers, not {describe_value(value)}."
        )
    if action_type == "camera":
        return {"camera": Camera("velocity", _motion(numbers))}
    return {action_type: tuple(numbers.tolist())}


def _motion(numbers: np.ndarray) -> Pose:
    """Return the motion of a translation `[3]` and a rotation `[3]`: its axis times its angle."""
    half = numbers[3:] / 2
    angle = float(np.linalg.norm(half))
    # sin(angle) / angle, which is 1 at an angle of 0; numpy's sinc has a pi inside.
    axis = half * np.sinc(angle / np.pi)
    return Pose(tuple(numbers[:3].tolist()), (*axis.tolist(), float(np.cos(angle))))


def split_actions(actions: Any) -> list[Any]:
    """Split a batch of actions (a sequence, or a mapping of sequences): one per world, or those of a round.

    Values of any other type give an empty list.
    """
    if isinstance(actions, Mapping):
        try:
            rows = zip(*map(list, actions.values()), strict=True)
            return [dict(zip(actions, row, strict=True)) for row in rows]
        except (TypeError, ValueError):
            return []
    return [] if isinstance(actions, str) or not isinstance(actions, Iterable) else list(actions)


def parse_action_schema(schema: Mapping[str, Any]) -> ActionConfig:
    """Parse the action schema that a server publishes for a model; unknown fields are ignored.

    Raises:
        ConfigError: a field has an invalid value.
    """
    known = {field.name for field in fields(ActionConfig)}
    return build_config(ActionConfig, {name: value for name, value in schema.items() if name in known})


def describe_value(value: Any) -> str:
    """Return a short form of a value for an error message."""
    if isinstance(value, np.ndarray) and value.size > 32:
        return f"an array of shape {value.shape}"
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"
