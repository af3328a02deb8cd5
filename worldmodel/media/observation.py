"""Reading of observations: an image or a video, from a file or from memory."""

import os
from typing import Any

import numpy as np
from PIL import Image

from worldmodel.config import ImageSize
from worldmodel.errors import InputError
from worldmodel.media import sniff
from worldmodel.media.image import crop_and_resize, load_image, read_image
from worldmodel.media.limits import MediaLimits, list_formats
from worldmodel.media.source import Source, read_bytes
from worldmodel.media.video import Frames, open_video_bytes


def read_observation(
    source: Source | Image.Image | np.ndarray,
    size: ImageSize,
    fps: float | None,
    max_frames: int,
    limits: MediaLimits = MediaLimits(),
    newest: bool = False,
) -> Frames:
    """Read an image as a clip of one frame, or a video (or GIF) as `read_video` does.

    Frames in memory, uint8 `[t, h, w, 3]`, count as a video that already has the wanted rate. Pixels in
    memory may also be floats from 0 to 1, and PyTorch tensors, whose channels may come first. With `newest`,
    the last `max_frames` frames of a longer video are returned instead of its first.

    Raises:
        InputError: as `read_image` and `read_video`, or the source is of another type.
    """
    # A tensor: the processes that decode media do not import PyTorch.
    if hasattr(source, "detach") and hasattr(source, "cpu"):
        source = _array_of(source)
    if isinstance(source, np.ndarray) and np.issubdtype(source.dtype, np.floating):
        source = _from_unit_range(source)
    if isinstance(source, np.ndarray) and source.ndim == 4:
        if not len(source):
            raise InputError("The clip has no frames; pass at least one.")
        chosen = source[-max_frames:] if newest else source[:max_frames]
        return np.stack([read_image(frame, size, limits) for frame in chosen])
    if isinstance(source, Image.Image | np.ndarray):
        return read_image(source, size, limits)[None]
    if not isinstance(source, str | os.PathLike | bytes):
        raise InputError(
            f"An observation of type {type(source).__name__} cannot be read; pass a path, the bytes of a "
            "file, a PIL image, or an array or tensor of pixels."
        )
    name, data = read_bytes(source, limits.max_video_bytes, "observation")
    kind = sniff.detect_format(data)
    if kind in limits.video_formats:
        with open_video_bytes(name, data, limits) as video:
            return video.read(size, fps, max_frames, newest=newest)
    if kind not in limits.image_formats:
        accepted = list_formats((*limits.image_formats, *limits.video_formats))
        raise InputError(f"{name} is {sniff.describe(kind, data)}; use a {accepted}.")
    if len(data) > limits.max_image_bytes:
        raise InputError(f"{name} is larger than {limits.max_image_bytes // 2**20} MiB; shrink it first.")
    return crop_and_resize(load_image(name, data, limits), size)[None]


def _array_of(tensor: Any) -> np.ndarray:
    """Return the pixels of a PyTorch tensor, with channels last."""
    tensor = tensor.detach().cpu()
    pixels = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    if pixels.ndim >= 3 and pixels.shape[-3] in (1, 3) and pixels.shape[-1] not in (1, 3, 4):
        pixels = np.moveaxis(pixels, -3, -1)
    return pixels


def _from_unit_range(pixels: np.ndarray) -> np.ndarray:
    """Return floats from 0 to 1 as uint8."""
    low, high = (float(pixels.min()), float(pixels.max())) if pixels.size else (0.0, 0.0)
    if not (low >= 0 and high <= 1):  # also where one is not a number
        raise InputError(
            f"The pixels are floats from {low:g} to {high:g}; pass uint8, or floats from 0 to 1."
        )
    return np.round(pixels * 255).astype(np.uint8)
