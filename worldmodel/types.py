"""What passes between the parts, and the legend of axis letters.

Axes, the same letter everywhere: `b` batch, `r` rounds, `t` frames, `c` channels, `h w` pixels or latent
cells, `n` tokens, `d` width, `k` heads, `a` action width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from worldmodel.errors import InputError

DESCRIBE = "describe"
"""Prompt that asks for a description of what is seen."""
WHAT_HAPPENED = "what happened"
"""Prompt that asks which action led from the first observation to the second."""


@dataclass(frozen=True)
class Action:
    """What the user does in one round: words, keys, a continuous vector, or any of them together.

    All empty is the null action: time passes.
    """

    text: str | None = None
    keys: tuple[str, ...] = ()
    vector: tuple[float, ...] | None = None

    @classmethod
    def of(cls, value: "str | Action | Mapping[str, Any] | None") -> "Action":
        """Read an action as users write it: a sentence, `{"keys": ["red", "left"]}`, or None.

        Raises:
            InputError: the value is none of these, or an empty sentence.
        """
        if value is None:
            return cls()
        if isinstance(value, Action):
            return value
        if isinstance(value, str):
            if not value.strip():
                raise InputError("The action is an empty text; say what should happen, or pass None to wait.")
            return cls(text=value.strip())
        if isinstance(value, Mapping):
            return cls._from_mapping(value)
        raise InputError(f"An action is a text, a mapping or None, not {type(value).__name__}.")

    @classmethod
    def _from_mapping(cls, value: Mapping[str, Any]) -> "Action":
        unknown = sorted(map(str, set(value) - {"text", "keys", "vector"}))
        if unknown:
            raise InputError(f"An action has no field {unknown[0]!r}; use text, keys or vector.")
        text, keys, vector = value.get("text"), value.get("keys"), value.get("vector")
        if text is not None and not isinstance(text, str):
            raise InputError(f"The text of an action is {text!r}; pass a sentence.")
        keys = () if keys is None else (keys,) if isinstance(keys, str) else keys
        if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
            raise InputError(f"The keys of an action are {keys!r}; pass a list of names.")
        try:
            numbers = None if vector is None else tuple(float(x) for x in vector)
        except (TypeError, ValueError, OverflowError):
            raise InputError(f"The vector of an action is {vector!r}; pass a list of numbers.") from None
        return cls((text or "").strip() or None, tuple(keys), numbers)

    def __str__(self) -> str:
        parts = [self.text or "", "+".join(self.keys), "" if self.vector is None else str(list(self.vector))]
        return " ".join(part for part in parts if part) or "(wait)"


@dataclass(frozen=True)
class Episode:
    """One training sample: observations with the actions between them, and a text to say about them.

    `observations` are uint8 clips `[t, h, w, 3]`; `actions[i]` leads from observation i to i + 1. An empty
    first clip (t = 0) stands for "nothing seen yet". `prompt` and `answer` ask for text about the
    observations. `labels` holds extra per-cell truth a source may know (see data/sources.py).
    """

    name: str
    observations: tuple[np.ndarray, ...] = ()
    actions: tuple[Action, ...] = ()
    prompt: str | None = None
    answer: str | None = None
    labels: Mapping[str, np.ndarray] | None = None
