"""Fragmented MP4 of a live video."""

import io
from fractions import Fraction

import av
import numpy as np

from worldmodel.errors import OutputError
from worldmodel.media import Frames
from worldmodel.media.encoding import default_scale, enlarge


class FragmentedMp4:
    """Encodes a live video chunk by chunk: send `init` first, then what `add` returns for each chunk.

    Every chunk is one fragment (`moof` and `mdat`) that begins with a keyframe and is complete when `add`
    returns, so a player can show it at once. The concatenation is an MP4 (H.264) file.
    """

    def __init__(self, height: int, width: int, fps: float, scale: int | None = None) -> None:
        """Prepare frames of `height` by `width` pixels; `scale` as in `write_video`.

        Raises:
            OutputError: `fps` is not from 1 to 240, or H.264 cannot be encoded on this machine.
        """
        if not 1 <= fps <= 240:
            raise OutputError(f"fps is {fps}; use 1 to 240.")
        if "libx264" not in av.codecs_available:
            raise OutputError("This machine's FFmpeg cannot encode H.264; request JPEG frames instead.")
        self.height, self.width, self.fps = height, width, Fraction(fps).limit_denominator(1001)
        self.scale = scale or default_scale(height, width)
        self.num_frames = 0
        """Frames that were added; the next chunk starts at this index."""
        boxes = self._encode(np.zeros((1, height, width, 3), np.uint8))
        self.init = boxes[b"ftyp"] + boxes[b"moov"]
        """Header that a player needs before the first chunk."""
        profile = self.init.index(b"avcC") + 5  # profile, constraints and level, which name the codec
        self.mime = f'video/mp4; codecs="avc1.{self.init[profile : profile + 3].hex()}"'
        """Type for the MediaSource of a browser."""

    def add(self, frames: Frames) -> bytes:
        """Encode the next chunk, which continues the previous one.

        Raises:
            OutputError: there are no frames, or their size differs from that of the video.
        """
        if not len(frames) or frames.shape[1:] != (self.height, self.width, 3):
            raise OutputError(
                f"Frames of shape {frames.shape} do not fit; pass {self.height}x{self.width} frames."
            )
        boxes = self._encode(frames)
        self.num_frames += len(frames)
        return boxes[b"moof"] + boxes[b"mdat"]

    def _encode(self, frames: Frames) -> dict[bytes, bytes]:
        """Encode a chunk as a separate file and return its boxes.

        A muxer that stays open would hold each fragment back until the next keyframe. The same settings give
        the same codec header every time, so all chunks share `init`.
        """
        buffer = io.BytesIO()
        options = {
            "movflags": "empty_moov+default_base_moof+frag_keyframe+frag_discont+skip_trailer",
            "fragment_index": str(self.num_frames + 1),  # must increase from fragment to fragment
            "avoid_negative_ts": "disabled",  # otherwise every chunk would start at time 0
        }
        # zerolatency: no frame waits for later ones. One keyframe: a second would start a second fragment.
        encoder = {
            "preset": "veryfast",
            "tune": "zerolatency",
            "crf": "18",
            "g": "100000",
            "sc_threshold": "0",
        }
        with av.open(buffer, "w", format="mp4", options=options) as container:
            stream = container.add_stream("libx264", rate=self.fps, options=encoder)
            width, height = self.width * self.scale, self.height * self.scale
            stream.width, stream.height, stream.pix_fmt = width + width % 2, height + height % 2, "yuv420p"
            stream.codec_context.thread_count = 1
            for index, frame in enumerate(frames, start=self.num_frames):
                pixels = enlarge(frame, self.scale, even=True)
                image = av.VideoFrame.from_ndarray(pixels, format="rgb24")
                image.pts, image.time_base = index, 1 / self.fps
                container.mux(stream.encode(image))
            container.mux(stream.encode(None))
        return _boxes(buffer.getvalue())


def _boxes(data: bytes) -> dict[bytes, bytes]:
    """Split an MP4 into its top-level boxes, each with its header."""
    boxes, offset = {}, 0
    while offset < len(data):
        size = int.from_bytes(data[offset : offset + 4])
        boxes[data[offset + 4 : offset + 8]] = data[offset : offset + size]
        offset += size
    return boxes
