"""Encoding of images and videos, and writing of videos as MP4 and GIF files."""

import io
import itertools
import math
import tempfile
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.video.frame import PictureType
from PIL import Image

from worldmodel.errors import OutputError
from worldmodel.io import atomic_file
from worldmodel.media.image import Frame
from worldmodel.media.video import Frames

MIN_SHORT_SIDE = 256
"""Smaller frames are enlarged when they are written: players blur or shrink tiny videos."""
MAX_FPS, MAX_GIF_FPS = 240, 50
KEYFRAME_EVERY = 8
"""Frames of a recording between two that can be decoded alone."""


def write_video(frames: Frames, path: str | Path, fps: float, scale: int | None = None) -> None:
    """Write frames as .mp4 (H.264) or .gif, atomically.

    An odd side of an .mp4 gains one pixel, which its chroma subsampling requires. A .gif of more than 50
    frames per second, which players would slow down, has every second frame, or every n-th.

    Args:
        frames: the video.
        path: file to write; its suffix selects the format.
        fps: frames per second, up to 240.
        scale: how often each pixel is repeated along both sides; None enlarges small frames until the short
            side has at least 256 pixels.

    Raises:
        OutputError: there are no frames, the suffix or `fps` is out of range, or the path cannot be written.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in {".mp4", ".gif"}:
        raise OutputError(f"{str(path)!r} ends in {suffix or 'nothing'!r}; use .mp4 or .gif.")
    if not len(frames) or not frames.size:
        raise OutputError(f"There are no frames to write to {str(path)!r}; generate at least one.")
    if not 0 < fps <= MAX_FPS:
        raise OutputError(f"fps is {fps}; use 1 to {MAX_FPS}.")
    scale = scale or default_scale(*frames.shape[1:3])
    with atomic_file(path) as temporary:
        (_write_gif if suffix == ".gif" else _write_mp4)(frames, temporary, fps, scale)


def encode_video(frames: Frames, fps: float, scale: int | None = None, suffix: str = ".mp4") -> bytes:
    """Encode frames as the content of a file; arguments and errors as in `write_video`."""
    # A file, not BytesIO: FFmpeg opens an .mp4 again by its name to move the index to the front, without
    # which players would have to load all of it before they show a frame.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"video{suffix}"
        write_video(frames, path, fps, scale)
        return path.read_bytes()


def encode_png(image: Frame | Image.Image, **options: Any) -> bytes:
    """Encode an image as PNG (lossless); `options` are passed to Pillow."""
    return _encode_image(image, "PNG", **options)


def encode_jpeg(frame: Frame, quality: int = 85) -> bytes:
    """Encode a frame as JPEG, with its colours in full resolution; `quality` from 1 to 95."""
    return _encode_image(frame, "JPEG", quality=quality, subsampling=0)


def _encode_image(image: Frame | Image.Image, format: str, **options: Any) -> bytes:
    if isinstance(image, np.ndarray):
        image = Image.fromarray(np.ascontiguousarray(image))
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def default_scale(height: int, width: int) -> int:
    """Return the factor by which frames are enlarged so that their short side has 256 pixels or more."""
    return max(1, -(-MIN_SHORT_SIDE // min(height, width)))


def enlarge(frame: Frame, scale: int, even: bool = False) -> Frame:
    """Repeat every pixel `scale` times along both sides; with `even`, repeat the edge of an odd side."""
    large = frame.repeat(scale, axis=0).repeat(scale, axis=1)
    height, width = large.shape[:2]
    return np.pad(large, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge") if even else large


class VideoWriter:
    """An .mp4 (H.264) to which frames are added as they come; close it, or the file has no index.

    Args:
        path: the file.
        fps: frames per second.
        height: height of a frame in pixels, even.
        width: width, even.
        recording: write training data instead of a film to watch: full resolution of colours, which 4:2:0
            halves, and a frame that can be decoded alone at least every `KEYFRAME_EVERY`.
    """

    def __init__(self, path: Path, fps: float, height: int, width: int, recording: bool = False) -> None:
        codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        options = {"crf": "16", "preset": "medium"} if codec == "libx264" else {"qscale": "2"}
        if recording:
            options |= {"g": str(KEYFRAME_EVERY), "bf": "0"}  # not reordered: a seek ends at the frame
        self.container = av.open(path, "w", format="mp4", options={"movflags": "+faststart"})
        rate = Fraction(fps).limit_denominator(1001)
        self.stream = self.container.add_stream(codec, rate=rate, options=options)
        self.stream.width, self.stream.height = width, height
        self.stream.pix_fmt = "yuv444p" if recording and codec == "libx264" else "yuv420p"
        self.stream.codec_context.thread_count = 1  # with more, the bytes depend on the machine
        self.num_frames = 0

    def write(self, frame: Frame, keyframe: bool = False) -> None:
        """Add a frame, which can be decoded alone if it is a keyframe."""
        picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
        # One thread: several convert the edges of small frames differently from one time to the next.
        picture = picture.reformat(format=self.stream.pix_fmt, threads=1)
        if keyframe:
            picture.pict_type = PictureType.I
        self.container.mux(self.stream.encode(picture))
        self.num_frames += 1

    def close(self) -> None:
        """Write what is buffered and the index."""
        try:
            self.container.mux(self.stream.encode(None))
        finally:
            self.container.close()


def _write_mp4(frames: Frames, path: Path, fps: float, scale: int) -> None:
    height, width = (side * scale for side in frames.shape[1:3])
    writer = VideoWriter(path, fps, height + height % 2, width + width % 2)
    with closing(writer):
        for frame in frames:
            writer.write(enlarge(frame, scale, even=True))


def _write_gif(frames: Frames, path: Path, fps: float, scale: int) -> None:
    every = math.ceil(fps / MAX_GIF_FPS)
    frames, fps = frames[::every], fps / every
    # One palette for the whole video: with one per frame, still areas flicker.
    sampled = frames[:: -(-len(frames) // 32)]
    stacked = Image.fromarray(sampled.reshape(-1, frames.shape[2], 3))
    palette = stacked.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    images = [
        Image.fromarray(enlarge(frame, scale)).quantize(palette=palette, dither=Image.Dither.NONE)
        for frame in frames
    ]
    # GIF counts hundredths of a second: rounding times instead of durations keeps the pace, and rounding down
    # puts every frame on screen at its own time when the file is read back.
    times = [int(100 * i / fps) for i in range(len(frames) + 1)]
    durations = [10 * (b - a) for a, b in itertools.pairwise(times)]
    images[0].save(path, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0)
