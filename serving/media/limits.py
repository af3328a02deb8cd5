"""Limits of uploads."""

from dataclasses import dataclass

from worldmodel.media import MediaLimits


@dataclass(frozen=True)
class UploadLimits:
    """Accepted formats and sizes of uploads, and limits on decoding one."""

    media: MediaLimits = MediaLimits(
        # Each further format is a further parser for untrusted bytes.
        image_formats=("png", "jpeg", "webp"),
        video_formats=("mp4",),
        video_codecs=("h264",),
        max_video_bytes=64 * 2**20,
        max_image_pixels=24_000_000,
        max_video_s=60.0,
        max_decoded_frames=3600,
    )
    max_frames: int = 512
    """Frames that one call may request."""
    memory_bytes: int = 768 * 2**20
    """Memory beyond what an idle decoder has mapped."""
    cpu_s: int = 10
    timeout_s: float = 10.0
