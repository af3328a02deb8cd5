"""Poses in space, and motions from one to another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from worldmodel.actions.numbers import check_numbers
from worldmodel.errors import InputError


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
        check_numbers("translation", self.translation, 3)
        check_numbers("rotation", self.rotation, 4)
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


def pose_features(pose: Pose) -> list[float]:
    """Return a motion as nine numbers: the translation and the first two columns of the rotation matrix.

    Source: Zhou et al. 2019 (arXiv:1812.07035): networks learn this continuous form better than quaternions.
    """
    return [
        *pose.translation,
        *rotate(pose.rotation, (1.0, 0.0, 0.0)),
        *rotate(pose.rotation, (0.0, 1.0, 0.0)),
    ]


def rotation_vector_motion(numbers: np.ndarray) -> Pose:
    """Return the motion of a translation `[3]` and a rotation `[3]`: its axis times its angle."""
    half = numbers[3:] / 2
    angle = float(np.linalg.norm(half))
    # sin(angle) / angle, which is 1 at an angle of 0; numpy's sinc has a pi inside.
    axis = half * np.sinc(angle / np.pi)
    return Pose(tuple(numbers[:3].tolist()), (*axis.tolist(), float(np.cos(angle))))
