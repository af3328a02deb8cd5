"""Vectors of numbers, such as the joints of a robot.

A value has a number, or None, for each element that a model takes: data of a world without an element, beside
data of worlds that have it, has None there. It enters a model as 0, which a linear layer neither sees nor
learns from: that is also what 0, or the middle of the element's bounds, enters as.
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

from worldmodel.actions.kind import Embedding, Numbers, NumbersKind
from worldmodel.actions.numbers import NumberSpec
from worldmodel.errors import ConfigError, InputError, did_you_mean

ABSENT = "-"
"""What stands in words for a number that is absent."""
Vector = tuple[float | None, ...]


@dataclass(frozen=True)
class VectorSettings:
    """What a model takes of vectors."""

    size: int
    """Length of the vector."""
    names: tuple[str, ...] = ()
    """Name of each element, for users and messages; may be left empty."""
    low: tuple[float, ...] = ()
    """Minimum of each element; with bounds, the model gets the elements scaled to [-1, 1]."""
    high: tuple[float, ...] = ()
    """Maximum of each element."""

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            raise ConfigError(f"model.action.vector.size is {self.size!r}; use a number, 1 or more.")
        for name, type_ in (("names", str), ("low", int | float), ("high", int | float)):
            entries = getattr(self, name)
            if not isinstance(entries, list | tuple) or not all(isinstance(each, type_) for each in entries):
                words = "names" if type_ is str else "numbers"
                raise ConfigError(
                    f"model.action.vector.{name} is {reprlib.repr(entries)}; use a list of {words}."
                )
            object.__setattr__(self, name, tuple(entries if type_ is str else map(float, entries)))
            if len(entries) not in (0, self.size):
                raise ConfigError(
                    f"model.action.vector.{name} has {len(entries)} entries; use one for each of the "
                    f"{self.size} numbers of the vector (size), or none."
                )
        if len(self.low) != len(self.high) or not all(
            -math.inf < a < b < math.inf for a, b in zip(self.low, self.high, strict=True)
        ):
            raise ConfigError(
                f"model.action.vector.low is {list(self.low)} and high {list(self.high)}; give both, each "
                "low below its high."
            )


class VectorKind(NumbersKind):
    """A number, or None, for each element of the vector, between its bounds if it has any."""

    name = "vector"
    setting = (
        "{size: N, names: [...], low: [...], high: [...]} for vectors of N numbers; all but size may be left "
        "out. With bounds, the model gets the numbers scaled to -1 to 1."
    )
    spec_kind = "vector"

    def configure(self, setting: Any) -> VectorSettings | None:
        if setting is None or setting is False or isinstance(setting, VectorSettings):
            return setting or None
        if isinstance(setting, int) and not isinstance(setting, bool):
            return VectorSettings(setting) if setting else None
        if not isinstance(setting, Mapping):
            raise ConfigError(
                f"model.action.vector is {reprlib.repr(setting)}; use the number of its elements, or a "
                "mapping of size, names, low and high."
            )
        known = [field.name for field in fields(VectorSettings)]
        for name in setting:
            if name not in known:
                raise ConfigError(
                    f"model.action.vector.{name} is not a setting{did_you_mean(name, known)}; use one of "
                    f"{', '.join(known)}."
                )
        given: dict[str, Any] = {name: () if each is None else each for name, each in setting.items()}
        if "size" not in given:  # as many as there are names or bounds
            given["size"] = max(
                (len(each) for each in given.values() if isinstance(each, list | tuple)), default=0
            )
        return VectorSettings(**given)

    def setting_of(self, settings: VectorSettings) -> Any:
        given = {name: list(each) for name, each in asdict(settings).items() if name != "size" and each}
        return {"size": settings.size, **given}

    def describe(self, settings: VectorSettings) -> str:
        names = list(settings.names)
        if settings.low:
            names = names or [str(index + 1) for index in range(settings.size)]
            bounds = zip(names, settings.low, settings.high, strict=True)
            names = [f"{name} ({low:g} to {high:g})" for name, low, high in bounds]
        return f"{settings.size} numbers" + (f": {', '.join(names)}" if names else "")

    def size(self, settings: VectorSettings) -> int:
        return settings.size

    def bounds(self, settings: VectorSettings) -> tuple[Sequence[float], Sequence[float]]:
        return settings.low, settings.high

    def number_names(self, settings: VectorSettings) -> Sequence[str]:
        return settings.names

    def parse(self, value: Any) -> Any:
        if not isinstance(value, list | tuple) or all(x is not None for x in value):
            return super().parse(value)
        numbers = iter(super().parse([x for x in value if x is not None] or None) or ())
        return tuple(None if x is None else next(numbers) for x in value)

    def check(self, value: Vector, settings: VectorSettings) -> None:
        low = settings.low or (0.0,) * len(value)
        given = [x if x is not None else low[min(i, len(low) - 1)] for i, x in enumerate(value)]
        super().check(given, settings)

    def arranged(self, value: Vector, names: Sequence[str], settings: VectorSettings) -> Vector:
        """Return the numbers of these names in the order of the model's; None for those that are absent."""
        if len(value) != len(names):
            raise InputError(f"its vector has {len(value)} numbers, and there are {len(names)} names of them")
        given = dict(zip(names, value, strict=True))
        return tuple(given.get(name) for name in settings.names)

    def label(self, value: Vector) -> str:
        return f"[{', '.join(ABSENT if x is None else f'{x:.4g}' for x in value)}]"

    def say(self, value: Vector) -> str:
        return " ".join(ABSENT if x is None else f"{x:.3g}" for x in value)

    def understand(self, words: str, settings: VectorSettings) -> Vector | None:
        spoken = words.replace(",", " ").split()
        numbers = super().understand(" ".join("0" if word == ABSENT else word for word in spoken), settings)
        if numbers is None:
            return None
        return tuple(None if word == ABSENT else x for word, x in zip(spoken, numbers, strict=True))

    def numbers(self, value: Vector | None, specs: Sequence[NumberSpec]) -> list[float]:
        return super().numbers(tuple(x or 0.0 for x in value or ()), specs)

    def vector_of(self, value: Vector) -> Sequence[float]:
        return [x or 0.0 for x in value]

    def parse_cell(self, cell: Any) -> Any:
        """Parse a list of numbers; one number of a csv file is text."""
        if isinstance(cell, str | int | float):
            with suppress(ValueError):
                cell = [float(cell)]
        return self.parse(cell)

    def setting_of_specs(self, specs: Sequence[NumberSpec]) -> dict[str, Any]:
        found: dict[str, Any] = {"size": len(specs), "names": [spec.name for spec in specs]}
        if all(spec.low is not None for spec in specs):
            found |= {"low": [spec.low for spec in specs], "high": [spec.high for spec in specs]}
        return found

    def setting_of_values(self, values: Sequence[tuple[float, ...]]) -> dict[str, Any]:
        return {"size": len(values[0])}

    def check_specs(self, key: str, specs: Sequence[NumberSpec], settings: VectorSettings) -> None:
        """Check that the model has these elements, by name, or as many if its have no names."""
        names = [spec.name for spec in specs]
        if not settings.names and len(names) != settings.size:
            raise ConfigError(
                f"{key} has vectors of {', '.join(names)}; set model.action.vector to "
                f"{{size: {len(names)}, names: [{', '.join(names)}]}}."
            )
        unknown = [name for name in names if settings.names and name not in settings.names]
        if unknown:
            raise ConfigError(
                f"{key} has vectors with {', '.join(unknown)}, and the model knows "
                f"{', '.join(settings.names)}; add the new names to model.action.vector, or give the "
                f"numbers other names in {key}.numbers, with '' for those to leave out."
            )
        if settings.names and len({*names}) < len(names) and [*names] != [*settings.names]:
            raise ConfigError(f"{key} has two numbers of one name among {', '.join(names)}; rename them.")

    def effects(self, value: Any, specs: Sequence[NumberSpec]) -> list[str]:
        pairs = zip(specs, value or (), strict=False)
        return [f"{spec.name} {'above' if x > 0 else 'below'} 0" for spec, x in pairs if x]

    def embedding(self, settings: VectorSettings) -> Embedding:
        return Numbers(settings.size, settings.names, waves=len(settings.low))  # with bounds, they are scaled

    def features(self, value: Vector, settings: VectorSettings) -> Sequence[float]:
        if not settings.low:
            return [0.0 if x is None else x for x in value]
        bounds = zip(value, settings.low, settings.high, strict=True)
        return [0.0 if x is None else 2 * (x - low) / (high - low) - 1 for x, low, high in bounds]
