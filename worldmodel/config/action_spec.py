"""The meaning of each number of an action: what a user, a dataset and a model must agree on."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from worldmodel.config.literals import check_literals
from worldmodel.errors import ConfigError


@dataclass(frozen=True)
class ActionSpec:
    """One number of an action, or one key."""

    name: str = ""
    """Name of the number or key."""
    kind: Literal["key", "vector", "mouse"] = "vector"
    """Part of an action that it belongs to: a key is 1 while it is held; a mouse has two numbers."""
    unit: str = ""
    """Unit of the number times `scale`, such as rad, m/s or deg; empty: none is known."""
    scale: float = 1.0
    """Size of 1 in `unit`: a mouse that counts fifteenths of a degree has 0.0667 deg."""
    low: float | None = None
    """Least value; None: there is no bound."""
    high: float | None = None
    """Greatest value."""
    rate: float = 0.0
    """Actions per second; 0: unknown."""
    frame: str = ""
    """Frame of reference, such as joint, body, world or image; empty: none is known."""

    def __post_init__(self) -> None:
        check_literals(self)
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        if not self.name or not all(map(math.isfinite, [self.scale, self.rate, *bounds])):
            raise ConfigError(f"The action spec {self} has no name or a number that is not finite.")
        if (self.low is None) != (self.high is None) or (len(bounds) == 2 and not bounds[0] < bounds[1]):
            raise ConfigError(
                f"The action {self.name} goes from {self.low} to {self.high}; give a low below its high, or "
                "neither."
            )

    @property
    def field(self) -> str:
        """Field of `Action` that it belongs to."""
        return "keys" if self.kind == "key" else self.kind

    @classmethod
    def of(cls, value: Any) -> "ActionSpec":
        """Build a spec from the JSON form that `as_dict` returns.

        Raises:
            ConfigError: it has another form.
        """
        known = {field.name for field in fields(cls)}
        if not isinstance(value, dict) or not set(value) <= known:
            raise ConfigError(f"An action spec is {value!r}; use a mapping of {', '.join(sorted(known))}.")
        try:
            return cls(**value)
        except TypeError as error:
            raise ConfigError(f"The action spec {value!r} cannot be read: {error}.") from None

    def as_dict(self) -> dict[str, Any]:
        """Return the spec as plain values."""
        return asdict(self)


def spec_settings(specs: tuple[ActionSpec, ...]) -> dict[str, Any]:
    """Return the settings of `model.action` with which a model takes actions of these specs."""
    keys = [spec.name for spec in specs if spec.kind == "key"]
    vector = [spec for spec in specs if spec.kind == "vector"]
    settings: dict[str, Any] = {"spec": [spec.as_dict() for spec in specs]} if specs else {}
    settings |= {"keys": keys} if keys else {}
    if vector:
        settings |= {"vector_size": len(vector), "vector_names": [spec.name for spec in vector]}
        if all(spec.low is not None for spec in vector):
            settings |= {
                "vector_low": [spec.low for spec in vector],
                "vector_high": [spec.high for spec in vector],
            }
    if any(spec.kind == "mouse" for spec in specs):
        settings["mouse"] = True
    return settings
