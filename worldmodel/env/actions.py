"""What an agent does: elements of a gymnasium space, read as actions of a world."""

import string
from typing import Any, Literal, get_args

import numpy as np
from gymnasium import spaces

from worldmodel.config import ActionConfig
from worldmodel.errors import ConfigError, InputError
from worldmodel.types import Action

Kind = Literal["keys", "vector", "text"]
"""What an action of an environment is made of; the first that the model takes is the default."""
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " "


def choose_kind(kind: Kind | None, config: ActionConfig) -> Kind:
    """Return the kind that is asked for, or the first that the model takes.

    Raises:
        ConfigError: the model does not take actions of this kind.
    """
    taken = {"keys": bool(config.keys), "vector": bool(config.vector_size), "text": config.text}
    kinds = [name for name in get_args(Kind) if taken[name]]
    if not kinds:
        raise ConfigError(
            "This world takes no actions; give its model keys, a vector or text in config.action."
        )
    if kind is not None and kind not in kinds:
        raise ConfigError(f"actions is {kind!r}, which this world does not take; use {' or '.join(kinds)}.")
    return kind or kinds[0]


def action_space(kind: Kind, config: ActionConfig) -> spaces.Space:
    """Return the space of one kind of action; the model takes whatever is sampled from it."""
    if kind == "keys":
        return spaces.MultiBinary(len(config.keys))
    if kind == "vector":
        return spaces.Box(-1, 1, (config.vector_size,), np.float32)
    # One character is at most one token, and some tokenizers put a blank in front.
    length = max(1, config.max_text_tokens - 1)
    return spaces.Text(max_length=length, min_length=0, charset=CHARACTERS)


def read_action(kind: Kind, value: Any, config: ActionConfig) -> Action:
    """Turn an element of the action space into an action.

    A blank text and an array without a pressed key let time pass. Sentences longer than the space's are
    welcome as long as the model takes them.

    Raises:
        InputError: the value is no such element.
    """
    if kind == "text":
        if not isinstance(value, str):
            raise InputError(f"An action of this environment is a sentence, not {tell(value)}.")
        return Action(text=value.strip() or None)
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
        return Action(keys=tuple(key for key, on in zip(config.keys, numbers, strict=True) if on))
    if numbers.shape != (config.vector_size,) or not np.isfinite(numbers).all():
        raise InputError(
            f"An action of this environment is {config.vector_size} finite numbers, not {tell(value)}."
        )
    return Action(vector=tuple(float(number) for number in numbers))


def tell(value: Any) -> str:
    """Say in an error what was passed."""
    if isinstance(value, np.ndarray) and value.size > 32:
        return f"an array of shape {value.shape}"
    text = repr(value)
    return text if len(text) <= 80 else f"a {type(value).__name__}"
