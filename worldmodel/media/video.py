"""Reading of videos: decoding, seeking and resampling in time."""

import io
import itertools
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import av
import numpy as np
from av.container import InputContainer
from av.video.reformatter import Interpolation, VideoReformatter
from av.video.stream import VideoStream
from jaxtyping import UInt8
from PIL import Image

from worldmodel.config import ImageSize, height_width
from worldmodel.errors import InputError
from worldmodel.media import sniff
from worldmodel.media.hdr import HDR_TRANSFERS, tone_mapped
from worldmodel.media.image import Frame, check_sides, crop_and_resize
from worldmodel.media.limits import DEMUXERS, MediaLimits, list_formats
from worldmodel.media.source import Source, read_bytes

Frames = UInt8[np.ndarray, "t h w 3"]
SEEKABLE = {"mp4", "matroska"}
"""Formats with an index that is precise enough to seek; the others are decoded from their start."""
ESTIMATED = {"mpegts", "mpeg", "flv", "ogg"}
"""Formats whose headers have no exact duration of each track."""
TRACK_DURATION = re.compile(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)")
MIN_SEEK_S = 1.0
"""Shorter distances are decoded and skipped instead of seeking."""
MAX_ASPECT = 8
"""Pixels that a file calls wider or higher than this are taken to be square."""
MAX_REORDERED = 16
"""Frames by which a codec's order of storage and of display can differ (at most, in H.264 and HEVC)."""


def read_video(
    source: Source,
    size: ImageSize,
    fps: float | None,
    max_frames: int,
    start_s: float = 0.0,
    limits: MediaLimits = MediaLimits(),
) -> Frames:
    """Read up to `max_frames` frames of a video or GIF, each cropped around its centre to `size`.

    A file that ends before the frames or the duration that its header announces is an error, not a shorter
    clip, where it is read from its start to its end: a truncated recording would otherwise pair frames with
    the wrong actions.

    Args:
        source: a path or the bytes of a file.
        size: side or (height, width) of the result in pixels.
        fps: frame `i` of the result is on screen `i / fps` seconds after `start_s`; None keeps the file's own
            frames.
        max_frames: frames after these are not decoded.
        start_s: seconds after the start of the file at which reading starts.
        limits: formats and sizes that are accepted.

    Raises:
        InputError: the file is missing, empty, not a video, damaged, cut off, too long or too large, or
            `fps`, `max_frames` or `start_s` is out of range.
    """
    with open_video(source, limits) as video:
        return video.read(size, fps, max_frames, start_s)


@dataclass(frozen=True)
class Video:
    """An open video file; it can be read once."""

    name: str
    data: bytes
    container: InputContainer
    seekable: bool
    limits: MediaLimits

    @cached_property
    def duration_s(self) -> float:
        """Duration of the video track from the header, else from its packets; 0 without a track.

        Raises:
            InputError: the packets cannot be read.
        """
        stream = next(iter(self.container.streams.video), None)
        if stream is None or not stream.time_base:
            return 0.0
        is_exact = self.container.format.name not in ESTIMATED
        if stream.duration and is_exact:
            return float(stream.duration * stream.time_base)
        start = float((stream.start_time or 0) * stream.time_base)
        # Of Matroska and WebM, counted from 0: of the track, or of the longest, such as that of the sound.
        tagged = TRACK_DURATION.fullmatch(stream.metadata.get("DURATION", ""))
        if tagged:
            hours, minutes, seconds = map(float, tagged.groups())
            return 3600 * hours + 60 * minutes + seconds - start
        if self.container.duration and len(self.container.streams) == 1 and is_exact:
            return self.container.duration / av.time_base - start
        # Browsers record files without a duration.
        with decoding_errors(self.name), open_video_bytes(self.name, self.data, self.limits) as other:
            return _last_end(other.container.demux(video=0), 1 / _rate(stream)) - start

    def read(
        self,
        size: ImageSize,
        fps: float | None,
        max_frames: int,
        start_s: float = 0.0,
        newest: bool = False,
    ) -> Frames:
        """Read frames as `read_video` does; with `newest`, the last `max_frames` instead of the first.

        Raises:
            InputError: as `read_video`.
        """
        if fps is not None and not 0 < fps <= 1000:
            raise InputError(f"fps is {fps}; use a number above 0 and up to 1000.")
        if max_frames < 1:
            raise InputError(f"max_frames is {max_frames}; use 1 or more.")
        if not 0 <= start_s < math.inf:
            raise InputError(f"start_s is {start_s}; use 0 or more seconds.")
        with decoding_errors(self.name):
            aspect = pixel_aspect(self._stream())
            converter = VideoReformatter()  # of all frames: creating one costs more than a conversion
            resampled = _resample(self.decode(start_s), fps, start_s)
            chosen = deque(resampled, max_frames) if newest else itertools.islice(resampled, max_frames)
            frames = [to_frame(frame, converter, size, aspect) for _, frame in chosen]
        if not frames:
            part = f" from {start_s:g} s on" if start_s else ""
            raise InputError(f"{self.name} has no decodable frame{part}; export it again as MP4 (H.264).")
        return np.stack(frames)

    def sample(
        self, fps: float | None, max_side: int, start_s: float = 0.0, end_s: float | None = None
    ) -> Iterator[tuple[float, Frame]]:
        """Yield times in seconds and whole frames, shrunk until their longer side has `max_side` pixels.

        Args:
            fps: as in `read_video`.
            max_side: frames that are smaller keep their size.
            start_s: seconds after the start of the file at which reading starts.
            end_s: seconds after the start of the file before which it ends; None: at the file's end.

        Raises:
            InputError: as `read_video`.
        """
        converter = VideoReformatter()
        with decoding_errors(self.name):
            aspect = pixel_aspect(self._stream())
            for time, frame in _resample(self.decode(start_s), fps, start_s):
                if end_s is not None and time >= end_s - 1e-3:
                    return
                yield time, _shrink(frame, max_side, converter, aspect)

    def _stream(self) -> VideoStream:
        """Return the video track, if it is within the limits."""
        name, container, limits = self.name, self.container, self.limits
        if not container.streams.video:
            raise InputError(f"{name} has no video track; use a file with one.")
        stream = container.streams.video[0]
        codec = stream.codec_context
        if codec.codec.canonical_name not in limits.video_codecs:
            raise InputError(
                f"{name} is encoded as {codec.codec.canonical_name}; export it again as MP4 (H.264)."
            )
        check_sides(name, codec.width, codec.height, limits.max_video_pixels)
        codec.thread_count = 1  # more would not change the result, and threads can outlive an error
        if (container.duration or 0) / av.time_base > limits.max_video_s:
            raise InputError(f"{name} is longer than {limits.max_video_s:.0f} seconds; cut it first.")
        return stream

    def decode(self, start_s: float) -> Iterator[tuple[float, float, av.VideoFrame]]:
        """Yield (start, end, frame), in seconds after the start of the file, from before `start_s` on.

        A file that is read from its start is checked for frames missing at its end.
        """
        name, container, limits, stream = self.name, self.container, self.limits, self._stream()
        step = 1 / _rate(stream)
        origin: float | None = None
        # Keyframes are indexed by decoding time, which is up to MAX_REORDERED frames before presentation.
        before = start_s - MAX_REORDERED * step - MIN_SEEK_S
        if self.seekable and before > 0 and stream.time_base:
            origin = float((stream.start_time or 0) * stream.time_base)
            container.seek(int((origin + before) / stream.time_base), stream=stream)
        from_start, packets, count, end = origin is None, 0, 0, 0.0
        for packet in container.demux(stream):
            packets += packet.size > 0
            if packet.is_corrupt:
                raise InputError(f"{name} is cut off after {end:.1f} s; export or download it again.")
            for frame in packet.decode():
                check_sides(name, frame.width, frame.height, limits.max_video_pixels)
                if count >= limits.max_decoded_frames:
                    raise InputError(
                        f"{name} has more than {limits.max_decoded_frames} frames; cut it first."
                    )
                start = end if frame.time is None else frame.time
                length = (
                    float(frame.duration * frame.time_base) if frame.duration and frame.time_base else step
                )
                count, end = count + 1, start + length
                origin = start if origin is None else origin
                yield start - origin, end - origin, frame
        # Packets and their duration must both fall short of the header: a packet may rightly decode to no
        # frame, and FFmpeg does not read the packets that the edit list of a trimmed video hides.
        lacks = from_start and packets < stream.frames
        if lacks and end - (origin or 0.0) < self.duration_s - 0.5 * step:
            raise InputError(f"{name} is cut off after {count} frames; export or download it again.")


@contextmanager
def open_video(source: Source, limits: MediaLimits = MediaLimits()) -> Iterator[Video]:
    """Open a video or GIF, whose duration is then known before it is read.

    Raises:
        InputError: the file is missing, empty, not a video, cut off or too large, or its header is damaged.
    """
    name, data = read_bytes(source, limits.max_video_bytes, "video")
    with open_video_bytes(name, data, limits) as video:
        yield video


@contextmanager
def open_video_bytes(name: str, data: bytes, limits: MediaLimits) -> Iterator[Video]:
    """Open the bytes of a video file; `name` is used in messages.

    Raises:
        InputError: as `open_video`.
    """
    kind = sniff.detect_format(data)
    if kind not in limits.video_formats:
        accepted = list_formats(limits.video_formats)
        raise InputError(f"{name} is {sniff.describe(kind, data)}, not a video; use an {accepted}.")
    if sniff.announced_bytes(kind, data) > len(data):
        raise InputError(
            f"{name} is cut off: its header announces more than its {len(data)} bytes; download it again."
        )
    with decoding_errors(name):
        container = av.open(io.BytesIO(data), "r", format=DEMUXERS[kind])
    with container:
        yield Video(name, data, container, kind in SEEKABLE, limits)


@contextmanager
def decoding_errors(name: str) -> Iterator[None]:
    """Turn every error of the block into an `InputError` about the file."""
    try:
        yield
    except InputError:
        raise
    # FFmpeg's wrapper raises many types for damaged bytes; all mean the same to the user.
    except Exception:
        raise InputError(f"{name} cannot be decoded as a video; export it again as MP4 (H.264).") from None


def _rate(stream: VideoStream) -> float:
    return float(stream.average_rate or stream.guessed_rate or 25)


def _last_end(packets: Iterable[av.Packet], step: float) -> float:
    """Return when the last packet that has a time ends, in seconds; one without a duration lasts `step`."""
    found = 0.0
    for packet in packets:
        if packet.pts is not None:
            length = float(packet.duration * packet.time_base) if packet.duration else step
            found = max(found, float(packet.pts * packet.time_base) + length)
    return found


def _resample(
    frames: Iterator[tuple[float, float, av.VideoFrame]], fps: float | None, start_s: float
) -> Iterator[tuple[float, av.VideoFrame]]:
    """Yield times and frames from `start_s` on; with `fps`, those on screen 0, 1, 2, ... / fps later."""
    # 1 ms of tolerance: containers round times to milliseconds.
    if fps is None:
        yield from ((start, frame) for start, end, frame in frames if end > start_s + 1e-3)
        return
    count, end = 0, 0.0
    shown: av.VideoFrame | None = None
    for start, stop, frame in frames:
        while shown is not None and start_s + count / fps < start - 1e-3:
            yield start_s + count / fps, shown
            count += 1
        shown, end = frame, stop
    while shown is not None and start_s + count / fps < end - 1e-3:
        yield start_s + count / fps, shown
        count += 1


def pixel_aspect(stream: VideoStream) -> float:
    """Return how much wider than high the pixels of a track are, as players show them."""
    aspect = float(stream.sample_aspect_ratio or 1)
    return aspect if 1 / MAX_ASPECT <= aspect <= MAX_ASPECT else 1.0


def to_frame(
    frame: av.VideoFrame, converter: VideoReformatter, size: ImageSize, aspect: float = 1.0
) -> Frame:
    """Return a decoded frame as it is shown, cropped and resized to `size`.

    Args:
        frame: the frame.
        converter: of all frames of the file.
        size: side or (height, width) of the result in pixels.
        aspect: how much wider than high its pixels are (`pixel_aspect`).
    """
    if frame.color_trc in HDR_TRANSFERS:  # shrunk before its light is computed, but not below `size`
        room = min(1.0, 2 * max(height_width(size)) / min(frame.width, frame.height))
        pixels = _pixels(frame, converter, round(frame.width * room), round(frame.height * room))
    else:
        pixels = _pixels(frame, converter)
    if not frame.rotation and aspect == 1 and pixels.shape[:2] == height_width(size):
        return pixels
    image = Image.fromarray(pixels)
    if not frame.rotation:
        return crop_and_resize(image, size, aspect)
    turned = image.rotate(frame.rotation, expand=True)
    return crop_and_resize(turned, size, 1 / aspect if frame.rotation % 180 else aspect)


def _pixels(
    frame: av.VideoFrame, converter: VideoReformatter, width: int | None = None, height: int | None = None
) -> Frame:
    """Return a decoded frame as RGB, of another size if one is given; HDR is tone mapped."""
    is_hdr = frame.color_trc in HDR_TRANSFERS
    # One thread: by default one is started for every core, even for small frames.
    pixels = converter.reformat(
        frame,
        width=width,
        height=height,
        format="rgb48le" if is_hdr else "rgb24",
        interpolation=Interpolation.AREA if width else None,
        threads=1,
    ).to_ndarray()
    return tone_mapped(pixels, frame.color_trc, frame.color_primaries) if is_hdr else pixels


def _shrink(frame: av.VideoFrame, max_side: int, converter: VideoReformatter, aspect: float) -> Frame:
    """Return a whole frame as it is shown, with at most `max_side` pixels along a side."""
    wide = frame.width * aspect
    scale = min(1.0, max_side / max(wide, frame.height))
    width, height = (max(1, round(side * scale)) for side in (wide, frame.height))
    small = _pixels(frame, converter, width, height)
    return np.rot90(small, frame.rotation // 90) if frame.rotation else small
