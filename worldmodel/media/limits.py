"""Limits on the formats and sizes of images and videos."""

from collections.abc import Sequence
from dataclasses import dataclass

PILLOW_FORMATS = {
    "png": "PNG",
    "jpeg": "JPEG",
    "webp": "WEBP",
    "gif": "GIF",
    "avif": "AVIF",
    "tiff": "TIFF",
    "bmp": "BMP",
}
"""Pillow's names of the image formats."""
DEMUXERS = {
    "mp4": "mp4",
    "matroska": "matroska",
    "avi": "avi",
    "gif": "gif",
    "mpegts": "mpegts",
    "mpeg": "mpeg",
    "flv": "flv",
    "ogg": "ogg",
}
"""FFmpeg's demuxers of the video formats; naming one keeps FFmpeg from probing others."""
TITLES = {
    "png": "PNG",
    "jpeg": "JPEG",
    "webp": "WebP",
    "gif": "GIF",
    "avif": "AVIF",
    "tiff": "TIFF",
    "bmp": "BMP",
    "mp4": "MP4/MOV",
    "matroska": "WebM/MKV",
    "avi": "AVI",
    "mpegts": "MPEG-TS",
    "mpeg": "MPEG-PS",
    "flv": "FLV",
    "ogg": "Ogg",
}
VIDEO_SUFFIXES = (
    *(".mp4", ".mov", ".m4v", ".webm", ".mkv", ".avi", ".gif"),
    *(".ts", ".m2ts", ".mpg", ".mpeg", ".vob", ".flv", ".ogv"),
)
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".avif", ".tif", ".tiff", ".bmp")
"""How the names of files end, where a folder or a table is searched for them."""


@dataclass(frozen=True)
class MediaLimits:
    """Formats that may reach a decoder, and limits that are checked before and while decoding.

    The defaults suit files that a user chose; a server passes narrower limits for uploads.
    """

    image_formats: tuple[str, ...] = tuple(PILLOW_FORMATS)
    video_formats: tuple[str, ...] = tuple(DEMUXERS)
    video_codecs: tuple[str, ...] = (
        *("h264", "hevc", "mpeg4", "vp8", "vp9", "av1", "mjpeg", "gif"),
        *("prores", "ffv1", "mpeg1video", "mpeg2video", "flv1", "theora"),
    )
    max_image_bytes: int = 20 * 2**20
    max_image_pixels: int = 40_000_000
    max_video_bytes: int = 200 * 2**20
    max_video_pixels: int = 4096 * 2304
    max_video_s: float = 600.0
    max_decoded_frames: int = 36_000
    """Ten minutes at 60 frames per second. A header can lie about the duration, this count cannot."""


def list_formats(formats: Sequence[str]) -> str:
    """Return the formats for a message: `PNG, JPEG or GIF`."""
    titles = list(dict.fromkeys(TITLES[name] for name in formats))
    return " or ".join(filter(None, [", ".join(titles[:-1]), titles[-1]]))
