"""Containers, codecs and colours beside those of the web: read as players show them, or named."""

import io
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from worldmodel import media
from worldmodel.errors import InputError
from worldmodel.media import hdr
from worldmodel.media.limits import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from worldmodel.media.shared_video import SharedVideo

FPS, COUNT = 25, 30
GREY = np.arange(40, 40 + 6 * COUNT, 6, dtype=np.uint8)


def films(count: int = COUNT, height: int = 64, width: int = 96) -> np.ndarray:
    """Frames whose upper half has the brightness of their number, and whose lower one four colours."""
    frames = np.empty((count, height, width, 3), np.uint8)
    frames[:, : height // 2] = GREY[:count, None, None, None]
    colours = [(220, 40, 40), (40, 200, 60), (50, 70, 220), (230, 210, 50)]
    for number, colour in enumerate(colours):
        frames[:, height // 2 :, number * width // 4 : (number + 1) * width // 4] = colour
    return frames


def write(
    path: Path,
    codec: str,
    frames: np.ndarray,
    pixel_format: str = "yuv420p",
    sound_s: float = 0.0,
    aspect: Fraction | None = None,
    container: Mapping[str, str] | None = None,
    **options: str,
) -> Path:
    """Write a video, with a track of silence if it has a length."""
    with av.open(path, "w", options=dict(container or {})) as out:
        stream = out.add_stream(codec, rate=FPS, options=options)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.bit_rate = pixel_format, 8_000_000
        if aspect:
            stream.codec_context.sample_aspect_ratio = aspect
        sound = (
            out.add_stream("libopus" if path.suffix == ".webm" else "aac", rate=48000) if sound_s else None
        )
        for frame in frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode(None))
        if sound is not None:
            samples = av.AudioFrame.from_ndarray(np.zeros((1, 960), np.float32), "fltp", "mono")
            samples.sample_rate = 48000
            for number in range(round(sound_s * 50)):
                samples.pts, samples.time_base = 960 * number, Fraction(1, 48000)
                out.mux(sound.encode(samples))
            out.mux(sound.encode(None))
    return path


CASES = {
    "prores.mov": ("prores_ks", "yuv422p10le", {}),
    "h264.mov": ("libx264", "yuv420p", {}),
    "ffv1.mkv": ("ffv1", "yuv444p", {}),
    "ffv1.avi": ("ffv1", "bgr0", {}),
    "h264.ts": ("libx264", "yuv420p", {}),
    "mpeg2.ts": ("mpeg2video", "yuv420p", {}),
    "h264.m2ts": ("libx264", "yuv420p", {}),
    "mpeg2.mpg": ("mpeg2video", "yuv420p", {}),
    "mpeg1.mpg": ("mpeg1video", "yuv420p", {}),
    "dvd.vob": ("mpeg2video", "yuv420p", {}),
    "flv1.flv": ("flv", "yuv420p", {}),
    "h264.flv": ("libx264", "yuv420p", {}),
    "vp8.ogv": ("libvpx", "yuv420p", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_videos_of_other_formats_are_read(tmp_path: Path, name: str) -> None:
    codec, pixel_format, options = CASES[name]
    frames = films()
    path = write(tmp_path / name, codec, frames, pixel_format, **options)
    found = media.read_video(path, (64, 96), None, 99)
    assert found.shape == frames.shape
    assert np.abs(found[:, 8:24, 8:88].mean(axis=(1, 2, 3)) - GREY).max() < 3
    assert (
        np.abs(found[:, 40:56, [12, 36, 60, 84]].astype(int) - frames[:, 40:56, [12, 36, 60, 84]]).mean() < 6
    )
    with media.open_video(path) as opened:
        assert opened.duration_s == pytest.approx(COUNT / FPS, abs=0.5 / FPS)
    # The frames on screen at 10 per second, from the middle of the file on.
    later = media.read_video(path, (64, 96), 10, 99, start_s=0.6)
    expected = GREY[(np.arange(15, 15 + 2.5 * len(later), 2.5)).astype(int)]
    assert len(later) == 6
    assert np.abs(later[:, 8:24, 8:88].mean(axis=(1, 2, 3)) - expected).max() < 3
    info = media.probe(path)
    assert (info.width, info.height, info.num_frames) == (96, 64, COUNT)
    assert info.fps == pytest.approx(FPS)


@pytest.mark.parametrize("name", CASES)
def test_a_cut_one_is_refused(tmp_path: Path, name: str) -> None:
    """Where the container says what is missing; MPEG-TS and MPEG-PS do so within a packet alone."""
    codec, pixel_format, options = CASES[name]
    data = write(tmp_path / name, codec, films(), pixel_format, **options).read_bytes()
    for share in (0.31, 0.57, 0.93):
        cut = data[: int(share * len(data)) | 1]
        with pytest.raises(InputError, match="cut off"):
            media.read_video(cut, 64, None, 99)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AVIF", {"quality": 95}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "jpeg", "quality": 95}),
        ("BMP", {}),
    ],
)
def test_images_of_other_formats_are_read(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    frame, out = films(1)[0], io.BytesIO()
    Image.fromarray(frame).save(out, name, **options)
    data = out.getvalue()
    found = media.read_image(data, (64, 96))
    assert np.abs(found.astype(int) - frame).mean() < (0.01 if "quality" not in options else 6)
    assert media.probe(data).codec == name.lower()
    with pytest.raises(InputError, match="not a video"):
        media.read_video(data, 64, FPS, 9)
    for share in (0.2, 0.6, 0.9):
        with pytest.raises(InputError):
            media.read_image(data[: int(share * len(data))], 64)


def test_tiff_of_16_bits_is_read_and_of_32_bits_named() -> None:
    shades = np.linspace(0, 2**16 - 1, 64 * 64).astype(np.uint16).reshape(64, 64)
    for pixels in (shades, shades.astype(np.int32), shades.astype(np.float32) / 65535):
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "TIFF")
        if pixels.dtype == np.uint16:
            assert np.array_equal(media.read_image(out.getvalue(), 64)[..., 0], shades >> 8)
        else:
            with pytest.raises(InputError, match="32 bits as pixels; export"):
                media.read_image(out.getvalue(), 64)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11" + bytes(99), "a WMV or ASF file"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99), "a HEIC image"),
    ],
)
def test_what_is_not_read_is_named(data: bytes, words: str) -> None:
    for read in (lambda: media.read_video(data, 64, FPS, 9), lambda: media.read_image(data, 64)):
        with pytest.raises(InputError, match=words):
            read()


@pytest.mark.parametrize("suffix", [".mkv", ".webm"])
def test_sound_that_is_longer_than_the_picture_adds_no_frames(tmp_path: Path, suffix: str) -> None:
    codec = "libx264" if suffix == ".mkv" else "libvpx"
    path = write(tmp_path / f"long{suffix}", codec, films(), sound_s=5.0)
    with media.open_video(path) as opened:
        assert opened.container.duration > 4 * av.time_base
        assert opened.duration_s == pytest.approx(COUNT / FPS, abs=0.5 / FPS)
    # The same without the lengths of the tracks, which FFmpeg writes as tags.
    bare = path.read_bytes().replace(b"DURATION", b"VARIATIO")
    with media.open_video(bare) as opened:
        assert opened.container.streams.video[0].metadata.get("DURATION") is None
        assert opened.duration_s == pytest.approx(COUNT / FPS, abs=0.5 / FPS)


@pytest.mark.parametrize("name", ["wide.mp4", "wide.mkv", "wide.mpg"])
def test_pixels_that_are_not_square_are_shown_as_players_show_them(tmp_path: Path, name: str) -> None:
    """A circle that is stored 96 pixels wide and 128 high is one again where pixels are 4:3."""
    y, x = np.mgrid[:128, :192]
    disc = (np.hypot((x - 95.5) * 4 / 3, y - 63.5) < 48)[..., None] * np.full(3, 255, np.uint8)
    codec = "mpeg2video" if name.endswith("mpg") else "libx264"
    # MPEG-2 knows shapes of pictures: 192 x 128 at 16:9 has pixels of 32:27.
    aspect = Fraction(32, 27) if codec == "mpeg2video" else Fraction(4, 3)
    path = write(tmp_path / name, codec, disc.astype(np.uint8)[None].repeat(12, 0), aspect=aspect)
    info = media.probe(path)
    assert (info.width, info.height) == (round(192 * aspect), 128)
    shown = media.read_video(path, (128, round(192 * aspect)), None, 1)[0] > 127
    tall, wide = shown.any(axis=(1, 2)).sum(), shown.any(axis=(0, 2)).sum()
    assert wide / tall == pytest.approx(float(aspect) * 3 / 4, abs=0.03)
    square = media.read_video(path, 128, None, 1)[0] > 127
    assert square.any(axis=(0, 2)).sum() == pytest.approx(wide, abs=2)
    ((_, small),) = media.sample_frames(path, None, 64, end_s=0.01)
    assert small.shape == (round(64 / 192 / aspect * 128), 64, 3)
    if codec == "libx264":
        (again,) = SharedVideo(str(path)).read(128, [0.01])
        assert np.array_equal(again > 127, square)


def levels(transfer: int) -> np.ndarray:
    """Levels, 0 to 1, of 0, 1, 20, 100, 203, 400 and 1000 cd/m² by the formulas of ITU-R BT.2100."""
    light = np.array([0.0, 1, 20, 100, 203, 400, 1000])
    if transfer == hdr.PQ:
        power = (light / 10_000) ** 0.1593017578125
        return ((0.8359375 + 18.8515625 * power) / (1 + 18.6875 * power)) ** 78.84375
    scene = (light / 1000) ** (1 / 1.2)
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    return np.where(scene <= 1 / 12, np.sqrt(3 * scene), a * np.log(np.maximum(12 * scene - b, 1e-9)) + c)


@pytest.mark.parametrize("transfer", hdr.HDR_TRANSFERS)
def test_hdr_is_tone_mapped(tmp_path: Path, transfer: int) -> None:
    """Greys stay grey and rise with the light, and those of usual light are those of a usual screen."""
    found = levels(transfer)
    luma = np.round(64 + 876 * found).astype(np.uint16).repeat(32)[None].repeat(64, 0)
    path = tmp_path / "hdr.mkv"
    with av.open(path, "w") as out:
        stream = out.add_stream("ffv1", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = luma.shape[1], luma.shape[0], "yuv420p10le"
        context = stream.codec_context
        context.color_primaries, context.color_trc, context.colorspace = hdr.BT2020, transfer, 9
        for number in range(4):
            frame = av.VideoFrame(luma.shape[1], luma.shape[0], "yuv420p10le")
            for plane, values in zip(
                frame.planes, (luma, *[np.full((32, 112), 512, np.uint16)] * 2), strict=True
            ):
                row = plane.line_size // 2
                plane.update(np.pad(values, ((0, 0), (0, row - values.shape[1]))).tobytes())
            frame.colorspace, frame.color_range = 9, 1
            frame.color_trc, frame.color_primaries = transfer, hdr.BT2020
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    seen = media.read_video(path, luma.shape, None, 1)[0][32, 16::32].astype(int)
    assert (seen.max(axis=1) - seen.min(axis=1)).max() <= 2, "grey"
    grey = seen[:, 1]
    assert (np.diff(grey) > 5).all(), "told apart, also above the reference white"
    assert grey[0] <= 1
    assert grey[-1] >= 253
    srgb = 255 * (1.055 * (np.array([1, 20, 100]) / 203) ** (1 / 2.4) - 0.055)
    assert np.abs(grey[1:4] - srgb).max() < 4, "not compressed below half of the reference white"
    (again,) = SharedVideo(str(path)).read(luma.shape, [0.0])
    assert np.array_equal(again[32, 16::32], seen)
    ((_, small),) = media.sample_frames(path, None, 112, end_s=0.01)
    assert np.abs(small[16, 8::16].astype(int) - seen).max() < 3


def test_colours_of_bt2020_are_those_of_bt709_where_both_have_them() -> None:
    """A red of BT.709 in cd/m², as primaries of BT.2020 in PQ, is that red again."""
    to_bt2020 = np.linalg.inv(hdr.TO_BT709.astype(float))
    for colour in np.eye(3) * 0.4 + 0.05:
        light = to_bt2020 @ colour * hdr.WHITE / 10_000
        power = light**0.1593017578125
        level = ((0.8359375 + 18.8515625 * power) / (1 + 18.6875 * power)) ** 78.84375
        pixels = np.round(65535 * level).astype(np.uint16)[None, None]
        srgb = 255 * (1.055 * colour ** (1 / 2.4) - 0.055)
        assert np.abs(hdr.tone_mapped(pixels, hdr.PQ, hdr.BT2020)[0, 0] - srgb).max() < 3


def test_hdr_images_are_named() -> None:
    out = io.BytesIO()
    Image.fromarray(films(1)[0]).save(out, "AVIF")
    data = bytearray(out.getvalue())
    at = data.index(b"colrnclx") + 10
    data[at : at + 2] = (16).to_bytes(2)
    with pytest.raises(InputError, match="HDR image; export"):
        media.read_image(bytes(data), 64)


def test_suffixes_are_those_of_formats_that_are_read() -> None:
    assert {Path(name).suffix for name in CASES} <= {*VIDEO_SUFFIXES}
    assert not {*VIDEO_SUFFIXES} & {*IMAGE_SUFFIXES}


class Pipe(io.RawIOBase):
    """A file that is only written forwards, so that a muxer cannot come back to store an index."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def write(self, data: Any) -> int:
        return self.file.write(data)


@pytest.mark.parametrize("format", ["matroska", "mpegts"])
def test_a_time_in_a_file_without_an_index_is_found(tmp_path: Path, format: str) -> None:
    """Screen recorders that were ended leave such files: no cues, and no duration."""
    path, grey = tmp_path / "film", np.arange(200, dtype=np.uint8) + 20
    pipe: Any = Pipe(path)
    with av.open(pipe, "w", format=format) as file:
        stream: Any = file.add_stream("libx264", 10, {"g": "25"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for value in grey:
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), value, np.uint8))
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    pipe.file.close()
    for start in (13.7, 0.0, 19.5, 2.4):
        with media.open_video(str(path)) as video:
            found = video.read(32, 10, 3, start)
        shown = grey[round(start * 10) :][:3]
        assert np.abs(found.mean(axis=(1, 2, 3)) - shown).max() < 2, start
    assert media.frame_size(str(path)) == (48, 64)
    shared = media.shared_video(str(path)).read(32, [13.72, 13.82, 13.92])
    assert np.abs(shared.mean(axis=(1, 2, 3)) - grey[137:140]).max() < 2
