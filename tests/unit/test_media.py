"""Reading and writing of images and videos: exact round trips, and errors for invalid files."""

import io
import os
import re
import socket
import struct
import zlib
from collections.abc import Callable
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from worldmodel.errors import InputError, OutputError
from worldmodel.media import (
    MediaLimits,
    VideoWriter,
    open_video,
    read_image,
    read_observation,
    read_video,
    write_video,
)
from worldmodel.media.shared_video import SharedVideo

FPS = 8


def video(num_frames: int = 12, size: int = 64) -> np.ndarray:
    """A soft-edged ball and a box that move on a dark ground."""
    y, x = np.mgrid[:size, :size]
    frames = []
    for time in range(num_frames):
        ball = np.clip(10 - np.hypot(x - 15 - 2 * time, y - 30), 0, 1)[..., None]
        frame = np.array([20, 24, 40]) * (1 - ball) + np.array([255, 10, 45]) * ball
        frame[(abs(x - 45) < 6) & (abs(y - 20 - time) < 6)] = (0, 226, 16)
        frames.append(frame.astype(np.uint8))
    return np.stack(frames)


def encoded(image: Image.Image, name: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, name, **options)
    return buffer.getvalue()


def muxed(path: Path, codec: str, frames: np.ndarray, rate: int = FPS) -> bytes:
    """Write a video as other programs would, 256 pixels wide so that colour subsampling costs little."""
    pixel_format = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    with av.open(path, "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = 256, 256, pixel_format
        for frame in frames:
            wide = frame.repeat(256 // frame.shape[0], 0).repeat(256 // frame.shape[1], 1)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(wide, format="rgb24")))
        container.mux(stream.encode(None))
    return path.read_bytes()


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(10 * np.log10(255**2 / max(np.mean((a.astype(float) - b) ** 2), 1e-9)))


def is_advice(error: BaseException) -> bool:
    """One sentence that ends in what to do, on one line."""
    text = str(error)
    return bool(re.fullmatch(r"[^\n]+[;:,][^\n]+\.", text)) and len(text) < 300


# Writing and reading


def test_an_mp4_reads_back_as_it_was_written(tmp_path: Path) -> None:
    frames = video()
    write_video(frames, tmp_path / "video.mp4", fps=FPS)
    assert psnr(read_video(tmp_path / "video.mp4", 64, FPS, 99), frames) > 38
    assert psnr(read_video(tmp_path / "video.mp4", 64, None, 99), frames) > 38
    with av.open(tmp_path / "video.mp4") as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height, stream.average_rate) == (256, 256, FPS)


@pytest.mark.parametrize("fps", [5, 8, 12, 15, 30, 50])
def test_a_gif_of_few_colours_reads_back_exactly_at_any_pace(tmp_path: Path, fps: int) -> None:
    frames = video()
    write_video(frames, tmp_path / "video.gif", fps=fps)
    assert np.array_equal(read_video(tmp_path / "video.gif", 64, fps, 99), frames)


@pytest.mark.parametrize(("fps", "every"), [(60, 2), (100, 2), (240, 5)])
def test_a_gif_of_many_frames_a_second_keeps_its_pace(tmp_path: Path, fps: int, every: int) -> None:
    frames = video(12)
    write_video(frames, tmp_path / "video.gif", fps=fps)
    assert np.array_equal(read_video(tmp_path / "video.gif", 64, fps / every, 99), frames[::every])


def test_a_gif_keeps_the_length_of_still_scenes(tmp_path: Path) -> None:
    still = np.repeat(video(1), 9, axis=0)  # writers merge equal frames into one long one
    write_video(still, tmp_path / "still.gif", fps=FPS)
    assert np.array_equal(read_video(tmp_path / "still.gif", 64, FPS, 99), still)


def test_a_gif_of_many_colours_stays_close(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 64).astype(np.uint8)
    image = np.stack(np.broadcast_arrays(ramp[:, None], ramp[None], np.uint8(90)), axis=-1)
    write_video(image[None].repeat(3, 0), tmp_path / "ramp.gif", fps=FPS, scale=1)
    assert psnr(read_image(tmp_path / "ramp.gif", 64), image) > 28


def test_odd_sides_and_scales_are_kept(tmp_path: Path) -> None:
    frames = video(3)[:, :33, :47]
    write_video(frames, tmp_path / "odd.mp4", fps=FPS, scale=1)
    write_video(frames, tmp_path / "odd.gif", fps=FPS, scale=3)
    with av.open(tmp_path / "odd.mp4") as container:
        assert (container.streams.video[0].width, container.streams.video[0].height) == (48, 34)
    with Image.open(tmp_path / "odd.gif") as image:
        assert image.size == (141, 99)


@pytest.mark.parametrize(
    ("suffix", "codec"),
    [
        (".mp4", "libx264"),
        (".mov", "libx264"),
        (".mkv", "libx264"),
        (".webm", "libvpx-vp9"),
        (".webm", "libvpx"),
        (".avi", "mpeg4"),
        (".avi", "mjpeg"),
    ],
)
def test_videos_of_other_encoders_are_read_and_truncated_ones_refused(
    tmp_path: Path, suffix: str, codec: str
) -> None:
    frames = video()
    data = muxed(tmp_path / f"video{suffix}", codec, frames)
    assert psnr(read_video(tmp_path / f"video{suffix}", 64, FPS, 99), frames) > 34
    for share in (0.1, 0.5, 0.9, 0.99):
        with pytest.raises(InputError, match="cut off") as caught:
            read_video(data[: int(share * len(data))], 64, None, 99)
        assert is_advice(caught.value)


def test_resampling_takes_the_frame_on_screen_at_each_time(tmp_path: Path) -> None:
    levels = np.arange(0, 240, 10, dtype=np.uint8)
    frames = np.broadcast_to(levels[:, None, None, None], (24, 16, 16, 3))
    write_video(frames, tmp_path / "steps.mp4", fps=24)

    def seen(fps: float) -> list[int]:
        return [round(float(frame.mean()) / 10) for frame in read_video(tmp_path / "steps.mp4", 16, fps, 99)]

    assert seen(8) == list(range(0, 24, 3))
    assert seen(48) == [index // 2 for index in range(48)]
    assert seen(10) == [int(index * 2.4 + 1e-9) for index in range(10)]
    assert len(read_video(tmp_path / "steps.mp4", 16, 8, 5)) == 5


def test_the_rotation_of_phone_videos_is_applied(tmp_path: Path) -> None:
    image = np.zeros((64, 64, 3), np.uint8)
    image[:32] = 255  # the upper half is white
    plain = muxed(tmp_path / "plain.mp4", "libx264", image[None].repeat(4, 0))
    matrix = plain.index(b"tkhd") + 44
    one = 1 << 16
    # Turn a quarter clockwise, as phones record it: the upper half comes to the right.
    turn = struct.pack(">9i", 0, one, 0, -one, 0, 0, 0, 0, 1 << 30)
    frames = read_video(plain[:matrix] + turn + plain[matrix + 36 :], 64, None, 99)
    assert frames[0, :, 34:].mean() > 250
    assert frames[0, :, :30].mean() < 5


def test_a_trimmed_video_is_whole(tmp_path: Path) -> None:
    """An edit list, by which phones and editors trim, hides frames at the start and at the end."""
    with closing(VideoWriter(tmp_path / "video.mp4", FPS, 64, 64, recording=True)) as writer:
        for frame in video(48):
            writer.write(frame)
        ticks = int(1 / writer.stream.time_base)
    data = bytearray((tmp_path / "video.mp4").read_bytes())
    entry = data.index(b"elst") + 12  # after version, flags and number of entries
    struct.pack_into(">Ii", data, entry, 2000, 3 * ticks)  # 2 s, in ms, from the third second on
    frames = read_video(bytes(data), 64, None, 99)
    assert psnr(frames, video(48)[24:40]) > 34


def test_a_video_with_dropped_frames_is_whole(tmp_path: Path) -> None:
    frames = video(24)
    with av.open(tmp_path / "video.avi", "w") as container:
        stream = container.add_stream("mjpeg", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuvj420p"
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number + 8 * (number >= 12), Fraction(1, FPS)  # a second is missing
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    found = read_video(tmp_path / "video.avi", 64, FPS, 99)
    assert len(found) == 32
    assert psnr(found[20:], frames[12:]) > 25
    assert psnr(found[12:20], frames[11:12].repeat(8, 0)) > 25


def test_a_duration_that_the_header_does_not_have_is_that_of_the_frames(tmp_path: Path) -> None:
    for name, options, first in (("live.webm", {"live": "1"}, 0.0), ("late.mkv", {}, 3.0)):
        with av.open(tmp_path / name, "w", options=options) as container:
            stream = container.add_stream("libvpx", rate=FPS)
            stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
            for number, pixels in enumerate(video(40)):
                frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
                frame.pts, frame.time_base = round(number + first * FPS), Fraction(1, FPS)
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        with open_video(tmp_path / name) as opened:
            assert opened.duration_s == pytest.approx(5, abs=0.01)
            assert len(opened.read(64, FPS, 99)) == 40


# Images


def test_grey_images_of_16_bits_keep_their_shades() -> None:
    shades = np.linspace(0, 2**16 - 1, 64 * 64).astype(np.uint16).reshape(64, 64)
    found = read_image(encoded(Image.fromarray(shades)), 64)
    assert np.array_equal(found, (shades >> 8).astype(np.uint8)[..., None].repeat(3, axis=2))


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP", "GIF"])
def test_images_are_recognised_by_their_bytes(tmp_path: Path, name: str) -> None:
    image = video(1)[0]
    path = tmp_path / "image.dat"
    path.write_bytes(encoded(Image.fromarray(image), name, **({} if name == "GIF" else {"quality": 95})))
    assert psnr(read_image(path, 64), image) > 24
    assert np.array_equal(read_image(str(path), 64), read_image(path.read_bytes(), 64))
    assert read_observation(path, 64, FPS, 99).shape == (1, 64, 64, 3)


def test_images_in_memory_are_read() -> None:
    image = video(1)[0]
    for source in (image, Image.fromarray(image), encoded(Image.fromarray(image))):
        assert np.array_equal(read_image(source, 64), image)
        assert np.array_equal(read_observation(source, 64, None, 1)[0], image)
    grey = image.mean(-1).astype(np.uint8)
    assert np.array_equal(read_image(grey, 64), grey[..., None].repeat(3, -1))


def test_the_centre_is_cropped_and_averaged() -> None:
    wide = np.zeros((16, 48, 3), np.uint8)
    wide[:, 16:32] = video(1, 16)[0]
    assert np.array_equal(read_image(wide, 16), wide[:, 16:32])
    assert np.array_equal(read_image(wide[:, 16:32].repeat(4, 0).repeat(4, 1), 16), wide[:, 16:32])


def test_rotation_and_transparency_are_applied() -> None:
    image = np.zeros((16, 16, 3), np.uint8)
    image[:8] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held a quarter turn to the left
    turned = read_image(encoded(Image.fromarray(image), exif=exif), 16)
    assert np.array_equal(turned, np.rot90(image, -1))
    clear = Image.new("RGBA", (16, 16), (255, 0, 0, 0))
    assert (read_image(encoded(clear), 16) == 255).all()


# Bad files


def png_of(width: int, height: int) -> bytes:
    """A PNG that announces a size and holds next to nothing: what a decompression bomb looks like."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


PNG = encoded(Image.fromarray(video(1)[0]))
JPEG = encoded(Image.fromarray(video(1)[0]), "JPEG")
BAD_BYTES = {
    "empty": b"",
    "text": b"a red ball on the left",
    "html": b"<!doctype html><html><body>404</body></html>",
    "zeros": bytes(4096),
    "truncated png": PNG[: len(PNG) // 2],
    "truncated jpeg": JPEG[: len(JPEG) // 2],
    "header only": PNG[:20],
    "no width": png_of(0, 64),
    "tiny": png_of(4, 64),
    "too many pixels": png_of(7000, 7000),
    "bomb": png_of(100_000, 100_000),
    "heic": b"\0\0\0\x18ftypheic" + bytes(64),
    "ppm": encoded(Image.fromarray(video(1)[0]), "PPM"),
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n",
    "playlist": b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile:///etc/passwd\n",
    "mp4 without a video": b"\0\0\0\x18ftypisom" + bytes(12),
    "avi without a video": b"RIFF\x10\0\0\0AVI LIST" + bytes(12),
    "matroska without a video": b"\x1a\x45\xdf\xa3\x81\0" + bytes(12),
    "gif without a frame": b"GIF89a\x40\0\x40\0\0\0\0;",
    "gif of no size": b"GIF89a\0\0\0\0\0\0\0;",
}


@pytest.mark.parametrize("case", BAD_BYTES)
@pytest.mark.parametrize("read", [lambda s: read_observation(s, 64, FPS, 99), lambda s: read_image(s, 64)])
def test_invalid_bytes_are_input_errors(case: str, read: Callable[[object], object], tmp_path: Path) -> None:
    path = tmp_path / "observation.png"
    path.write_bytes(BAD_BYTES[case])
    for source in (BAD_BYTES[case], path):
        with pytest.raises(InputError) as caught:
            read(source)
        assert is_advice(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("missing.png", "missing.png"),
        (".", "is a folder"),
        ("https://example.org/ball.png", "URL"),
        ("file:///etc/hostname", "URL"),
        ("concat:a.mp4|b.mp4", "no file"),
        ("with\0nul.png", "cannot be read|no file"),
        ("~no-such-user/video.mp4", "cannot be read"),
        ("x" * 5000, "cannot be read|no file"),
        (Path("/dev/zero"), "no file"),
    ],
)
def test_invalid_paths_are_input_errors(source: str | Path, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_observation(source, 64, FPS, 99)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
        (b"  <!DOCTYPE html><html></html>", "a web page"),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "an XML message"),
    ],
)
def test_what_came_in_place_of_a_video_is_named(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(data)
    for read in (lambda: read_video(path, 32, None, 9), lambda: SharedVideo(str(path))):
        with pytest.raises(InputError, match=words):
            read()


def test_a_socket_is_not_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        with pytest.raises(InputError, match="no file"):
            read_image("socket", 64)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((64, 64, 3), np.float32), "float32"),
        (np.zeros((64, 64, 2), np.uint8), r"\(64, 64, 2\)"),
        (np.zeros((2, 64, 64, 3), np.uint8), r"\(2, 64, 64, 3\)"),
        (np.zeros((0, 64, 3), np.uint8), "no pixels"),
        (np.zeros((4, 64, 3), np.uint8), "64x4"),
    ],
)
def test_invalid_arrays_are_input_errors(array: np.ndarray, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_image(array, 64)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_video_bytes": 2**10}, "larger than"),
        ({"max_video_s": 2.0}, "longer than 2 seconds"),
        ({"max_decoded_frames": 9}, "more than 9 frames"),
        ({"max_video_pixels": 64 * 64}, "256x256"),
        ({"video_codecs": ("vp9",)}, "h264"),
        ({"video_formats": ("avi",)}, "mp4"),
    ],
)
def test_video_limits(tmp_path: Path, limits: dict[str, Any], words: str) -> None:
    data = muxed(tmp_path / "long.mp4", "libx264", video(24))
    for read in (read_observation, read_video):
        with pytest.raises(InputError, match=words) as caught:
            read(data, 64, None, 99, limits=MediaLimits(**limits))
        assert is_advice(caught.value)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_image_bytes": 100}, "larger than"),
        ({"max_image_pixels": 64 * 63}, "64x64"),
        ({"image_formats": ("jpeg",)}, "png"),
    ],
)
def test_image_limits(limits: dict[str, Any], words: str) -> None:
    accepted = MediaLimits(**limits)
    with pytest.raises(InputError, match=words):
        read_image(PNG, 64, accepted)
    with pytest.raises(InputError, match=words):
        read_observation(PNG, 64, None, 1, accepted)


@pytest.mark.parametrize(
    ("fps", "max_frames"), [(0, 8), (-1, 8), (float("nan"), 8), (float("inf"), 8), (8, 0)]
)
def test_invalid_frame_rates_and_lengths_are_refused(tmp_path: Path, fps: float, max_frames: int) -> None:
    data = muxed(tmp_path / "video.mp4", "libx264", video(2))
    with pytest.raises(InputError, match=f"{fps}|{max_frames}"):
        read_video(data, 64, fps, max_frames)


def test_videos_are_not_images_and_images_are_not_videos(tmp_path: Path) -> None:
    write_video(video(2), tmp_path / "video.mp4", fps=FPS)
    with pytest.raises(InputError, match="video"):
        read_image(tmp_path / "video.mp4", 64)
    with pytest.raises(InputError, match="not a video"):
        read_video(PNG, 64, FPS, 99)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("samples")
    write_video(video(4), folder / "video.mp4", fps=FPS, scale=1)
    write_video(video(4), folder / "video.gif", fps=FPS, scale=1)
    webm = muxed(folder / "video.webm", "libvpx", video(4))
    return [PNG, JPEG, (folder / "video.mp4").read_bytes(), (folder / "video.gif").read_bytes(), webm]


@given(data=st.data())
def test_damaged_files_raise_only_input_errors(samples: list[bytes], data: st.DataObject) -> None:
    """Any sample, cut anywhere and with bytes overwritten, is read or refused; nothing else happens."""
    sample = data.draw(st.sampled_from(samples))
    damaged = bytearray(sample[: data.draw(st.integers(0, len(sample)))])
    for _ in range(data.draw(st.integers(0, 8)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        frames = read_observation(bytes(damaged), 16, data.draw(st.sampled_from([None, 8.0])), 12)
    except InputError as refusal:
        assert is_advice(refusal), str(refusal)  # noqa: PT017 -- refusing is one of two right answers
    else:
        assert frames.shape[1:] == (16, 16, 3)
        assert 1 <= len(frames) <= 12


@pytest.mark.parametrize("index", range(3))
def test_a_cut_file_is_refused_unless_every_pixel_is_there(samples: list[bytes], index: int) -> None:
    sample = samples[index]
    whole = read_observation(sample, 64, None, 12)
    for length in range(0, len(sample), max(1, len(sample) // 60)):
        try:
            frames = read_observation(sample[:length], 64, None, 12)
        except InputError:
            continue
        assert length > len(sample) - 32
        assert np.array_equal(frames, whole)


# Writing


@pytest.mark.parametrize(
    ("name", "fps", "words"),
    [
        ("video.txt", 8, "'.txt'"),
        ("video", 8, ".mp4 or .gif"),
        ("folder.gif", 8, "is a folder"),
        ("file/video.mp4", 8, "cannot be written"),
        ("/proc/video.mp4", 8, "cannot be written"),
        ("video.gif", 600, "fps is 600"),
        ("video.mp4", 0, "fps is 0"),
    ],
)
def test_paths_that_cannot_be_written_are_output_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fps: float, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.gif").mkdir()
    Path("file").touch()
    with pytest.raises(OutputError, match=words) as caught:
        write_video(video(2), name, fps=fps)
    assert is_advice(caught.value)
    assert sorted(os.listdir()) == ["file", "folder.gif"]


def test_a_video_needs_frames(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no frames"):
        write_video(video(2)[:0], tmp_path / "video.mp4", fps=FPS)
    assert not list(tmp_path.iterdir())
