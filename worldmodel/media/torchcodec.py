"""Decoding by torchcodec, where training reads frames at given times.

PyAV still opens the file and checks its header; frames are cropped and resized as with PyAV.
"""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from PIL import Image

from worldmodel.config import DecoderName
from worldmodel.errors import ConfigError

BATCH = 16
"""Frames that are decoded at once, and held at their full size."""

_decoder: DecoderName = "pyav"


def use_decoder(name: DecoderName) -> None:
    """Set the decoder of this process.

    Raises:
        ConfigError: torchcodec cannot be imported.
    """
    global _decoder
    if name != "pyav" and name != _decoder:
        try:
            importlib.import_module("torchcodec.decoders")
        except (ImportError, OSError, RuntimeError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ConfigError(
                f"data.decoder is {name}, but torchcodec cannot be imported ({reason}); install a build "
                "of it for this torch and the shared libraries of FFmpeg, or use data.decoder=pyav."
            ) from None
    _decoder = name


def is_used() -> bool:
    """Return whether torchcodec decodes."""
    return _decoder != "pyav"


class TimedFrames:
    """The frames of a video by the time at which they are on screen.

    Args:
        source: the bytes of a file, or an open file.
    """

    def __init__(self, source: Any) -> None:
        from torchcodec.decoders import VideoDecoder  # type: ignore[import-not-found]

        self.decoder = VideoDecoder(source, dimension_order="NHWC", num_ffmpeg_threads=1)

    def at(self, times: Sequence[float]) -> Iterator[Image.Image]:
        """Yield the frames on screen at times, in seconds after the start of the file, up to its end."""
        start = self.decoder.metadata.begin_stream_seconds
        inside = [start + time for time in times if start + time < self.decoder.metadata.end_stream_seconds]
        for first in range(0, len(inside), BATCH):
            frames = self.decoder.get_frames_played_at(inside[first : first + BATCH])
            yield from map(Image.fromarray, frames.data.numpy())
