"""Reading and writing of images."""

import io
import warnings
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from worldmodel.config import ImageSize, height_width
from worldmodel.errors import InputError, OutputError
from worldmodel.io import atomic_file
from worldmodel.media import sniff
from worldmodel.media.hdr import HDR_TRANSFERS
from worldmodel.media.limits import PILLOW_FORMATS, MediaLimits, list_formats
from worldmodel.media.source import Source, read_bytes

Frame = UInt8[np.ndarray, "h w 3"]
NUM_HEADER_BYTES = 4096
"""Beginning of an AVIF image in which its colours are described."""
MIN_SIDE = 8
"""Images and videos with fewer pixels along a side are refused."""


def read_image(
    source: Source | Image.Image | np.ndarray, size: ImageSize, limits: MediaLimits = MediaLimits()
) -> Frame:
    """Read an image file, or an image in memory, cropped around its centre to `size`.

    The camera's rotation is applied, transparency becomes white, and of an animation the first frame is read.

    Args:
        source: a path, the bytes of a file, a Pillow image, or a uint8 array `[h, w]`, `[h, w, 3]` or
            `[h, w, 4]`.
        size: side or (height, width) of the result in pixels.
        limits: formats and sizes that are accepted.

    Raises:
        InputError: the file is missing, empty, not an image, damaged, too small or too large.
    """
    if isinstance(source, np.ndarray):
        return crop_and_resize(_load("The image array", _from_array(source), limits), size)
    if isinstance(source, Image.Image):
        return crop_and_resize(_load("The image", source, limits), size)
    name, data = read_bytes(source, limits.max_image_bytes, "image")
    return crop_and_resize(load_image(name, data, limits), size)


def load_image(name: str, data: bytes, limits: MediaLimits) -> Image.Image:
    """Decode the bytes of an image file; `name` is used in messages.

    Raises:
        InputError: as `read_image`.
    """
    kind = sniff.detect_format(data)
    if kind not in limits.image_formats:
        accepted = list_formats(limits.image_formats)
        raise InputError(f"{name} is {sniff.describe(kind, data)}, not an image; use a {accepted}.")
    colours = data.find(b"colrnclx", 0, NUM_HEADER_BYTES) if kind == "avif" else -1
    if colours >= 0 and int.from_bytes(data[colours + 10 : colours + 12]) in HDR_TRANSFERS:
        raise InputError(f"{name} is an HDR image; export it with the colours of sRGB.")
    try:
        with warnings.catch_warnings(action="ignore"):
            image = Image.open(io.BytesIO(data), formats=[PILLOW_FORMATS[kind]])
    except Image.DecompressionBombError:
        limit = limits.max_image_pixels // 1_000_000
        raise InputError(f"{name} has too many pixels; shrink it below {limit} million pixels.") from None
    except Exception:  # as in _load
        raise InputError(f"{name} is damaged or cut off; export or download it again.") from None
    return _load(name, image, limits)


def check_sides(name: str, width: int, height: int, max_pixels: int) -> None:
    """Refuse frames that are too small or too large.

    Raises:
        InputError: a side is shorter than `MIN_SIDE`, or there are more than `max_pixels` pixels.
    """
    if min(width, height) < MIN_SIDE:
        raise InputError(f"{name} is {width}x{height} pixels; each side must have at least {MIN_SIDE}.")
    if width * height > max_pixels:
        limit = max_pixels / 1e6
        raise InputError(f"{name} is {width}x{height} pixels; shrink it below {limit:.0f} million pixels.")


def crop_and_resize(image: Image.Image, size: ImageSize, pixel_aspect: float = 1.0) -> Frame:
    """Crop the largest centred part with the aspect ratio of `size`, and resize it.

    Area averaging shrinks (no ringing), Lanczos enlarges. Pixels of the image are `pixel_aspect` times as
    wide as high.
    """
    (height, width), (full_width, full_height) = height_width(size), image.size
    crop_width = min(full_width, max(1, round(full_height * width / height / pixel_aspect)))
    crop_height = min(full_height, max(1, round(full_width * pixel_aspect * height / width)))
    left, top = (full_width - crop_width) // 2, (full_height - crop_height) // 2
    shrinks = crop_width >= width and crop_height >= height
    resample = Image.Resampling.BOX if shrinks else Image.Resampling.LANCZOS
    return np.array(
        image.resize((width, height), resample, (left, top, left + crop_width, top + crop_height))
    )


def write_image(image: Image.Image, path: str | Path) -> None:
    """Write an image as .png, atomically.

    Raises:
        OutputError: the suffix is not .png, or the path cannot be written.
    """
    if Path(path).suffix.lower() != ".png":
        raise OutputError(f"{str(path)!r} does not end in .png; use that suffix.")
    with atomic_file(path) as temporary:
        image.save(temporary, "PNG")


def _from_array(array: np.ndarray) -> Image.Image:
    if array.dtype != np.uint8:
        raise InputError(f"The image array has type {array.dtype}; pass uint8 values from 0 to 255.")
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise InputError(f"The image array has shape {array.shape}; pass [h, w], [h, w, 3] or [h, w, 4].")
    if not array.size:
        raise InputError(f"The image array has shape {array.shape} and no pixels; pass an image with pixels.")
    return Image.fromarray(np.ascontiguousarray(array))


def _load(name: str, image: Image.Image, limits: MediaLimits) -> Image.Image:
    """Decode a Pillow image whose header was read, apply its rotation and remove transparency."""
    check_sides(name, *image.size, limits.max_image_pixels)
    if image.mode in ("F", "I"):
        raise InputError(f"{name} has numbers of 32 bits as pixels; export it with 8 or 16 bits.")
    try:
        image.load()
        return _opaque(ImageOps.exif_transpose(image))
    # Pillow's decoders raise many types: OSError, SyntaxError, struct.error, ...
    except Exception:
        raise InputError(f"{name} is damaged or cut off; export or download it again.") from None


def _opaque(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):  # a grey PNG of 16 bits, which `convert` would clip at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
