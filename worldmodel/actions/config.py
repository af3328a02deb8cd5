"""The settings `model.action`: which kinds of action a model takes."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worldmodel.actions.registry import action_kind, action_kinds
from worldmodel.actions.spec import ActionSpec
from worldmodel.errors import ConfigError, did_you_mean


@dataclass(frozen=True, init=False)
class ActionConfig:
    """The kinds of action that the model takes, in any combination.

    Each kind has a setting of its name, whose values the kind defines (`ActionKind.configure`), and an
    attribute with what is parsed from it: `ActionConfig(keys=["left"], vector={"size": 2}).vector.size`.
    """

    kinds: dict[str, Any]
    """Parsed settings of the kinds that the model takes, by name."""
    per_round: int = 1
    """Number of actions in a round, one after the other: 1, `chunk_frames` for one per frame, or another
    divisor of it."""
    dropout: float = 0.0
    """Share of actions that are replaced by the null action in training, 0 to below 1."""
    spec: tuple[ActionSpec, ...] = ()
    """Name, unit, scale, range, rate and frame of the keys and numbers; taken from the training data that
    state them, and checked against all that do."""

    def __init__(
        self,
        *,
        kinds: Mapping[str, Any] | None = None,
        per_round: int = 1,
        dropout: float = 0.0,
        spec: Sequence[ActionSpec | Mapping[str, Any]] = (),
        **settings: Any,
    ) -> None:
        """Parse the settings; with `kinds`, as in `dataclasses.replace`, others keep what they have there.

        Raises:
            ConfigError: there is no such setting, or one has a wrong value.
        """
        known = action_kinds()
        options = [kind.name for kind in known] + ["per_round", "dropout", "spec"]
        for name in settings:
            if name not in options:
                raise ConfigError(
                    f"model.action.{name} is not a setting{did_you_mean(name, options)}; use one of "
                    f"{', '.join(options)}."
                )
        taken: dict[str, Any] = {}
        for kind in known:
            default = kind.default if kinds is None else kinds.get(kind.name)
            parsed = kind.configure(settings.get(kind.name, default))
            if parsed:
                taken[kind.name] = parsed
        object.__setattr__(self, "kinds", taken)
        object.__setattr__(self, "per_round", per_round)
        object.__setattr__(self, "dropout", dropout)
        specs = (each if isinstance(each, ActionSpec) else ActionSpec.of(dict(each)) for each in spec)
        object.__setattr__(self, "spec", tuple(specs))
        if not isinstance(per_round, int) or isinstance(per_round, bool) or per_round < 1:
            raise ConfigError(f"action.per_round is {per_round!r}; use 1 or more.")
        if not isinstance(dropout, int | float) or isinstance(dropout, bool) or not 0 <= dropout < 1:
            raise ConfigError(f"action has dropout {dropout!r}; use 0 to below 1.")

    @classmethod
    def of(cls, value: Any) -> "ActionConfig":
        """Parse the mapping that `as_dict` returns.

        Raises:
            ConfigError: it has another form.
        """
        if isinstance(value, ActionConfig):
            return value
        if not isinstance(value, Mapping) or "kinds" in value:
            raise ConfigError(f"model.action is {reprlib.repr(value)}; use a mapping of kinds of action.")
        return cls(**value)

    def __getattr__(self, name: str) -> Any:
        """Return the parsed settings of a kind; what is false if the model does not take it."""
        if not name.startswith("_") and "kinds" in vars(self):
            try:
                return self.kinds.get(name, action_kind(name).untaken)
            except KeyError:
                pass
        raise AttributeError(f"there is no kind of action {name!r}")

    def __hash__(self) -> int:
        return hash((*self.kinds.items(), self.per_round, self.dropout, self.spec))

    @property
    def takes(self) -> dict[str, bool]:
        """Whether the model takes each kind of action, by its name."""
        return {kind.name: kind.name in self.kinds for kind in action_kinds()}

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the kinds that the model takes, as plain values."""
        return {name: action_kind(name).setting_of(settings) for name, settings in self.kinds.items()}

    @property
    def widgets(self) -> dict[str, dict[str, Any]]:
        """Widget of each of these kinds for pages, and how it combines values that are held at once."""
        found = {}
        for name, settings in self.kinds.items():
            kind = action_kind(name)
            found[name] = {"merge": kind.merge, **kind.widget(settings)}
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, from which `of` builds an equal config."""
        plain: dict[str, Any] = {}
        for kind in action_kinds():
            if kind.name in self.kinds:
                plain[kind.name] = kind.setting_of(self.kinds[kind.name])
            elif kind.default:
                plain[kind.name] = False
        specs = [spec.as_dict() for spec in self.spec]
        return plain | {"per_round": self.per_round, "dropout": self.dropout, "spec": specs}
