"""Poses of a camera in npz and npy files, one for each frame of a clip."""

import os
import zipfile
from typing import IO

import numpy as np

from worldmodel.actions import Camera, Pose
from worldmodel.actions.track import Track
from worldmodel.errors import InputError

SUFFIXES = (".npz", ".npy")
CAMERA_TO_WORLD = ("cam_c2w", "c2w", "camera_to_world", "poses")
WORLD_TO_CAMERA = ("extrinsic", "extrinsics", "w2c", "world_to_camera")
"""Names of arrays in npz files, by the direction of their matrices."""
MAX_BYTES = 2**26
"""Largest content of a file."""
FLIP = np.diag([1.0, -1.0, 1.0])
"""From the axes of OpenCV and COLMAP (y down) to ours (y up), and back."""


def read_poses(path: str, fps: float) -> Track:
    """Return the poses of a camera as targets relative to the first, each at the time of its frame.

    Args:
        path: an npz file with matrices `[n, 3, 4]` or `[n, 4, 4]` under one of the names above, or an npy
            file with those from the camera to the world; axes x right, y down, z forward.
        fps: frames per second.

    Raises:
        InputError: the file is missing, damaged, too large, or has no such array of numbers.
    """
    try:
        matrices = _matrices(path)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"its poses {path!r} cannot be read ({error})") from None
    if matrices.ndim != 3 or matrices.shape[1:] not in ((3, 4), (4, 4)) or len(matrices) < 2:
        raise InputError(
            f"its poses {path!r} have the shape {matrices.shape}, and not [n, 3, 4] or [n, 4, 4]"
        )
    turns, places = matrices[:, :3, :3], matrices[:, :3, 3]
    if not np.isfinite(matrices).all() or (np.linalg.det(turns) < 0.5).any():
        raise InputError(
            f"its poses {path!r} have numbers that are not finite, or matrices that turn nothing"
        )
    turns = FLIP @ turns[0].T @ turns @ FLIP
    places = (places - places[0]) @ matrices[0, :3, :3] @ FLIP
    values = tuple(
        Camera("target", Pose(tuple(place), _quaternion(turn)))
        for place, turn in zip(places[1:].tolist(), turns[1:], strict=True)
    )
    times = tuple((index / fps, (index + 1) / fps) for index in range(len(values)))
    return Track(values, times=times)


def _matrices(path: str) -> np.ndarray:
    """Return the matrices from the camera to the world."""
    if path.endswith(".npy"):
        with open(path, "rb") as file:
            return _array(file, os.path.getsize(path))
    with zipfile.ZipFile(path) as packed:
        names = {member.filename.removesuffix(".npy"): member for member in packed.infolist()}
        name = next((each for each in (*CAMERA_TO_WORLD, *WORLD_TO_CAMERA) if each in names), "")
        if not name:
            known = ", ".join((*CAMERA_TO_WORLD, *WORLD_TO_CAMERA))
            raise ValueError(f"it has {', '.join(names) or 'no array'}, and none of {known}")
        with packed.open(names[name]) as file:
            matrices = _array(file, names[name].file_size)
    return _inverse(matrices) if name in WORLD_TO_CAMERA else matrices


def _array(file: IO[bytes], size: int) -> np.ndarray:
    """Return an array of numbers; one of Python's objects is refused."""
    if size > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES // 2**20} MiB")
    return np.lib.format.read_array(file, allow_pickle=False).astype(np.float64)


def _inverse(matrices: np.ndarray) -> np.ndarray:
    if matrices.ndim != 3 or matrices.shape[1:] not in ((3, 4), (4, 4)):
        return matrices
    turns = matrices[:, :3, :3].transpose(0, 2, 1)
    return np.concatenate([turns, -turns @ matrices[:, :3, 3:]], axis=2)


def _quaternion(turn: np.ndarray) -> tuple[float, ...]:
    """Return the quaternion x, y, z, w of the rotation nearest to a matrix.

    Source: Bar-Itzhack 2000, the eigenvector of the largest eigenvalue.
    """
    (a, b, c), (d, e, f), (g, h, i) = turn
    symmetric = np.array(
        [
            [a - e - i, b + d, c + g, h - f],
            [b + d, e - a - i, f + h, c - g],
            [c + g, f + h, i - a - e, d - b],
            [h - f, c - g, d - b, a + e + i],
        ]
    )
    x, y, z, w = np.linalg.eigh(symmetric)[1][:, -1].tolist()
    return (x, y, z, w) if w >= 0 else (-x, -y, -z, -w)
