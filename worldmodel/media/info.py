"""Sizes, lengths and thumbnails of video and image files."""

from collections.abc import Iterator
from dataclasses import dataclass

import av
import numpy as np

from worldmodel.errors import InputError
from worldmodel.media import sniff
from worldmodel.media.image import Frame, load_image
from worldmodel.media.limits import MediaLimits
from worldmodel.media.source import Source, read_bytes
from worldmodel.media.video import Video, decoding_errors, open_video_bytes, pixel_aspect


@dataclass(frozen=True)
class MediaInfo:
    """Description of a file; an image has one frame, no rate and no duration."""

    duration_s: float
    fps: float | None
    width: int
    """Pixels, as the file is shown."""
    height: int
    num_frames: int
    codec: str


def probe(source: Source, limits: MediaLimits = MediaLimits(), decode: bool = True) -> MediaInfo:
    """Describe a video or an image.

    Args:
        source: a path or the bytes of a file.
        limits: formats and sizes that are accepted.
        decode: decode every frame of a video, so that damage is found and frames are counted; otherwise the
            header is believed.

    Raises:
        InputError: as `read_video` and `read_image`.
    """
    name, data = read_bytes(source, limits.max_video_bytes, "file")
    kind = sniff.detect_format(data)
    if _is_image(kind, limits):
        width, height = load_image(name, data, limits).size
        return MediaInfo(0.0, None, width, height, 1, kind)
    with open_video_bytes(name, data, limits) as video, decoding_errors(name):
        return _probe_video(video, decode)


def sample_frames(
    source: Source,
    fps: float | None,
    max_side: int,
    start_s: float = 0.0,
    end_s: float | None = None,
    limits: MediaLimits = MediaLimits(),
) -> Iterator[tuple[float, Frame]]:
    """Yield times and whole frames as `Video.sample` does; an image has one, at 0 s.

    Raises:
        InputError: as `read_video` and `read_image`.
    """
    name, data = read_bytes(source, limits.max_video_bytes, "file")
    if _is_image(sniff.detect_format(data), limits):
        image = load_image(name, data, limits)
        image.thumbnail((max_side, max_side))
        yield 0.0, np.array(image)
        return
    with open_video_bytes(name, data, limits) as video:
        yield from video.sample(fps, max_side, start_s, end_s)


def _is_image(kind: str, limits: MediaLimits) -> bool:
    return kind in limits.image_formats and kind not in limits.video_formats


def _probe_video(video: Video, decode: bool) -> MediaInfo:
    count, duration = 0, 0.0
    first: av.VideoFrame | None = None
    for _, end, frame in video.decode(0.0):
        first = first or frame
        count, duration = count + 1, end
        if not decode:
            break
    if first is None:
        raise InputError(f"{video.name} has no decodable frame; export it again as MP4 (H.264).")
    stream = video.container.streams.video[0]
    fps = float(stream.average_rate or stream.guessed_rate or 0)
    if not decode:
        duration = video.duration_s
        count = stream.frames or round(duration * fps)
    turned = first.rotation % 180 != 0
    wide = round(first.width * pixel_aspect(stream))
    width, height = (first.height, wide) if turned else (wide, first.height)
    return MediaInfo(duration, fps or None, width, height, count, stream.codec_context.codec.canonical_name)
