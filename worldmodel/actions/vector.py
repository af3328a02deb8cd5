"""Vectors of numbers, such as the joints of a robot."""

import math
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

from worldmodel.actions.kind import NumbersKind
from worldmodel.actions.numbers import NumberSpec
from worldmodel.errors import ConfigError, did_you_mean


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
    """A number for each element of the vector, between its bounds if it has any."""

    name = "vector"
    setting = (
        "{size: N, names: [...], low: [...], high: [...]} for vectors of N numbers; all but size may be left "
        "out. With bounds, the model gets the numbers scaled to -1 to 1."
    )
    spec_kind = "vector"

    def configure(self, setting: Any) -> VectorSettings | None:
        """Parse a mapping of `VectorSettings`, or a size alone."""
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
        """Return the size, or all that is set."""
        given = {name: list(each) for name, each in asdict(settings).items() if name != "size" and each}
        return {"size": settings.size, **given}

    def describe(self, settings: VectorSettings) -> str:
        """Return the number of elements, and their names and bounds."""
        names = list(settings.names)
        if settings.low:
            names = names or [str(index + 1) for index in range(settings.size)]
            bounds = zip(names, settings.low, settings.high, strict=True)
            names = [f"{name} ({low:g} to {high:g})" for name, low, high in bounds]
        return f"{settings.size} numbers" + (f": {', '.join(names)}" if names else "")

    def size(self, settings: VectorSettings) -> int:
        """Return the length of the vector."""
        return settings.size

    def bounds(self, settings: VectorSettings) -> tuple[Sequence[float], Sequence[float]]:
        """Return the bounds of the elements."""
        return settings.low, settings.high

    def number_names(self, settings: VectorSettings) -> Sequence[str]:
        """Return the names of the elements."""
        return settings.names

    def label(self, value: tuple[float, ...]) -> str:
        """Return the numbers in brackets."""
        return f"[{', '.join(f'{x:.4g}' for x in value)}]"

    def parse_cell(self, cell: Any) -> Any:
        """Parse a list of numbers; one number of a csv file is text."""
        if isinstance(cell, str | int | float):
            with suppress(ValueError):
                cell = [float(cell)]
        return self.parse(cell)

    def setting_of_specs(self, specs: Sequence[NumberSpec]) -> dict[str, Any]:
        """Return the names and bounds of the specs."""
        found: dict[str, Any] = {"size": len(specs), "names": [spec.name for spec in specs]}
        if all(spec.low is not None for spec in specs):
            found |= {"low": [spec.low for spec in specs], "high": [spec.high for spec in specs]}
        return found

    def setting_of_values(self, values: Sequence[tuple[float, ...]]) -> dict[str, Any]:
        """Return the length of the first vector."""
        return {"size": len(values[0])}

    def check_specs(self, key: str, specs: Sequence[NumberSpec], settings: VectorSettings) -> None:
        """Check that the model has the same elements."""
        names = [spec.name for spec in specs]
        if len(names) != settings.size or (settings.names and names != list(settings.names)):
            raise ConfigError(
                f"{key} has vectors of {', '.join(names)}; set model.action.vector to "
                f"{{size: {len(names)}, names: [{', '.join(names)}]}}."
            )

    def effects(self, value: Any, specs: Sequence[NumberSpec]) -> list[str]:
        """Return the signs of the numbers that are not 0."""
        pairs = zip(specs, value or (), strict=False)
        return [f"{spec.name} {'above' if x > 0 else 'below'} 0" for spec, x in pairs if x]

    def features(self, value: tuple[float, ...], settings: VectorSettings) -> Sequence[float]:
        """Return the numbers, scaled from their bounds, if there are any, to [-1, 1]."""
        if not settings.low:
            return value
        bounds = zip(value, settings.low, settings.high, strict=True)
        return [2 * (x - low) / (high - low) - 1 for x, low, high in bounds]
