"""Image and video files: the one place of the library where such bytes are decoded or encoded.

Files are recognised by their first bytes, never by their name, and only a short list of formats reaches a
decoder. Size limits are checked before decoding. Frames are RGB uint8 `[t, h, w, 3]`: their largest
centred part of the wanted shape, resized. Decoders run in this process: a server that takes bytes from
strangers runs these functions in a child process with limits of its own.
"""

import io
import itertools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.container import InputContainer
from av.video.reformatter import VideoReformatter
from jaxtyping import UInt8
from PIL import Image, ImageOps

from worldmodel.config import ImageSize, height_width
from worldmodel.errors import InputError, OutputError
from worldmodel.io import atomic_file
from worldmodel.media import sniff

Frames = UInt8[np.ndarray, "t h w 3"]
Picture = UInt8[np.ndarray, "h w 3"]
Source = str | Path | bytes

MAX_IMAGE_BYTES = 20 * 2**20
MAX_IMAGE_PIXELS = 40_000_000
MAX_VIDEO_BYTES = 200 * 2**20
MAX_VIDEO_PIXELS = 4096 * 2304
MAX_VIDEO_SECONDS = 600.0
MAX_DECODED_FRAMES = 36_000
"""Ten minutes at 60 frames per second; a header can lie about its duration, this count cannot."""
MIN_SIDE = 8

PICTURES = {"png": "PNG", "jpeg": "JPEG", "webp": "WEBP", "gif": "GIF"}
"""Recognised picture formats and Pillow's names for them."""
CONTAINERS = {"mp4": "mp4", "matroska": "matroska", "avi": "avi", "gif": "gif"}
"""Recognised video containers and FFmpeg's demuxers for them; naming one keeps FFmpeg from probing others."""
SEEKABLE = {"mp4", "matroska"}
"""Formats whose index is good enough to start in the middle; the others are read from their start."""
SEEK_WORTH_S = 1.0
"""Less is decoded and passed over."""
MAX_REORDERED = 16
"""Frames that a codec may show later than it stores them (at most, in H.264 and HEVC)."""
VIDEO_CODECS = {"h264", "hevc", "mpeg4", "vp8", "vp9", "av1", "mjpeg", "gif"}
MIN_SHORT_SIDE = 256
"""Smaller frames are enlarged when they are written: players blur or shrink tiny videos."""


# Reading


def read_image(source: Source | Image.Image | np.ndarray, size: ImageSize) -> Picture:
    """Read a PNG, JPEG, WebP or GIF (its first frame) as its centre, `size` pixels large.

    The camera's rotation is applied and transparency becomes white. `source` may also be a picture in
    memory: a Pillow image, or a uint8 array `[h, w]`, `[h, w, 3]` or `[h, w, 4]`.

    Raises:
        InputError: the file is missing, empty, no picture, damaged, too small or too large.
    """
    if isinstance(source, np.ndarray):
        return _centre(_loaded("The image array", _from_array(source)), size)
    if isinstance(source, Image.Image):
        return _centre(_loaded("The image", source), size)
    name, data = _read_bytes(source, MAX_IMAGE_BYTES, "image")
    kind = sniff.recognise(data)
    if kind not in PICTURES:
        raise InputError(
            f"{name} is {sniff.describe(kind, data)}, not an image; use a PNG, JPEG, WebP or GIF."
        )
    return _centre(_decode_picture(name, data, kind), size)


def read_video(
    source: Source, size: ImageSize, fps: float | None, max_frames: int, start_s: float = 0.0
) -> Frames:
    """Read up to `max_frames` frames of an MP4, WebM, MKV, AVI or GIF, each its centre, `size` pixels large.

    Reading starts `start_s` seconds after the file's start. With `fps` the clip is resampled: frame `i` is
    what the file shows `i / fps` seconds later; None keeps the file's own frames. Reading stops once
    `max_frames` are there. A file that ends before the frames or the duration that its header announces is
    an error, not a shorter clip, where reading started at 0 and came to the end: a truncated
    recording would otherwise pair frames with the wrong actions.

    Raises:
        InputError: the file is missing, empty, no video, damaged, cut off, too long or too large, or `fps`
            or `max_frames` is not positive.
    """
    with open_video(source) as video:
        return video.read(size, fps, max_frames, start_s)


@dataclass(frozen=True)
class Video:
    """An opened video file, to be read once."""

    name: str
    container: InputContainer
    seekable: bool

    @property
    def seconds(self) -> float:
        """How long it says it is; 0 where it does not say."""
        stream = next(iter(self.container.streams.video), None)
        if stream is not None and stream.duration and stream.time_base:
            return float(stream.duration * stream.time_base)
        return (self.container.duration or 0) / av.time_base

    def read(self, size: ImageSize, fps: float | None, max_frames: int, start_s: float = 0.0) -> Frames:
        """Read frames as `read_video` does.

        Raises:
            InputError: as `read_video`.
        """
        if fps is not None and not 0 < fps <= 1000:
            raise InputError(f"fps is {fps}; use a number above 0 and up to 1000.")
        if max_frames < 1:
            raise InputError(f"max_frames is {max_frames}; use 1 or more.")
        if not 0 <= start_s < math.inf:
            raise InputError(f"start_s is {start_s}; use 0 or more seconds.")
        with _no_other_fault(self.name):
            shown = _shown(_decode_video(self.name, self.container, self.seekable, start_s), fps, start_s)
            convert = VideoReformatter()  # of all frames: to set one up costs far more than it then takes
            some = itertools.islice(shown, max_frames)
            frames = [_centre(_picture(frame, convert), size) for frame in some]
        if not frames:
            where = f" from {start_s:g} s on" if start_s else ""
            raise InputError(f"{self.name} holds no decodable frame{where}; export it again as MP4 (H.264).")
        return np.stack(frames)


@contextmanager
def open_video(source: Source) -> Iterator[Video]:
    """Open an MP4, WebM, MKV, AVI or GIF: what it says of itself can be asked before it is read.

    Raises:
        InputError: the file is missing, empty, no video, cut off or too large, or its header is damaged.
    """
    with _opened(*_read_video_bytes(source)) as video:
        yield video


def _read_video_bytes(source: Source) -> tuple[str, bytes, str]:
    """Return how to name a video in an error, its bytes and their format."""
    name, data = _read_bytes(source, MAX_VIDEO_BYTES, "video")
    kind = sniff.recognise(data)
    if kind not in CONTAINERS:
        raise InputError(
            f"{name} is {sniff.describe(kind, data)}, not a video; use an MP4, WebM, MKV, AVI or GIF."
        )
    return name, data, kind


def read_observation(
    source: Source | Image.Image | np.ndarray, size: ImageSize, fps: float | None, max_frames: int
) -> Frames:
    """Read an image as a clip of one frame, or a video (a GIF is one) as `read_video` does.

    Frames in memory, uint8 `[t, h, w, 3]`, count as a video whose frames are taken as they are.

    Raises:
        InputError: as `read_image` and `read_video`.
    """
    if isinstance(source, np.ndarray) and source.ndim == 4:
        if not len(source):
            raise InputError("The clip has no frames; pass at least one.")
        return np.stack([read_image(frame, size) for frame in source[:max_frames]])
    if isinstance(source, Image.Image | np.ndarray):
        return read_image(source, size)[None]
    name, data = _read_bytes(source, MAX_VIDEO_BYTES, "observation")
    kind = sniff.recognise(data)
    if kind in CONTAINERS:
        with _opened(name, data, kind) as video:
            return video.read(size, fps, max_frames)
    if kind not in PICTURES:
        raise InputError(
            f"{name} is {sniff.describe(kind, data)}; use a PNG, JPEG, WebP, GIF, MP4, WebM, MKV or AVI."
        )
    if len(data) > MAX_IMAGE_BYTES:
        raise InputError(f"{name} is larger than {MAX_IMAGE_BYTES // 2**20} MiB; shrink it first.")
    return _centre(_decode_picture(name, data, kind), size)[None]


def _read_bytes(source: Source, limit: int, what: str) -> tuple[str, bytes]:
    """Return how to name the source in an error, and its bytes."""
    if isinstance(source, bytes):
        name, data = f"The {what}", source
    else:
        name = repr(str(source))
        if "://" in str(source):
            raise InputError(f"{name} is an address; download the file first and pass its path.")
        try:
            path = Path(source).expanduser()
            if path.is_dir():
                raise InputError(f"{name} is a folder; pass one file in it.")
            if not path.is_file():
                raise InputError(f"There is no file {name}; check the path.")
            with path.open("rb") as file:
                data = file.read(limit + 1)
        except (OSError, RuntimeError):  # RuntimeError: the home of a user who does not exist
            raise InputError(f"{name} cannot be read; check its path and permissions.") from None
    if not data:
        raise InputError(f"{name} is empty (0 bytes); pass a file with content.")
    if len(data) > limit:
        raise InputError(f"{name} is larger than {limit // 2**20} MiB; shrink or cut it first.")
    return name, data


def _check_sides(name: str, width: int, height: int, max_pixels: int) -> None:
    if min(width, height) < MIN_SIDE:
        raise InputError(f"{name} is {width}x{height} pixels; each side must have at least {MIN_SIDE}.")
    if width * height > max_pixels:
        limit = max_pixels / 1e6
        raise InputError(f"{name} is {width}x{height} pixels; shrink it below {limit:.0f} million pixels.")


def _from_array(array: np.ndarray) -> Image.Image:
    if array.dtype != np.uint8:
        raise InputError(f"The image array has type {array.dtype}; pass uint8 values from 0 to 255.")
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise InputError(f"The image array has shape {array.shape}; pass [h, w], [h, w, 3] or [h, w, 4].")
    if not array.size:
        raise InputError(f"The image array has shape {array.shape} and no pixels; pass a picture.")
    return Image.fromarray(np.ascontiguousarray(array))


def _decode_picture(name: str, data: bytes, kind: str) -> Image.Image:
    try:
        with warnings.catch_warnings(action="ignore"):
            image = Image.open(io.BytesIO(data), formats=[PICTURES[kind]])
    except Image.DecompressionBombError:
        limit = MAX_IMAGE_PIXELS // 1_000_000
        raise InputError(f"{name} has too many pixels; shrink it below {limit} million pixels.") from None
    except Exception:  # as in _loaded
        raise InputError(f"{name} is damaged or cut off; export or download it again.") from None
    return _loaded(name, image)


def _loaded(name: str, image: Image.Image) -> Image.Image:
    """Decode, turn upright and flatten a Pillow image whose header has been read."""
    _check_sides(name, *image.size, MAX_IMAGE_PIXELS)
    try:
        image.load()
        return _opaque(ImageOps.exif_transpose(image))
    # Pillow's decoders raise what their parser stumbles on (OSError, SyntaxError, struct.error, ...).
    except Exception:
        raise InputError(f"{name} is damaged or cut off; export or download it again.") from None


def _opaque(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _centre(image: Image.Image, size: ImageSize) -> Picture:
    """Crop the largest centred part of the wanted shape and resize it: no bars, nothing stretched.

    By area average to shrink (no ringing), by Lanczos to enlarge.
    """
    (height, width), (whole_width, whole_height) = height_width(size), image.size
    cut_width = min(whole_width, max(1, round(whole_height * width / height)))
    cut_height = min(whole_height, max(1, round(whole_width * height / width)))
    left, top = (whole_width - cut_width) // 2, (whole_height - cut_height) // 2
    shrinks = cut_width >= width and cut_height >= height
    resample = Image.Resampling.BOX if shrinks else Image.Resampling.LANCZOS
    return np.array(image.resize((width, height), resample, (left, top, left + cut_width, top + cut_height)))


@contextmanager
def _opened(name: str, data: bytes, kind: str) -> Iterator[Video]:
    if sniff.announced_bytes(kind, data) > len(data):
        raise InputError(
            f"{name} is cut off: its header announces more than its {len(data)} bytes; get it again."
        )
    with _no_other_fault(name):
        container = av.open(io.BytesIO(data), "r", format=CONTAINERS[kind])
    with container:
        yield Video(name, container, kind in SEEKABLE)


@contextmanager
def _no_other_fault(name: str) -> Iterator[None]:
    """Say that what goes wrong in the block is the file's fault."""
    try:
        yield
    except InputError:
        raise
    # FFmpeg's wrapper answers damaged bytes with many kinds of exception; each means the same to the reader.
    except Exception:
        raise InputError(f"{name} cannot be decoded as a video; export it again as MP4 (H.264).") from None


def _decode_video(
    name: str, container: InputContainer, seekable: bool, start_s: float
) -> Iterator[tuple[float, float, av.VideoFrame]]:
    """Yield start and end, in seconds after the file's start, and frame, from before `start_s` on.

    A file that is read from its start on is checked for frames missing at the end.
    """
    if not container.streams.video:
        raise InputError(f"{name} has no picture track; use a file with video in it.")
    stream = container.streams.video[0]
    codec = stream.codec_context
    if codec.codec.canonical_name not in VIDEO_CODECS:
        raise InputError(f"{name} is coded as {codec.codec.canonical_name}; export it again as MP4 (H.264).")
    _check_sides(name, codec.width, codec.height, MAX_VIDEO_PIXELS)
    codec.thread_count = 1  # threads would change nothing in the result and can outlive an error
    if (container.duration or 0) / av.time_base > MAX_VIDEO_SECONDS:
        raise InputError(f"{name} is longer than {MAX_VIDEO_SECONDS:.0f} seconds; cut it first.")
    step = float(1 / (stream.average_rate or stream.guessed_rate or 25))
    origin: float | None = None
    # Key frames are found by the time of decoding, which is up to MAX_REORDERED frames ahead of showing.
    before = start_s - MAX_REORDERED * step - SEEK_WORTH_S
    if seekable and before > 0 and stream.time_base:
        origin = float((stream.start_time or 0) * stream.time_base)
        container.seek(int((origin + before) / stream.time_base), stream=stream)
    whole, packets, count, end = origin is None, 0, 0, 0.0
    for packet in container.demux(stream):
        packets += packet.size > 0
        if packet.is_corrupt:
            raise InputError(f"{name} is cut off after {end:.1f} s; export or download it again.")
        for frame in packet.decode():
            _check_sides(name, frame.width, frame.height, MAX_VIDEO_PIXELS)
            if count >= MAX_DECODED_FRAMES:
                raise InputError(f"{name} has more than {MAX_DECODED_FRAMES} frames; cut it first.")
            start = end if frame.time is None else frame.time
            length = float(frame.duration * frame.time_base) if frame.duration and frame.time_base else step
            count, end = count + 1, start + length
            origin = start if origin is None else origin
            yield start - origin, end - origin, frame
    # Counted in packets: an edit list or a hidden reference frame may decode to nothing, rightly.
    if whole and packets < stream.frames:
        raise InputError(f"{name} is cut off after {count} frames; export or download it again.")


def _shown(
    frames: Iterator[tuple[float, float, av.VideoFrame]], fps: float | None, start_s: float
) -> Iterator[av.VideoFrame]:
    """Yield the frames from `start_s` on; with `fps`, what is on screen then, 1 / fps seconds later, ..."""
    # Half a tick of tolerance: containers round times to milliseconds.
    if fps is None:
        yield from (frame for _, end, frame in frames if end > start_s + 1e-3)
        return
    count, end = 0, 0.0
    shown: av.VideoFrame | None = None
    for start, stop, frame in frames:
        while shown is not None and start_s + count / fps < start - 1e-3:
            yield shown
            count += 1
        shown, end = frame, stop
    while shown is not None and start_s + count / fps < end - 1e-3:
        yield shown
        count += 1


def _picture(frame: av.VideoFrame, convert: VideoReformatter) -> Image.Image:
    # One thread: by default it starts one for every core, whatever the frame's size.
    image = Image.fromarray(convert.reformat(frame, format="rgb24", threads=1).to_ndarray())
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image


# Writing


def write_video(frames: Frames, path: str | Path, fps: float, scale: int | None = None) -> None:
    """Write a clip as .mp4 (H.264) or .gif, whole or not at all.

    `scale` repeats each pixel that many times along both sides; None enlarges small frames until the short
    side has at least 256 pixels. An odd side of an .mp4 gains one pixel, as its colour coding asks.

    Raises:
        OutputError: the suffix is neither, a GIF would be faster than 50 fps, or the place cannot be written.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in {".mp4", ".gif"}:
        raise OutputError(f"{str(path)!r} ends in {suffix or 'nothing'!r}; name it .mp4 or .gif.")
    if not len(frames) or not frames.size:
        raise OutputError(f"There are no frames to write to {str(path)!r}; generate at least one.")
    if not 0 < fps <= (50 if suffix == ".gif" else 240):
        raise OutputError(f"fps is {fps}; use 1 to {50 if suffix == '.gif' else 240} for {suffix}.")
    scale = scale or max(1, -(-MIN_SHORT_SIDE // min(frames.shape[1:3])))
    with atomic_file(path) as temporary:
        (_write_gif if suffix == ".gif" else _write_mp4)(frames, temporary, fps, scale)


def _enlarged(frame: Picture, scale: int) -> Picture:
    return frame.repeat(scale, axis=0).repeat(scale, axis=1)


def _write_mp4(frames: Frames, path: Path, fps: float, scale: int) -> None:
    height, width = (side * scale for side in frames.shape[1:3])
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    options = {"crf": "16", "preset": "medium"} if codec == "libx264" else {"qscale": "2"}
    with av.open(path, "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001), options=options)
        stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"
        stream.codec_context.thread_count = 1  # with more, the bytes depend on the machine
        for frame in frames:
            pixels = np.pad(_enlarged(frame, scale), ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))


def _write_gif(frames: Frames, path: Path, fps: float, scale: int) -> None:
    # One palette for the clip: with one per frame, still areas flicker.
    some = frames[:: -(-len(frames) // 32)]
    every = Image.fromarray(some.reshape(-1, frames.shape[2], 3))
    palette = every.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    images = [
        Image.fromarray(_enlarged(frame, scale)).quantize(palette=palette, dither=Image.Dither.NONE)
        for frame in frames
    ]
    # GIF counts hundredths of a second: rounding times, not lengths, keeps the pace, and rounding them down
    # has every frame on screen at its own time when the file is read back.
    times = [int(100 * i / fps) for i in range(len(frames) + 1)]
    durations = [10 * (b - a) for a, b in itertools.pairwise(times)]
    images[0].save(path, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0)
