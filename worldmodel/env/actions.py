"""What an agent does: elements of a gymnasium space, read as actions of a world."""

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, get_args

import numpy as np
from gymnasium import spaces

from worldmodel.config import ActionConfig
from worldmodel.config import build as build_config
from worldmodel.errors import ConfigError, InputError
from worldmodel.types import Action, Camera, Pose

Kind = Literal["keys", "vector", "mouse", "camera", "text"]
"""What an action of an environment is made of; the first that the model takes is the default."""
Kinds = Kind | tuple[Kind, ...]
"""One kind, or several that are done together."""
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " "
CAMERA_SIZE = 6
"""Numbers of a camera's action: translation x, y, z, and rotation as axis times angle (radians)."""


def choose_kind(kind: Kind | Sequence[Kind] | None, config: ActionConfig) -> Kinds:
    """Return the kind or kinds that are asked for, or the first that the model takes.

    Raises:
        ConfigError: the model does not take actions of this kind.
    """
    taken: list[Kind] = [name for name in get_args(Kind) if config.takes[name]]
    if not taken:
        raise ConfigError(
            "This world takes no actions; give its model keys, a vector, a mouse, a camera or text in "
            "config.action."
        )
    several = isinstance(kind, tuple | list)
    asked: list[Kind] = list(kind) if several else taken[:1] if kind is None else [kind]  # type: ignore[list-item]
    for each in asked:
        if each not in taken:
            raise ConfigError(
                f"actions is {each!r}, which this world does not take; use {' or '.join(taken)}."
            )
    if not asked or len(set(asked)) < len(asked):
        raise ConfigError(f"actions is {asked}; name each kind once, of {', '.join(taken)}.")
    return tuple(asked) if several else asked[0]


def action_space(kind: Kinds, config: ActionConfig) -> spaces.Space:
    """Return the space of a kind of action, or of several; the model takes whatever is sampled from it."""
    if isinstance(kind, tuple):
        return spaces.Dict({each: action_space(each, config) for each in kind})
    if kind == "keys":
        return spaces.MultiBinary(len(config.keys))
    if kind == "vector":
        shape = (config.vector_size,)
        low, high = (
            np.float32(np.broadcast_to(bound, shape))
            for bound in (config.vector_low or -1, config.vector_high or 1)
        )
        return spaces.Box(low, high, shape, np.float32)
    if kind in ("mouse", "camera"):
        return spaces.Box(-1, 1, (2 if kind == "mouse" else CAMERA_SIZE,), np.float32)
    # One character is at most one token, and some tokenizers put a blank in front.
    length = max(1, config.max_text_tokens - 1)
    return spaces.Text(max_length=length, min_length=0, charset=CHARACTERS)


def read_action(kind: Kinds, value: Any, config: ActionConfig) -> Action:
    """Turn an element of the action space into an action.

    A blank text and an array without a pressed key let time pass. Sentences longer than the space's are
    welcome as long as the model takes them.

    Raises:
        InputError: the value is no such element.
    """
    if not isinstance(kind, tuple):
        return Action(**_read(kind, value, config))
    if not isinstance(value, Mapping) or set(value) != set(kind):
        raise InputError(
            f"An action of this environment is a mapping of {', '.join(kind)}, not {tell(value)}."
        )
    parts: dict[str, Any] = {}
    for each in kind:
        parts |= _read(each, value[each], config)
    return Action(**parts)


def _read(kind: Kind, value: Any, config: ActionConfig) -> dict[str, Any]:
    """Return the fields of an action that one kind fills."""
    if kind == "text":
        if not isinstance(value, str):
            raise InputError(f"An action of this environment is a sentence, not {tell(value)}.")
        return {"text": value.strip() or None}
    try:
        numbers = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        numbers = np.empty((0, 0))
    if kind == "keys":
        if numbers.shape != (len(config.keys),) or not np.isin(numbers, (0, 1)).all():
            raise InputError(
                f"An action of this environment is {len(config.keys)} zeros and ones, one for each key "
                f"({', '.join(config.keys)}), not {tell(value)}."
            )
        return {"keys": tuple(key for key, on in zip(config.keys, numbers, strict=True) if on)}
    size = {"vector": config.vector_size, "mouse": 2, "camera": CAMERA_SIZE}[kind]
    if numbers.shape != (size,) or not np.isfinite(numbers).all():
        raise InputError(f"An action of this environment is {size} finite numbers, not {tell(value)}.")
    if kind == "camera":
        return {"camera": Camera("velocity", _motion(numbers))}
    return {kind: tuple(numbers.tolist())}


def _motion(numbers: np.ndarray) -> Pose:
    """Return the motion of a translation `[3]` and a rotation `[3]`: its axis times its angle."""
    half = numbers[3:] / 2
    angle = float(np.linalg.norm(half))
    # sin(angle) / angle, which is 1 at an angle of 0; numpy's sinc has a pi inside.
    axis = half * np.sinc(angle / np.pi)
    return Pose(tuple(numbers[:3].tolist()), (*axis.tolist(), float(np.cos(angle))))


def each_action(actions: Any) -> list[Any]:
    """Return every world's action: from a list, or from a mapping of lists where several kinds go together.

    What is neither has no actions.
    """
    if isinstance(actions, Mapping):
        try:
            rows = zip(*map(list, actions.values()), strict=True)
            return [dict(zip(actions, row, strict=True)) for row in rows]
        except (TypeError, ValueError):
            return []
    return [] if isinstance(actions, str) or not isinstance(actions, Iterable) else list(actions)


def read_schema(schema: Mapping[str, Any]) -> ActionConfig:
    """Read which actions a model takes from what a server says of it.

    Raises:
        ConfigError: it is no such schema.
    """
    known = {field.name for field in fields(ActionConfig)}
    return build_config(ActionConfig, {name: value for name, value in schema.items() if name in known})


def tell(value: Any) -> str:
    """Say in an error what was passed."""
    if isinstance(value, np.ndarray) and value.size > 32:
        return f"an array of shape {value.shape}"
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"
