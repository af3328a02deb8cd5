"""Encoding of responses: MP4, JPEG, PNG, ZIP of PNGs, and NumPy arrays.

Encoders run in the calling thread; encode long videos in a worker thread.
"""

import io
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from worldmodel.media import Frame, Frames, write_video


def encode_mp4(frames: Frames, fps: float, scale: int | None = None) -> bytes:
    """Encode a clip as MP4 (H.264); `scale` as in `worldmodel.media.write_video`.

    Raises:
        OutputError: there are no frames, or `fps` is not from 1 to 240.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        write_video(frames, path, fps, scale)
        return path.read_bytes()


def encode_jpeg(frame: Frame, quality: int = 85) -> bytes:
    """Encode one frame as JPEG; `quality` from 1 to 95."""
    return _encode_image(frame, "JPEG", quality=quality)


def encode_png(frame: Frame) -> bytes:
    """Encode one frame as PNG (lossless)."""
    return _encode_image(frame, "PNG")


def encode_png_frames(frames: Frames) -> bytes:
    """Encode a clip as a ZIP of PNGs called 00000.png, 00001.png, ...; equal frames give equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for index, frame in enumerate(frames):
            archive.writestr(zipfile.ZipInfo(f"{index:05d}.png"), encode_png(frame))
    return buffer.getvalue()


def encode_npy(frames: Frames) -> bytes:
    """Encode a clip as NumPy's .npy: uint8 `[t, h, w, 3]`, read by `np.load(..., allow_pickle=False)`."""
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(frames), allow_pickle=False)
    return buffer.getvalue()


def _encode_image(frame: Frame, name: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(frame)).save(buffer, name, **options)
    return buffer.getvalue()
