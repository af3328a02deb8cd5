"""The meaning of each number of an action: what a user, a dataset and a model must agree on."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from worldmodel.actions.registry import action_kinds, kind_of_spec
from worldmodel.errors import ConfigError

if TYPE_CHECKING:
    from worldmodel.actions.kind import ActionKind


@dataclass(frozen=True)
class ActionSpec:
    """One number of an action, or one key."""

    name: str = ""
    """Name of the number or key."""
    kind: str = "vector"
    """`spec_kind` of the kind of action that it belongs to: key (1 while it is held), vector, mouse (two
    numbers), or that of a kind of your own."""
    unit: str = ""
    """Unit of the number times `scale`, such as rad, m/s or deg; empty: none is known."""
    scale: float = 1.0
    """Size of 1 in `unit`: a mouse that counts fifteenths of a degree has 0.0667 deg."""
    low: float | None = None
    """Lowest value; None: unbounded."""
    high: float | None = None
    """Greatest value."""
    rate: float = 0.0
    """Actions per second; 0: unknown."""
    frame: str = ""
    """Frame of reference, such as joint, body, world or image; empty: none is known."""

    def __post_init__(self) -> None:
        kind_of_spec(self.kind)
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
        return kind_of_spec(self.kind).name

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


def indices_by_kind(specs: Sequence[ActionSpec]) -> "list[tuple[ActionKind, list[int]]]":
    """Return the indices of the specs of each kind that has any, in the order of the kinds."""
    found = []
    for kind in action_kinds():
        if indices := [index for index, spec in enumerate(specs) if spec.kind == kind.spec_kind]:
            found.append((kind, indices))
    return found


def specs_by_kind(specs: Sequence[ActionSpec]) -> "list[tuple[ActionKind, list[ActionSpec]]]":
    """Return the specs of each kind that has any, in the order of the kinds."""
    return [(kind, [specs[index] for index in indices]) for kind, indices in indices_by_kind(specs)]


def settings_of_specs(specs: Sequence[ActionSpec]) -> dict[str, Any]:
    """Return the settings of `model.action` with which a model takes actions of these specs."""
    settings: dict[str, Any] = {"spec": [spec.as_dict() for spec in specs]} if specs else {}
    return settings | {kind.name: kind.setting_of_specs(own) for kind, own in specs_by_kind(specs)}
