"""Request bodies: observations as uploads, actions as JSON, and optional fields."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from worldmodel.actions import Action, AnyAction
from worldmodel.errors import InputError
from worldmodel.media import sniff
from worldmodel.media.encoding import encode_png, encode_video

Observation = str | Path | bytes | Image.Image | np.ndarray
"""A file, its bytes, an image, or uint8 frames `[h, w, 3]` or `[t, h, w, 3]`."""


def as_upload(field: str, observation: Observation, fps: float) -> dict[str, tuple[str, bytes, str]]:
    """Return an observation as the file of a multipart form; the server checks its content.

    Raises:
        InputError: the file cannot be read, or the array is not uint8 `[h, w, 3]` or `[t, h, w, 3]`.
    """
    if isinstance(observation, np.ndarray):
        data = _encode_array(observation, fps)
    elif isinstance(observation, Image.Image):
        data = encode_png(observation)
    elif isinstance(observation, bytes):
        data = observation
    else:
        data = read_file(observation, "an image or video")
    kind = sniff.detect_format(data[:16])
    return {field: ("upload", data, "video/mp4" if kind == "mp4" else f"image/{kind or 'png'}")}


def read_file(path: str | Path, kind: str) -> bytes:
    """Return the content of a file.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return Path(path).expanduser().read_bytes()
    except (OSError, ValueError, RuntimeError):
        raise InputError(f"{str(path)!r} cannot be read; pass the path of {kind}.") from None


def _encode_array(array: np.ndarray, fps: float) -> bytes:
    if array.dtype != np.uint8 or not array.size or array.ndim not in {3, 4} or array.shape[-1] != 3:
        raise InputError(
            f"The frames are {array.dtype} {list(array.shape)}; pass uint8 [h, w, 3] or [t, h, w, 3]."
        )
    return encode_png(array) if array.ndim == 3 else encode_video(array, fps)


def as_json(action: AnyAction) -> dict[str, Any] | None:
    """Return an action as JSON; None is the empty action."""
    return Action.of(action).as_dict() or None


def drop_none(**options: Any) -> dict[str, Any]:
    """Return the options that are not None, so that the server applies its defaults to the others."""
    return {key: value for key, value in options.items() if value is not None}
