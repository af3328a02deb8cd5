"""Random access to a long video file that holds many clips and is opened once for all of them."""

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

import av
import numpy as np
from av.container import InputContainer
from av.video.reformatter import VideoReformatter

from worldmodel.config import ImageSize
from worldmodel.errors import InputError
from worldmodel.media import sniff
from worldmodel.media.image import check_sides
from worldmodel.media.limits import DEMUXERS, MediaLimits
from worldmodel.media.video import Frames, decoding_errors, pixel_aspect, to_frame

MAX_OPEN = 64
"""Files that a process keeps open."""
REMOTE = "hf://"
"""Beginning of the paths of files on the Hub, which are read piece by piece."""


class SharedVideo:
    """A video file that stays open; thread-safe.

    Raises:
        InputError: the file is missing, not a video, or larger than the limits allow.
    """

    def __init__(self, path: str, limits: MediaLimits = MediaLimits()) -> None:
        self.path, self.name, self.limits = path, repr(path), limits
        self.lock = threading.Lock()
        try:
            self.file = open_path(path)
            beginning = self.file.read(sniff.BEGINNING)
            kind = sniff.detect_format(beginning)
            self.file.seek(0)
        except OSError as error:
            raise InputError(f"{self.name} cannot be read ({error.strerror or error}).") from None
        if kind not in limits.video_formats:
            raise InputError(f"{self.name} is {sniff.describe(kind, beginning)}, not a video.")
        with decoding_errors(self.name):
            container: Any = av.open(self.file, "r", format=DEMUXERS[kind])
            self.container: InputContainer = container
            # FFmpeg's objects refer to each other: file and decoder would stay open until a collection.
            weakref.finalize(self, _close, container, self.file)
            self.stream = self.container.streams.video[0]
            codec = self.stream.codec_context
            codec.thread_count = 1
            if codec.codec.canonical_name not in limits.video_codecs:
                raise InputError(f"{self.name} is encoded as {codec.codec.canonical_name}.")
        check_sides(self.name, codec.width, codec.height, limits.max_video_pixels)
        self.aspect = pixel_aspect(self.stream)
        self.step = float(1 / (self.stream.average_rate or self.stream.guessed_rate or 25))

    def read(self, size: ImageSize, times: Sequence[float]) -> Frames:
        """Return the frames that are on screen at times, in seconds and in order.

        Raises:
            InputError: the file is damaged or ends before.
        """
        frames: list[np.ndarray] = []
        converter, tolerance = VideoReformatter(), self.step / 4
        shown: av.VideoFrame | None = None
        picture: np.ndarray | None = None
        end = 0.0
        with self.lock, decoding_errors(self.name):
            for start, frame in self._decode(times[0] + tolerance):
                while shown is not None and len(frames) < len(times):
                    if times[len(frames)] >= start - tolerance:
                        break
                    if picture is None:  # several times may fall on one frame
                        picture = to_frame(shown, converter, size, self.aspect)
                    frames.append(picture)
                if len(frames) == len(times):
                    return np.stack(frames)
                shown, picture, end = frame, None, start + self.step
            while shown is not None and len(frames) < len(times) and times[len(frames)] < end:
                picture = to_frame(shown, converter, size, self.aspect)
                frames.append(picture)
        if len(frames) < len(times):
            raise InputError(f"{self.name} ends before {times[len(frames)]:.2f} s; download it again.")
        return np.stack(frames)

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Height and width of the first frame, as it is shown.

        Raises:
            InputError: it cannot be decoded.
        """
        with self.lock, decoding_errors(self.name):
            _, frame = next(self._decode(0.0))
        wide = round(frame.width * self.aspect)
        return (wide, frame.height) if frame.rotation % 180 else (frame.height, wide)

    def _decode(self, first: float) -> Iterator[tuple[float, av.VideoFrame]]:
        """Yield frames and their times from one at or before `first` on."""
        base = self.stream.time_base
        assert base is not None
        origin = float((self.stream.start_time or 0) * base)
        for back in (0.0, 2.0, first):  # keyframes are indexed by decoding time, which may be earlier
            self.container.seek(int((origin + max(first - back, 0)) / base), stream=self.stream)
            frames = self.container.decode(self.stream)
            frame = next(frames, None)
            if frame is not None and (frame.time or 0) - origin <= first:
                break
        if frame is None:
            return
        yield (frame.time or 0) - origin, frame
        for number, later in enumerate(frames):
            if number >= self.limits.max_decoded_frames:
                raise InputError(f"{self.name} has more than {self.limits.max_decoded_frames} frames.")
            yield (later.time or 0) - origin, later


def _close(container: InputContainer, file: Any) -> None:
    container.close()
    file.close()


def shared_video(path: str) -> SharedVideo:
    """Return a file that this process has open, and open it the first time and when it was replaced.

    Raises:
        InputError: as `SharedVideo`.
    """
    return _shared(path, os.getpid(), _version(path))


def frame_size(path: str) -> tuple[int, int]:
    """Return height and width of the first frame of a file, as it is shown, without reading all of it.

    Raises:
        InputError: as `SharedVideo`, or it cannot be decoded.
    """
    return SharedVideo(path).shape


@lru_cache(maxsize=MAX_OPEN)
def _shared(path: str, process: int, version: tuple[int, ...]) -> SharedVideo:
    return SharedVideo(path)  # a file of the parent process must not be read: its position is shared


def _version(path: str) -> tuple[int, ...]:
    """Return what differs between a local file and one that replaced it."""
    if path.startswith(REMOTE):
        return ()
    try:
        found = os.stat(path)
    except OSError:  # `SharedVideo` says so
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def open_path(path: str) -> Any:
    """Open a local file, or one at an address, which is read piece by piece.

    Raises:
        OSError: there is none.
    """
    if "://" not in path:
        return open(path, "rb")
    import fsspec

    return fsspec.open(path, "rb").open()  # type: ignore[attr-defined]
