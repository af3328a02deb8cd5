"""Keys that are held: any of the names that a model knows."""

import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from worldmodel.actions.kind import ActionKind, Embedding, Rows, as_array, describe_value
from worldmodel.actions.numbers import NumberSpec
from worldmodel.errors import ConfigError, InputError, did_you_mean

if TYPE_CHECKING:
    from gymnasium import spaces


class KeysKind(ActionKind):
    """Names of keys, each at most once."""

    name = "keys"
    setting = "names of the keys that the model takes; empty for none."
    untaken = ()
    spec_kind = "key"
    schema = {"type": "array", "items": {"type": "string", "maxLength": 64}, "maxItems": 16}  # noqa: RUF012
    merge = "union"

    def configure(self, setting: Any) -> tuple[str, ...]:
        names = [] if setting is None or setting is False else setting
        if not isinstance(names, list | tuple) or not all(isinstance(key, str) for key in names):
            raise ConfigError(f"model.action.keys is {reprlib.repr(setting)}; use a list of names.")
        if not all(names) or len(set(names)) < len(names):
            raise ConfigError(f"action.keys is {list(names)}; give each key a name of its own.")
        return tuple(names)

    def describe(self, settings: tuple[str, ...]) -> list[str]:
        return list(settings)

    def is_absent(self, value: Any) -> bool:
        return value is None or len(value) == 0

    def parse(self, value: Any) -> tuple[str, ...]:
        keys = () if value is None else (value,) if isinstance(value, str) else value
        if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
            raise InputError(f"The keys of an action are {reprlib.repr(keys)}; pass a list of names.")
        return tuple(keys)

    def check(self, value: tuple[str, ...], settings: tuple[str, ...]) -> None:
        for key in value:
            if key not in settings:
                hint = did_you_mean(key, settings)
                raise InputError(f"This model has no key {key!r}{hint}; use {', '.join(settings)}.")
        if len(set(value)) < len(value):  # each would take a position of the backbone's sequence
            raise InputError(f"The keys {reprlib.repr(value)} name a key twice; name each key once.")

    def label(self, value: tuple[str, ...]) -> str:
        return "+".join(value)

    def example(self, settings: tuple[str, ...]) -> list[str]:
        return [*settings[:1]]

    def argument(self, settings: tuple[str, ...]) -> str:
        return f"keys:{'+'.join(settings[:2])}"

    def understand(self, words: str, settings: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key for key in words.split("+") if key in settings))

    def parse_argument(self, text: str, whole: str) -> tuple[str, ...]:
        keys = tuple(key.strip() for key in text.split("+"))
        if not all(keys):
            raise InputError(f"The action {whole!r} has an empty key name; write it like keys:red+left.")
        return keys

    def parse_cell(self, cell: Any) -> tuple[str, ...]:
        """Parse a list of names, or `left+up`."""
        keys = cell.split("+") if isinstance(cell, str) else cell
        if isinstance(keys, list | tuple):
            keys = [key.strip() if isinstance(key, str) else key for key in keys]
        return self.parse(keys)

    def numbers(self, value: Any, specs: Sequence[NumberSpec]) -> list[float]:
        return [float(spec.name in (value or ())) for spec in specs]

    def of_numbers(self, specs: Sequence[NumberSpec], numbers: Sequence[float]) -> tuple[str, ...]:
        return tuple(spec.name for spec, number in zip(specs, numbers, strict=True) if number > 0.5)

    def fits(self, value: Any, specs: Sequence[NumberSpec]) -> bool:
        return set(value or ()) <= {spec.name for spec in specs}

    def setting_of_specs(self, specs: Sequence[NumberSpec]) -> list[str]:
        return [spec.name for spec in specs]

    def setting_of_values(self, values: Sequence[tuple[str, ...]]) -> list[str]:
        return sorted({key for held in values for key in held})

    def check_specs(self, key: str, specs: Sequence[NumberSpec], settings: tuple[str, ...]) -> None:
        names = [spec.name for spec in specs]
        if missing := sorted(set(names) - set(settings)):
            raise ConfigError(
                f"{key} has the keys {', '.join(missing)}, which the model does not take; set "
                f"model.action.keys to [{', '.join(names)}]."
            )

    def effects(self, value: Any, specs: Sequence[NumberSpec]) -> list[str]:
        return ["+".join(value or ()) or "(no key)"] if specs else []

    def is_unseen(self, numbers: np.ndarray) -> bool:
        return not numbers.any()

    def spaces(self, settings: tuple[str, ...]) -> "dict[str, spaces.Space]":
        """Return any of the keys (`keys`), or exactly one of them (`key`)."""
        from gymnasium import spaces

        return {"keys": spaces.MultiBinary(len(settings)), "key": spaces.Discrete(len(settings))}

    def of_element(self, space: str, element: Any, settings: tuple[str, ...]) -> tuple[str, ...]:
        numbers = as_array(element)
        if space == "keys":
            if numbers.shape != (len(settings),) or not np.isin(numbers, (0, 1)).all():
                raise InputError(
                    f"An action of this environment is {len(settings)} zeros and ones, one for each key "
                    f"({', '.join(settings)}), not {describe_value(element)}."
                )
            return tuple(key for key, on in zip(settings, numbers, strict=True) if on)
        if numbers.shape != () or float(numbers) not in range(len(settings)):
            raise InputError(
                f"An action of this environment is a number from 0 to {len(settings) - 1}, that of a key "
                f"({', '.join(settings)}), not {describe_value(element)}."
            )
        return (settings[int(numbers)],)

    def embedding(self, settings: tuple[str, ...]) -> Embedding:
        return Rows(settings)

    def features(self, value: tuple[str, ...], settings: tuple[str, ...]) -> Sequence[float]:
        return [settings.index(key) for key in value]

    def names_of(self, value: tuple[str, ...]) -> Sequence[str]:
        return [f"key {key}" for key in value]

    def widget(self, settings: tuple[str, ...]) -> dict[str, Any]:
        return {"type": "keys", "names": list(settings)}
