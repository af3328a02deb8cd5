"""Actions, camera poses and episodes.

Names of axes in all shapes: `b` batch, `r` rounds, `t` frames, `c` channels, `h w` pixels or latent
cells, `n` tokens, `d` width, `k` heads, `a` action width.
"""

import difflib
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from worldmodel.config import ActionConfig, ActionSpec
from worldmodel.errors import InputError

DESCRIBE = "describe"
"""Prompt for a description of the newest observation."""
WHAT_HAPPENED = "what happened"
"""Prompt for the action that led from the first observation to the second."""
NOTHING_HAPPENS = "nothing happens"
"""The action in words with which the words of another one are compared (`Session.confidence`)."""
MAX_NUMBER = 1e6
"""Largest magnitude of a number in an action; much larger ones overflow in half precision."""


@dataclass(frozen=True, slots=True)
class StartImage:
    """An image that a rollout can start from."""

    title: str
    image: np.ndarray
    """uint8 `[h, w, 3]`."""


@dataclass(frozen=True)
class Pose:
    """Position and orientation of a camera, or a motion: a pose relative to another one.

    Axes: x right, y up, z forward. A world begins with the camera at the default pose.
    """

    translation: tuple[float, ...] = (0.0, 0.0, 0.0)
    """x, y and z, in the units of the world that the model learned."""
    rotation: tuple[float, ...] = (0.0, 0.0, 0.0, 1.0)
    """Unit quaternion x, y, z, w."""

    def __post_init__(self) -> None:
        _check_numbers("translation", self.translation, 3)
        _check_numbers("rotation", self.rotation, 4)
        if abs(math.hypot(*self.rotation) - 1) > 0.01:
            raise InputError(
                f"The rotation {list(self.rotation)} is not a unit quaternion; pass [x, y, z, w] of length 1."
            )

    def then(self, motion: "Pose") -> "Pose":
        """Return the pose after a motion relative to this pose."""
        pairs = zip(self.translation, rotate(self.rotation, motion.translation), strict=True)
        return Pose(tuple(a + b for a, b in pairs), _product(self.rotation, motion.rotation))

    def motion_to(self, other: "Pose") -> "Pose":
        """Return the motion from this pose to another: `a.then(a.motion_to(b))` equals `b`."""
        x, y, z, w = self.rotation
        inverse = (-x, -y, -z, w)
        difference = tuple(b - a for a, b in zip(self.translation, other.translation, strict=True))
        return Pose(rotate(inverse, difference), _product(inverse, other.rotation))

    def between(self, other: "Pose", fraction: float) -> "Pose":
        """Interpolate linearly between this pose (fraction 0) and another (fraction 1)."""
        start, end = np.asarray(self.rotation), np.asarray(other.rotation)
        end = end if start @ end >= 0 else -end  # q and -q are the same rotation: use the nearer one
        pairs = zip(self.translation, other.translation, strict=True)
        rotation = _unit((start + fraction * (end - start)).tolist())
        return Pose(tuple(a + fraction * (b - a) for a, b in pairs), rotation)


Mode = Literal["target", "velocity"]


@dataclass(frozen=True)
class Camera:
    """Motion of the camera in one round, with the names of vLLM-Omni's camera events.

    `target`: the pose at the end of the round, relative to that at the start of the world. `velocity`: the
    motion during the round, relative to the pose at the start of the round.
    """

    mode: Mode = "target"
    pose: Pose = field(default_factory=Pose)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise InputError(f"The mode of a camera is {self.mode!r}; use {' or '.join(get_args(Mode))}.")

    @classmethod
    def of(cls, value: Any) -> "Camera":
        """Parse `{"mode": "velocity", "data": {"translation": [x, y, z], "rotation": [x, y, z, w]}}`.

        Raises:
            InputError: the value has another form.
        """
        if isinstance(value, Camera):
            return value
        data = value.get("data") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(data, Mapping):
            raise InputError(
                f"The camera of an action is {reprlib.repr(value)}; pass mode (target or velocity) and data "
                "(translation [x, y, z], rotation [x, y, z, w])."
            )
        _check_fields("A camera", value, ("mode", "data"))
        _check_fields("The data of a camera", data, ("translation", "rotation"))
        given = {name: _numbers(name, numbers) for name, numbers in data.items() if numbers is not None}
        mode = value.get("mode")
        return cls("target" if mode is None else mode, Pose(**given))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form that `of` parses."""
        pose = {"translation": list(self.pose.translation), "rotation": list(self.pose.rotation)}
        return {"mode": self.mode, "data": pose}

    def __str__(self) -> str:
        numbers = " ".join(f"{x:g}" for x in (*self.pose.translation, *self.pose.rotation))
        return f"camera {self.mode} {numbers}"


@dataclass(frozen=True)
class Action:
    """Action of one round: text, keys, a vector, the mouse, the camera, or several of them.

    Without any of them it is the null action. A model that takes several actions in a round
    (`ActionConfig.per_round`) gets a `chunk` of them, or one that holds for all of the round.
    """

    text: str | None = None
    keys: tuple[str, ...] = ()
    vector: tuple[float, ...] | None = None
    mouse: tuple[float, ...] | None = None
    """Motion to the right and down, -1 to 1 each, as fractions of the width and height of the image."""
    camera: Camera | None = None
    chunk: "tuple[Action, ...]" = ()
    """Instead of the other parts: the actions of the round, in order."""

    def __post_init__(self) -> None:
        others = self.text, self.keys, self.vector, self.mouse, self.camera
        if self.chunk and (any(others) or any(each.chunk for each in self.chunk)):
            raise InputError(
                "An action with a chunk has another part, or a chunk inside of it; pass one list of actions."
            )

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
        _check_fields("An action", value, ("text", "keys", "mouse", "vector", "camera", "chunk"))
        chunk = value.get("chunk")
        if chunk is not None and not isinstance(chunk, list | tuple):
            raise InputError(f"The chunk of an action is {reprlib.repr(chunk)}; pass a list of actions.")
        text, keys, camera = value.get("text"), value.get("keys"), value.get("camera")
        if text is not None and not isinstance(text, str):
            raise InputError(f"The text of an action is {reprlib.repr(text)}; pass a sentence.")
        keys = () if keys is None else (keys,) if isinstance(keys, str) else keys
        if not isinstance(keys, list | tuple) or not all(isinstance(key, str) for key in keys):
            raise InputError(f"The keys of an action are {reprlib.repr(keys)}; pass a list of names.")
        given = {
            name: _numbers(name, value[name]) for name in ("mouse", "vector") if value.get(name) is not None
        }
        camera = None if camera is None else Camera.of(camera)
        parts = () if chunk is None else cls.of(chunk).chunk
        return cls((text or "").strip() or None, tuple(keys), camera=camera, chunk=parts, **given)

    @classmethod
    def of_numbers(cls, specs: Sequence[ActionSpec], numbers: Sequence[float]) -> "Action":
        """Return the action that numbers stand for, one for each spec; a key above 0.5 is held."""
        parts: dict[str, list[Any]] = {"key": [], "vector": [], "mouse": []}
        for spec, number in zip(specs, numbers, strict=True):
            if spec.kind != "key":
                parts[spec.kind].append(float(number))
            elif number > 0.5:
                parts["key"].append(spec.name)
        vector, mouse = (tuple(parts[kind]) or None for kind in ("vector", "mouse"))
        return cls(keys=tuple(parts["key"]), vector=vector, mouse=mouse)

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
        for name in self.as_dict():
            if not takes.takes[name]:
                taken = ", ".join(part for part, takes_it in takes.takes.items() if takes_it)
                raise InputError(f"This model takes no {name}; use {taken or 'the empty action'}.")
        for key in self.keys:
            if key not in takes.keys:
                near = difflib.get_close_matches(str(key), takes.keys, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"use {', '.join(takes.keys)}."
                raise InputError(f"This model has no key {key!r}; {hint}")
        if len(set(self.keys)) < len(self.keys):  # each would take a position of the backbone's sequence
            raise InputError(f"The keys {reprlib.repr(self.keys)} name a key twice; name each key once.")
        if self.mouse is not None:
            _check_numbers("mouse", self.mouse, 2)
            if not all(-1 <= x <= 1 for x in self.mouse):
                raise InputError(
                    f"The mouse of the action is {list(self.mouse)}; pass its motion to the right and down "
                    "as fractions of the image, -1 to 1."
                )
        if self.vector is not None:
            _check_numbers("vector", self.vector, takes.vector_size)
            bounds = zip(self.vector, takes.vector_low, takes.vector_high, strict=bool(takes.vector_low))
            for index, (x, low, high) in enumerate(bounds):
                tolerance = 1e-6 * max(1.0, abs(low), abs(high))  # bounds rounded to float32 are allowed
                if not low - tolerance <= x <= high + tolerance:
                    name = takes.vector_names[index] if takes.vector_names else f"number {index + 1}"
                    raise InputError(f"The {name} of the action is {x:g}; use {low:g} to {high:g}.")

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
        parts = {
            "text": self.text,
            "keys": list(self.keys) or None,
            "mouse": None if self.mouse is None else list(self.mouse),
            "vector": None if self.vector is None else list(self.vector),
            "camera": None if self.camera is None else self.camera.as_dict(),
            "chunk": [each.as_dict() for each in self.chunk] or None,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def __str__(self) -> str:
        parts = [
            self.text or "",
            "+".join(self.keys),
            "" if self.mouse is None else "mouse " + " ".join(f"{x:.4g}" for x in self.mouse),
            "" if self.vector is None else f"[{', '.join(f'{x:.4g}' for x in self.vector)}]",
            str(self.camera or ""),
            ", ".join(map(str, self.chunk)),
        ]
        return " ".join(part for part in parts if part) or "(wait)"


AnyAction = str | Action | Mapping[str, Any] | Sequence[Any] | None
"""What `Action.of` parses."""


def resolve_camera_targets(actions: Sequence[Action], start: Pose | None = None) -> list[Action]:
    """Replace the camera targets in successive actions by motions, from a pose of the camera on."""
    resolved, camera = [], start or Pose()
    for action in actions:
        resolved.append(action.relative_to(camera))
        camera = action.move_camera(camera)
    return resolved


def rotate(rotation: Sequence[float], vector: Sequence[float]) -> tuple[float, ...]:
    """Rotate a vector `[3]` by a quaternion: v + 2 w (u × v) + 2 u × (u × v) with u = (x, y, z)."""
    *axis, w = _unit(rotation)
    across = np.cross(axis, vector)
    return tuple((np.asarray(vector) + 2 * (w * across + np.cross(axis, across))).tolist())


def _product(first: Sequence[float], second: Sequence[float]) -> tuple[float, ...]:
    """Return the normalised product of two quaternions: the rotation by `second`, then by `first`."""
    (*u, a), (*v, b) = first, second
    axis = a * np.asarray(v) + b * np.asarray(u) + np.cross(u, v)
    return _unit((*axis.tolist(), a * b - float(np.dot(u, v))))


def _unit(rotation: Sequence[float]) -> tuple[float, ...]:
    length = math.hypot(*rotation)
    return tuple(x / length for x in rotation)


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    """Parse a list of numbers; strings and booleans are not numbers."""
    try:
        listed = [] if isinstance(value, str | bytes | Mapping) else list(value)
        if not listed or any(isinstance(x, str | bytes | bool) for x in listed):
            raise TypeError
        return tuple(float(x) for x in listed)
    except (TypeError, ValueError, OverflowError):
        raise InputError(
            f"The {name} of an action is {reprlib.repr(value)}; pass a list of numbers."
        ) from None


def _check_numbers(name: str, numbers: Sequence[float], count: int) -> None:
    if len(numbers) != count:
        raise InputError(f"The {name} of the action has {len(numbers)} numbers; pass {count}.")
    if not all(abs(x) <= MAX_NUMBER for x in numbers):
        raise InputError(
            f"The {name} of the action, {list(numbers)}, is not finite or beyond {MAX_NUMBER:g}; "
            "pass smaller numbers."
        )


def _check_fields(subject: str, value: Mapping[str, Any], fields: Sequence[str]) -> None:
    for name in value:
        if name not in fields:
            raise InputError(f"{subject} has no field {str(name)!r}; use {', '.join(fields)}.")


@dataclass(frozen=True)
class EncodedObservations:
    """Latents of an episode's observations, computed before training.

    Arrays are float32, float16, or uint16 with the bits of bfloat16.
    """

    context: np.ndarray | None = None
    """Context latents of every round, `[r, s, c, h, w]`; None: nothing was observed before."""
    target: np.ndarray | None = None
    """Latents that every round leads to, `[r, t, c, h, w]`."""
    observed: np.ndarray | None = None
    """Latents of the observation that a text is about, `[t, c, h, w]`."""

    @property
    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """Shapes of the arrays; episodes can be stacked if they are equal."""
        arrays = (self.context, self.target, self.observed)
        return tuple(None if array is None else array.shape for array in arrays)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an environment says of a round besides what it shows."""

    reward: float
    ended: bool
    """Whether the episode ends with the round."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a round led to."""

    frames: np.ndarray
    """uint8 `[t, h, w, 3]`."""
    outcome: Outcome | None
    """What the model predicts for the round; None for models without outcomes."""


@dataclass(frozen=True)
class Episode:
    """One training sample: observations with the actions between them, and optionally a text about them.

    `observations` are uint8 clips `[t, h, w, 3]`; `actions[i]` leads from observation i to i + 1. An empty
    first clip (t = 0) means that nothing was observed before. `prompt` and `answer` are text about the
    observations. `labels` are labels of latent cells that a source provides (`World.label_words`).
    `outcomes` are those of the actions; none if the source has no rewards. The first `observed` rounds were
    seen and not acted in: a model remembers them, and is not trained to predict them.

    With `encoded`, the codec does not run in the training step, and there are only those `observations` that
    a vision encoder reads. `text_states` are outputs of the generator's text encoder by text, `[l, e]` each,
    without zeros at the end; the encoder runs for all other texts.
    """

    name: str
    observations: tuple[np.ndarray, ...] = ()
    actions: tuple[Action, ...] = ()
    prompt: str | None = None
    answer: str | None = None
    labels: Mapping[str, np.ndarray] | None = None
    encoded: EncodedObservations | None = None
    text_states: Mapping[str, np.ndarray] | None = None
    outcomes: tuple[Outcome, ...] = ()
    observed: int = 0
