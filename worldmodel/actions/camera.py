"""Poses and motions of the camera."""

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from worldmodel.actions.kind import ActionKind, Embedding, Numbers, flag, numbers_of_element, spoken_numbers
from worldmodel.actions.numbers import NumberSpec, check_fields, parse_numbers
from worldmodel.actions.pose import Pose, pose_features, rotation_vector_motion
from worldmodel.actions.track import Track
from worldmodel.errors import InputError

if TYPE_CHECKING:
    from gymnasium import spaces

STEP = 0.1
"""Length of a step on a page, in the units of the world."""
TURN = math.radians(10)
ELEMENT_SIZE = 6
"""Numbers of a camera action in an environment: translation x, y, z, and rotation as axis times angle."""
EFFECTS = tuple(
    f"camera {verb} {sign}{axis}" for verb in ("moves", "turns about") for axis in "xyz" for sign in "+-"
)

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
        check_fields("A camera", value, ("mode", "data"))
        check_fields("The data of a camera", data, ("translation", "rotation"))
        given = {name: parse_numbers(name, numbers) for name, numbers in data.items() if numbers is not None}
        mode = value.get("mode")
        return cls("target" if mode is None else mode, Pose(**given))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form that `of` parses."""
        pose = {"translation": list(self.pose.translation), "rotation": list(self.pose.rotation)}
        return {"mode": self.mode, "data": pose}

    def __str__(self) -> str:
        numbers = " ".join(f"{x:g}" for x in (*self.pose.translation, *self.pose.rotation))
        return f"camera {self.mode} {numbers}"


class CameraKind(ActionKind):
    """The pose of the camera after a round, or its motion during a round.

    Rollouts know the camera's pose and resolve targets to motions before the model sees them, see
    `resolve_camera_targets`.
    """

    name = "camera"
    setting = "true for poses and motions of the camera (see `worldmodel.actions.Camera`)."
    untaken = False
    schema = {  # noqa: RUF012 -- constant
        "type": "object",
        "title": "CameraBody",
        "description": "Camera motion of one round.",
        "properties": {
            "mode": {
                "enum": ["target", "velocity"],
                "default": "target",
                "description": "target: pose at the end of the round, relative to the start of the world; "
                "velocity: motion during the round, relative to the start of the round.",
            },
            "data": {
                "type": "object",
                "title": "CameraData",
                "description": "A pose or a motion; x is right, y is up and z is forward.",
                "properties": {
                    "translation": {
                        "type": "array",
                        "items": {"type": "number"},
                        "minItems": 3,
                        "maxItems": 3,
                    },
                    "rotation": {
                        "type": "array",
                        "items": {"type": "number"},
                        "minItems": 4,
                        "maxItems": 4,
                        "description": "Unit quaternion x, y, z, w.",
                    },
                },
            },
        },
        "required": ["data"],
    }

    def configure(self, setting: Any) -> bool:
        return flag(self.name, setting)

    def describe(self, settings: Any) -> str:
        return "target or velocity: translation [x, y, z], rotation [x, y, z, w]"

    def parse(self, value: Any) -> Camera | None:
        return None if value is None else Camera.of(value)

    def check(self, value: Camera, settings: Any) -> None:
        """Do nothing: a camera is checked when it is made."""

    def plain(self, value: Camera) -> dict[str, Any]:
        return value.as_dict()

    def label(self, value: Camera) -> str:
        return str(value)

    def example(self, settings: Any) -> dict[str, Any]:
        return {"mode": "velocity", "data": {"translation": [0, 0, STEP]}}

    def say(self, value: Camera) -> str:
        numbers = (*value.pose.translation, *value.pose.rotation)
        return " ".join(f"{x:.3g}" for x in numbers)

    def understand(self, words: str, settings: Any) -> Camera | None:
        numbers = spoken_numbers(words, 7)
        length = math.hypot(*numbers[3:]) if numbers else 0.0
        if numbers is None or length < 1e-3:
            return None
        return Camera("velocity", Pose(numbers[:3], tuple(x / length for x in numbers[3:])))

    def check_track(self, track: Track) -> None:
        """Check that a clip has motions alone, or targets with their times."""
        modes = {value.mode for value in track.values if value}
        if len(modes) > 1 or ("target" in modes and not (track.per_action or track.times)):
            raise InputError(
                "its camera has a target without a time; list one per action, or all with start and end"
            )

    def is_divisible(self, track: Track) -> bool:
        """Return whether there is no target, which is relative to the start of the clip."""
        targets = any(each and each.mode == "target" for each in track.values)
        return not (track.per_action or (track.times and targets))

    def during(self, track: Track, index: int, start: float, end: float, action_s: float) -> Camera | None:
        """Return the motion during an action: of targets, the motion between the poses on their way."""
        camera: Camera | None = track.during(index, start, end)
        if camera is None or camera.mode == "velocity":
            return camera
        before, after = (_pose_along(track, second, action_s) for second in (start, end))
        return Camera("velocity", before.motion_to(after))

    def effects(self, value: Camera | None, specs: Sequence[NumberSpec]) -> list[str]:
        """Return the axes along which the camera moves, and about which it turns, most."""
        if not value:
            return []
        *axis, w = value.pose.rotation
        turn = np.multiply(axis, math.copysign(1, w))  # q and -q are the same rotation
        parts = {"moves": np.array(value.pose.translation), "turns about": turn}
        moved = [f"camera {verb} {_dominant(part)}" for verb, part in parts.items() if abs(part).max() > 1e-6]
        return moved or ["camera still"]

    def all_effects(self) -> Sequence[str]:
        return EFFECTS

    def spaces(self, settings: Any) -> "dict[str, spaces.Space]":
        from gymnasium import spaces

        return {"camera": spaces.Box(-1, 1, (ELEMENT_SIZE,), np.float32)}

    def of_element(self, space: str, element: Any, settings: Any) -> Camera:
        return Camera("velocity", rotation_vector_motion(numbers_of_element(element, ELEMENT_SIZE)))

    def embedding(self, settings: Any) -> Embedding:
        return Numbers(9, waves=3)

    def features(self, value: Camera, settings: Any) -> Sequence[float]:
        """Return a motion as nine numbers; targets must be resolved before."""
        return pose_features(value.pose)

    def vector_of(self, value: Camera) -> Sequence[float]:
        return (*value.pose.translation, *value.pose.rotation)

    def widget(self, settings: Any) -> dict[str, Any]:
        return {
            "type": "buttons",
            "buttons": [
                _button("turn left", "↶", turn=-TURN),
                _button("forward", "↑", z=STEP),
                _button("turn right", "↷", turn=TURN),
                _button("left", "←", x=-STEP),
                _button("backward", "↓", z=-STEP),
                _button("right", "→", x=STEP),
            ],
        }


def _button(name: str, sign: str, x: float = 0.0, z: float = 0.0, turn: float = 0.0) -> dict[str, Any]:
    pose = Pose((x, 0.0, z), (0.0, math.sin(turn / 2), 0.0, math.cos(turn / 2)))
    return {"name": name, "sign": sign, "value": Camera("velocity", pose).as_dict()}


def _dominant(vector: np.ndarray) -> str:
    """Return the sign and the name of the axis along which a vector is longest."""
    axis = int(abs(vector).argmax())
    return f"{'-' if vector[axis] < 0 else '+'}{'xyz'[axis]}"


def _pose_along(track: Track, second: float, action_s: float) -> Pose:
    """Return the pose of the camera at a second of a clip, for a track of targets.

    Each entry leads in a straight line from the previous target (or the start of the clip) to its own.
    """
    times = track.times or [(i * action_s, (i + 1) * action_s) for i in range(len(track.values))]
    pose = Pose()
    for (start, end), target in sorted(zip(times, track.values, strict=True), key=lambda entry: entry[0]):
        if target is None or second <= start:
            continue
        pose = pose.between(target.pose, min(1.0, (second - start) / max(end - start, 1e-6)))
    return pose
