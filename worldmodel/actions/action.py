"""The action of one round."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from worldmodel.actions.camera import Camera
from worldmodel.actions.config import ActionConfig
from worldmodel.actions.numbers import check_fields
from worldmodel.actions.pose import Pose
from worldmodel.actions.registry import action_kind, action_kinds
from worldmodel.actions.spec import ActionSpec, indices_by_kind
from worldmodel.errors import InputError


@dataclass(frozen=True, init=False, repr=False)
class Action:
    """Action of one round: text, keys, a vector, the mouse, the camera, or several of them.

    `Action("go on", keys=("left",))` has a field for each registered kind of action: `text` (a sentence or
    None), `keys` (names), `vector` and `mouse` (numbers or None), `camera` (a `Camera` or None), and those of
    kinds of your own. Without any of them it is the null action. A model that takes several actions in a
    round (`ActionConfig.per_round`) gets a `chunk` of them, or one that holds for all of the round.
    """

    parts: tuple[tuple[str, Any], ...]
    """Names and values of the kinds that the action has, in the order of the registry."""
    chunk: "tuple[Action, ...]"
    """Instead of the other parts: the actions of the round, in order."""

    def __init__(
        self,
        *values: Any,
        chunk: "Sequence[Action]" = (),
        parts: Sequence[tuple[str, Any]] = (),
        **named: Any,
    ) -> None:
        """Make an action of values by the names of their kinds, or in the order of the registry.

        Raises:
            InputError: it has a chunk beside another part.
            TypeError: there is no such kind, or a value is given twice.
        """
        kinds = action_kinds()
        given = dict(parts)
        if len(values) > len(kinds):
            raise TypeError(f"an action has up to {len(kinds)} values, not {len(values)}")
        for kind, value in zip(kinds, values, strict=False):
            if kind.name in named:
                raise TypeError(f"an action has two values for {kind.name!r}")
            given[kind.name] = value
        given |= named
        found = []
        for kind in kinds:
            value = given.pop(kind.name, None)
            if not kind.is_absent(value):
                found.append((kind.name, value))
        if given:
            raise TypeError(f"there is no kind of action {min(given)!r}")
        object.__setattr__(self, "parts", tuple(found))
        object.__setattr__(self, "chunk", tuple(chunk))
        if self.chunk and (found or any(each.chunk for each in self.chunk)):
            raise InputError(
                "An action with a chunk has another part, or a chunk inside of it; pass one list of actions."
            )

    def __getattr__(self, name: str) -> Any:
        """Return the value of a kind; () for keys and None for others that the action does not have."""
        if not name.startswith("_") and "parts" in vars(self):
            try:
                absent = action_kind(name).parse(None)
            except KeyError:
                raise AttributeError(f"there is no kind of action {name!r}") from None
            return next((value for kind, value in self.parts if kind == name), absent)
        raise AttributeError(name)

    def part(self, name: str) -> Any:
        """Return the value of a kind, or None if the action does not have it."""
        return next((value for kind, value in self.parts if kind == name), None)

    @classmethod
    def of(cls, value: "AnyAction") -> "Action":
        """Parse a text, a mapping such as `{"keys": ["red", "left"]}`, or None for the null action.

        A list of these is a chunk: the actions of one round in order.

        Raises:
            InputError: the value has another type, or the text is empty.
        """
        if value is None:
            return cls()
        if isinstance(value, Action):
            return value
        if isinstance(value, str):
            if not value.strip():
                raise InputError(
                    "The action is an empty text; describe the action, or pass None for the null action."
                )
            return cls(text=value.strip())
        if isinstance(value, Mapping):
            return cls._from_mapping(value)
        if isinstance(value, list | tuple):
            if not value:
                raise InputError("The chunk of an action is empty; list actions, or pass None.")
            return cls(chunk=tuple(map(cls.of, value)))
        raise InputError(
            f"An action is a text, a mapping, a list of them or None, not {type(value).__name__}."
        )

    @classmethod
    def _from_mapping(cls, value: Mapping[str, Any]) -> "Action":
        kinds = action_kinds()
        check_fields("An action", value, (*(kind.name for kind in kinds), "chunk"))
        chunk = value.get("chunk")
        if chunk is not None and not isinstance(chunk, list | tuple):
            raise InputError(f"The chunk of an action is {reprlib.repr(chunk)}; pass a list of actions.")
        given = {kind.name: kind.parse(value.get(kind.name)) for kind in kinds}
        return cls(chunk=() if chunk is None else cls.of(chunk).chunk, **given)

    @classmethod
    def of_numbers(cls, specs: Sequence[ActionSpec], numbers: Sequence[float]) -> "Action":
        """Return the action that numbers stand for, one for each spec; a key above 0.5 is held.

        Raises:
            ValueError: there is not one number for each spec.
        """
        if len(numbers) != len(specs):
            raise ValueError(f"there are {len(numbers)} numbers for {len(specs)} specs")
        given = {}
        for kind, indices in indices_by_kind(specs):
            own = [specs[index] for index in indices]
            given[kind.name] = kind.of_numbers(own, [float(numbers[index]) for index in indices])
        return cls(**given)

    def numbers(self, specs: Sequence[ActionSpec]) -> list[float]:
        """Return the action as one number for each spec, 0 for parts that it does not have."""
        found = [0.0] * len(specs)
        for kind, indices in indices_by_kind(specs):
            own = [specs[index] for index in indices]
            for index, number in zip(indices, kind.numbers(self.part(kind.name), own), strict=True):
                found[index] = number
        return found

    def check(self, takes: ActionConfig) -> None:
        """Check an action against the action config of a model, except for the length of its text.

        Raises:
            InputError: the model does not support a part of the action, or takes another number of actions
                in a round.
        """
        if self.chunk:
            if len(self.chunk) != takes.per_round:
                raise InputError(
                    f"The chunk has {len(self.chunk)} actions, and a round of this model has "
                    f"{takes.per_round}; pass as many, or one for the whole round."
                )
            for each in self.chunk:
                each.check(takes)
            return
        for name, value in self.parts:
            if name not in takes.kinds:
                raise InputError(
                    f"This model takes no {name}; use {', '.join(takes.kinds) or 'the empty action'}."
                )
            action_kind(name).check(value, takes.kinds[name])

    def of_round(self, count: int) -> "Action":
        """Return the same action as a chunk of `count` actions; of 1, without a chunk."""
        if count > 1:
            return self if self.chunk else Action(chunk=(self,) * count)
        return self.chunk[0] if len(self.chunk) == 1 else self

    def relative_to(self, camera: Pose) -> "Action":
        """Return the action with a camera target replaced by the motion to it from the pose `camera`."""
        if self.chunk:
            return replace(self, chunk=tuple(resolve_camera_targets(self.chunk, camera)))
        if self.camera is None or self.camera.mode == "velocity":
            return self
        return replace(self, camera=Camera("velocity", camera.motion_to(self.camera.pose)))

    def move_camera(self, camera: Pose) -> Pose:
        """Return the pose of the camera after the action."""
        for each in self.chunk:
            camera = each.move_camera(camera)
        if self.camera is None:
            return camera
        return self.camera.pose if self.camera.mode == "target" else camera.then(self.camera.pose)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form that `of` parses, without absent parts."""
        plain = {name: action_kind(name).plain(value) for name, value in self.parts}
        return plain | ({"chunk": [each.as_dict() for each in self.chunk]} if self.chunk else {})

    def __repr__(self) -> str:
        given = [f"{name}={value!r}" for name, value in self.parts]
        return f"Action({', '.join(given + ([f'chunk={self.chunk!r}'] if self.chunk else []))})"

    def __str__(self) -> str:
        labels = [action_kind(name).label(value) for name, value in self.parts]
        labels.append(", ".join(map(str, self.chunk)))
        return " ".join(label for label in labels if label) or "(wait)"


AnyAction = str | Action | Mapping[str, Any] | Sequence[Any] | None
"""What `Action.of` parses."""


def example_action(takes: ActionConfig) -> Any:
    """Return the JSON form of an action that a model takes, for documentation; None if it takes none."""
    for name, settings in takes.kinds.items():
        kind = action_kind(name)
        return kind.example(settings) if kind.is_language else {name: kind.example(settings)}
    return None


def resolve_camera_targets(actions: Sequence[Action], start: Pose | None = None) -> list[Action]:
    """Replace the camera targets in successive actions by motions, from a pose of the camera on."""
    resolved, camera = [], start or Pose()
    for action in actions:
        resolved.append(action.relative_to(camera))
        camera = action.move_camera(camera)
    return resolved
