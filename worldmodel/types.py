"""What passes between the parts, and the legend of axis letters.

Axes, the same letter everywhere: `b` batch, `r` rounds, `t` frames, `c` channels, `h w` pixels or latent
cells, `n` tokens, `d` width, `k` heads, `a` action width.
"""

import difflib
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from worldmodel.config import ActionConfig
from worldmodel.errors import InputError

DESCRIBE = "describe"
"""Prompt that asks for a description of what is seen."""
WHAT_HAPPENED = "what happened"
"""Prompt that asks which action led from the first observation to the second."""
MAX_NUMBER = 1e6
"""Greatest number in an action: far larger ones leave the range of the model's arithmetic."""


@dataclass(frozen=True)
class Pose:
    """Where a camera is and how it is turned; or, seen from another pose, the motion that leads there.

    Axes: x right, y up, z forward. Where a world begins the camera is at the pose without arguments.
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
                f"The rotation {list(self.rotation)} is no unit quaternion; pass [x, y, z, w] of length 1."
            )

    def then(self, motion: "Pose") -> "Pose":
        """Return the pose after a motion that is seen from this one."""
        moved = zip(self.translation, turned(self.rotation, motion.translation), strict=True)
        return Pose(tuple(a + b for a, b in moved), _product(self.rotation, motion.rotation))

    def motion_to(self, other: "Pose") -> "Pose":
        """Return the motion from here to another pose, seen from here: `a.then(a.motion_to(b))` is b."""
        x, y, z, w = self.rotation
        back = (-x, -y, -z, w)
        way = tuple(b - a for a, b in zip(self.translation, other.translation, strict=True))
        return Pose(turned(back, way), _product(back, other.rotation))

    def between(self, other: "Pose", share: float) -> "Pose":
        """Return the pose after a share (0 to 1) of the straight way to another."""
        here, there = np.asarray(self.rotation), np.asarray(other.rotation)
        there = there if here @ there >= 0 else -there  # q and -q are one rotation: take the near one
        way = zip(self.translation, other.translation, strict=True)
        rotation = _unit((here + share * (there - here)).tolist())
        return Pose(tuple(a + share * (b - a) for a, b in way), rotation)


Mode = Literal["target", "velocity"]


@dataclass(frozen=True)
class Camera:
    """What the camera does in one round; the names are those of vLLM-Omni's camera events.

    `target`: where it is when the round ends, seen from where it was when the world began. `velocity`: how it
    moves in the round, seen from where it was when the round began.
    """

    mode: Mode = "target"
    pose: Pose = field(default_factory=Pose)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise InputError(f"The mode of a camera is {self.mode!r}; use {' or '.join(get_args(Mode))}.")

    @classmethod
    def of(cls, value: Any) -> "Camera":
        """Read `{"mode": "velocity", "data": {"translation": [x, y, z], "rotation": [x, y, z, w]}}`.

        Raises:
            InputError: the value is something else.
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
        """Return what `of` reads, as JSON has it."""
        pose = {"translation": list(self.pose.translation), "rotation": list(self.pose.rotation)}
        return {"mode": self.mode, "data": pose}

    def __str__(self) -> str:
        numbers = " ".join(f"{x:g}" for x in (*self.pose.translation, *self.pose.rotation))
        return f"camera {self.mode} {numbers}"


@dataclass(frozen=True)
class Action:
    """What the user does in one round: words, keys, the mouse, a vector, the camera, or any of them together.

    All empty is the null action: time passes.
    """

    text: str | None = None
    keys: tuple[str, ...] = ()
    vector: tuple[float, ...] | None = None
    mouse: tuple[float, ...] | None = None
    """How far it moves right and down, as shares of the picture's width and height: -1 to 1 each."""
    camera: Camera | None = None

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
        _check_fields("An action", value, ("text", "keys", "mouse", "vector", "camera"))
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
        return cls((text or "").strip() or None, tuple(keys), camera=camera, **given)

    def check(self, takes: ActionConfig) -> None:
        """Refuse what a model does not take; how long its text may be, only the tokenizer can say.

        Raises:
            InputError: a part of the action is not for this model; the sentence says what it takes.
        """
        for name in self.as_dict():
            if not takes.takes[name]:
                raise InputError(f"This model takes no {name}; see `worldmodel info MODEL`.")
        for key in self.keys:
            if key not in takes.keys:
                near = difflib.get_close_matches(str(key), takes.keys, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it knows {', '.join(takes.keys)}."
                raise InputError(f"This model does not know the key {key!r}; {hint}")
        if self.mouse is not None:
            _check_numbers("mouse", self.mouse, 2)
            if not all(-1 <= x <= 1 for x in self.mouse):
                raise InputError(
                    f"The mouse of the action is {list(self.mouse)}; pass how far it moves right and down as "
                    "shares of the picture, -1 to 1."
                )
        if self.vector is not None:
            _check_numbers("vector", self.vector, takes.vector_size)
            bounds = zip(self.vector, takes.vector_low, takes.vector_high, strict=bool(takes.vector_low))
            for place, (x, low, high) in enumerate(bounds):
                spare = 1e-6 * max(1.0, abs(low), abs(high))  # a bound as float32 may lie a little outside
                if not low - spare <= x <= high + spare:
                    name = takes.vector_names[place] if takes.vector_names else f"number {place + 1}"
                    raise InputError(f"In the vector of the action {name} is {x:g}; use {low:g} to {high:g}.")

    def seen_from(self, camera: Pose) -> "Action":
        """Return the same action with a camera's target as the motion that leads there from where it is."""
        if self.camera is None or self.camera.mode == "velocity":
            return self
        return replace(self, camera=Camera("velocity", camera.motion_to(self.camera.pose)))

    def moves(self, camera: Pose) -> Pose:
        """Return where the camera is after the action."""
        if self.camera is None:
            return camera
        return self.camera.pose if self.camera.mode == "target" else camera.then(self.camera.pose)

    def as_dict(self) -> dict[str, Any]:
        """Return what `of` reads, as JSON has it: only the parts that there are."""
        parts = {
            "text": self.text,
            "keys": list(self.keys) or None,
            "mouse": None if self.mouse is None else list(self.mouse),
            "vector": None if self.vector is None else list(self.vector),
            "camera": None if self.camera is None else self.camera.as_dict(),
        }
        return {name: part for name, part in parts.items() if part is not None}

    def __str__(self) -> str:
        parts = [
            self.text or "",
            "+".join(self.keys),
            "" if self.mouse is None else "mouse " + " ".join(f"{x:g}" for x in self.mouse),
            "" if self.vector is None else str(list(self.vector)),
            str(self.camera or ""),
        ]
        return " ".join(part for part in parts if part) or "(wait)"


def resolve_camera_targets(actions: Sequence[Action]) -> list[Action]:
    """Return the actions of a world's rounds, from the first on, with the camera's targets as motions."""
    seen, camera = [], Pose()
    for action in actions:
        seen.append(action.seen_from(camera))
        camera = action.moves(camera)
    return seen


def turned(rotation: Sequence[float], vector: Sequence[float]) -> tuple[float, ...]:
    """Return a vector `[3]` turned by a quaternion x, y, z, w.

    Source: the rotation v + 2 w (u × v) + 2 u × (u × v) of a unit quaternion (u, w).
    """
    *axis, w = _unit(rotation)
    across = np.cross(axis, vector)
    return tuple((np.asarray(vector) + 2 * (w * across + np.cross(axis, across))).tolist())


def _product(first: Sequence[float], second: Sequence[float]) -> tuple[float, ...]:
    """Return the quaternion that turns as `second` and then as `first` does; its length is 1 again."""
    (*u, a), (*v, b) = first, second
    axis = a * np.asarray(v) + b * np.asarray(u) + np.cross(u, v)
    return _unit((*axis.tolist(), a * b - float(np.dot(u, v))))


def _unit(rotation: Sequence[float]) -> tuple[float, ...]:
    length = math.hypot(*rotation)
    return tuple(x / length for x in rotation)


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    """Read a list of numbers; text and truth values are none."""
    try:
        listed = [] if isinstance(value, str | bytes | Mapping) else list(value)
        if not listed or any(isinstance(x, str | bytes | bool) for x in listed):
            raise TypeError
        return tuple(float(x) for x in listed)
    except (TypeError, ValueError, OverflowError):
        told = f"The {name} of an action is {reprlib.repr(value)}"
        raise InputError(f"{told}; pass a list of numbers.") from None


def _check_numbers(name: str, numbers: Sequence[float], count: int) -> None:
    if len(numbers) != count:
        raise InputError(f"The {name} of the action has {len(numbers)} numbers; pass {count}.")
    if not all(abs(x) <= MAX_NUMBER for x in numbers):
        told = f"The {name} of the action, {list(numbers)}, is not finite or beyond {MAX_NUMBER:g}"
        raise InputError(f"{told}; pass plain numbers.")


def _check_fields(what: str, value: Mapping[str, Any], fields: Sequence[str]) -> None:
    for name in value:
        if name not in fields:
            raise InputError(f"{what} has no field {str(name)!r}; use {', '.join(fields)}.")


@dataclass(frozen=True)
class Episode:
    """One training sample: observations with the actions between them, and a text to say about them.

    `observations` are uint8 clips `[t, h, w, 3]`; `actions[i]` leads from observation i to i + 1. An empty
    first clip (t = 0) stands for "nothing seen yet". `prompt` and `answer` ask for text about the
    observations. `labels` holds extra per-cell truth of a source (`World.label_words`).
    """

    name: str
    observations: tuple[np.ndarray, ...] = ()
    actions: tuple[Action, ...] = ()
    prompt: str | None = None
    answer: str | None = None
    labels: Mapping[str, np.ndarray] | None = None
