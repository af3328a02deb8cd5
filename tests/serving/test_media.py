"""Media in the server: decoding as by the library, and encoding that other programs can read."""

import asyncio
import io
import zipfile
from collections.abc import Iterator

import av
import numpy as np
import pytest
from PIL import Image

from worldmodel.config import WorldModelConfig
from worldmodel.errors import InputError, OutputError
from worldmodel.media import encoding, read_observation
from worldmodel.rollout.state import film_frames
from worldmodel.serving.media import decoding
from worldmodel.serving.media.decoding import decode_upload
from worldmodel.serving.media.fragmented_mp4 import FragmentedMp4
from worldmodel.serving.routes.frames import encode_npy, encode_png_frames

FPS = 8


def video(num_frames: int = 12, height: int = 64, width: int = 64) -> np.ndarray:
    """A ball that moves right by 4 pixels a frame."""
    y, x = np.mgrid[:height, :width]
    frames = np.full((num_frames, height, width, 3), (20, 40, 60), np.uint8)
    for time in range(num_frames):
        frames[time][np.hypot(x - 10 - 4 * time, y - height / 2) < 8] = (250, 160, 10)
    return frames


def encoded(kind: str, frame: np.ndarray, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, kind, **options)
    return buffer.getvalue()


def decode(data: bytes, size: int = 32, fps: float = FPS, max_frames: int = 64) -> np.ndarray:
    return asyncio.run(decode_upload(data, size=size, fps=fps, max_frames=max_frames))


def read_back(data: bytes) -> list[av.VideoFrame]:
    with av.open(io.BytesIO(data), format="mp4") as container:
        return list(container.decode(video=0))


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(10 * np.log10(255**2 / max(np.mean((a.astype(float) - b) ** 2), 1e-9)))


@pytest.fixture(scope="module", autouse=True)
def _no_process_stays() -> Iterator[None]:
    yield
    decoding.close_decoder()


# Decoding


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_an_image_is_decoded_as_by_the_library(kind: str) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was held upright
    data = encoded(kind, video(1, 48, 80)[0], exif=turned)
    frames = decode(data)
    assert frames.shape == (1, 32, 32, 3)
    assert frames.dtype == np.uint8
    assert np.array_equal(frames, read_observation(data, 32, FPS, 64))


@pytest.mark.parametrize(
    ("fps", "max_frames", "expected"), [(8, 64, 12), (4, 64, 6), (16, 64, 24), (8, 5, 5)]
)
def test_a_video_is_resampled_and_cut_as_by_the_library(fps: float, max_frames: int, expected: int) -> None:
    data = encoding.encode_video(video(), FPS)
    frames = decode(data, 64, fps, max_frames)
    assert frames.shape == (expected, 64, 64, 3)
    assert np.array_equal(frames, read_observation(data, 64, fps, max_frames))


@pytest.mark.parametrize("max_frames", [1, 5, 12, 64])
def test_the_newest_frames_are_the_last_ones(max_frames: int) -> None:
    data = encoding.encode_video(video(), FPS)
    every = decode(data, 64)
    assert np.array_equal(read_observation(data, 64, FPS, max_frames, newest=True), every[-max_frames:])
    request = decode_upload(data, size=64, fps=FPS, max_frames=max_frames, newest=True)
    assert np.array_equal(asyncio.run(request), every[-max_frames:])


def test_long_videos_start_worlds_from_their_end_and_are_not_extended() -> None:
    config = WorldModelConfig(fps=32)
    data = encoding.encode_video(video(160), FPS)  # 640 frames at the model's rate
    last = read_observation(data, 64, FPS, 160)[-1]
    frames = asyncio.run(decoding.decode_observation(data, config))
    assert len(frames) == film_frames(config) < 640
    assert np.array_equal(frames[-1], last)
    with pytest.raises(InputError, match="512 frames or more"):
        asyncio.run(decoding.decode_video(data, config))
    short = asyncio.run(decoding.decode_video(encoding.encode_video(video(100), FPS), config))
    assert len(short) == 400


def test_transparency_becomes_white() -> None:
    clear = np.zeros((16, 16, 4), np.uint8)
    assert (decode(encoded("PNG", clear), 16) == 255).all()


def test_many_at_once_each_get_their_own() -> None:
    colours = [(10 * i, 255 - 10 * i, 5 * i) for i in range(12)]
    uploads = [encoded("PNG", np.full((16, 16, 3), colour, np.uint8)) for colour in colours]

    async def all_at_once() -> list[np.ndarray]:
        return await asyncio.gather(
            *(decode_upload(data, size=16, fps=FPS, max_frames=1) for data in uploads)
        )

    for frames, colour in zip(asyncio.run(all_at_once()), colours, strict=True):
        assert (frames == colour).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_frames": 0}, "max_frames is 0"),
        ({"max_frames": 10**6}, "max_frames is 1000000; use 1 to 512"),
        ({"size": 0}, "size is 0"),
        ({"size": 10**6}, "size is 1000000"),
        ({"fps": 0.0}, "fps is 0"),
        ({"fps": float("nan")}, "fps is nan"),
        ({"fps": float("inf")}, "fps is inf"),
    ],
)
def test_impossible_wishes_are_refused(options: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        decode(encoding.encode_video(video(2), FPS), **options)


def test_a_decoder_that_died_is_replaced() -> None:
    data = encoded("PNG", video(1)[0])
    decode(data)
    assert decoding._FORK_SERVER._process is not None
    decoding._FORK_SERVER._process.kill()
    decoding._FORK_SERVER._process.wait()
    assert decode(data).shape == (1, 32, 32, 3)


# Encoding


def test_an_mp4_plays() -> None:
    frames = read_back(encoding.encode_video(video(), FPS))
    assert len(frames) == 12
    assert psnr(np.stack([f.to_ndarray(format="rgb24")[2::4, 2::4] for f in frames]), video()) > 30


def test_pngs_in_a_zip_are_the_frames() -> None:
    data = encode_png_frames(video(3))
    assert data == encode_png_frames(video(3))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.namelist() == ["00000.png", "00001.png", "00002.png"]
        assert archive.testzip() is None
        read = [np.array(Image.open(io.BytesIO(archive.read(name)))) for name in archive.namelist()]
    assert np.array_equal(np.stack(read), video(3))


def test_npy_is_the_frames_without_pickle() -> None:
    view = video(4)[::2, ::-1]
    assert np.array_equal(np.load(io.BytesIO(encode_npy(view)), allow_pickle=False), view)


def test_a_jpeg_looks_like_the_frame_and_obeys_quality() -> None:
    frame = video(1)[0]
    fine, coarse = encoding.encode_jpeg(frame, 95), encoding.encode_jpeg(frame, 20)
    assert psnr(np.array(Image.open(io.BytesIO(fine))), frame) > 25
    assert len(coarse) < len(fine)


# Live video


def boxes_of(data: bytes) -> list[bytes]:
    names, at = [], 0
    while at < len(data):
        names.append(data[at + 4 : at + 8])
        at += int.from_bytes(data[at : at + 4])
    assert at == len(data)
    return names


@pytest.mark.parametrize(
    ("height", "width", "lengths"), [(64, 64, [4, 4, 4]), (32, 46, [1, 5, 2]), (63, 65, [3, 1])]
)
def test_init_and_fragments_together_are_a_video(height: int, width: int, lengths: list[int]) -> None:
    live = FragmentedMp4(height, width, FPS, scale=1)
    frames = video(sum(lengths), height, width)
    assert boxes_of(live.init) == [b"ftyp", b"moov"]
    stream = live.init
    for chunk in np.split(frames, np.cumsum(lengths)[:-1]):
        fragment = live.add(chunk)
        assert boxes_of(fragment) == [b"moof", b"mdat"]
        stream += fragment
        assert len(read_back(stream)) == live.num_frames  # complete at once, not one chunk later
    shown = read_back(stream)
    assert [float(f.pts * f.time_base) for f in shown] == pytest.approx(np.arange(len(frames)) / FPS)
    starts = {0, *np.cumsum(lengths)[:-1].tolist()}
    assert {index for index, frame in enumerate(shown) if frame.key_frame} == starts
    read = np.stack([f.to_ndarray(format="rgb24")[:height, :width] for f in shown])
    assert psnr(read, frames) > 25


def test_a_viewer_may_join_at_any_chunk() -> None:
    live = FragmentedMp4(64, 64, FPS)
    live.add(video(4))
    shown = read_back(live.init + live.add(video(4)))
    assert len(shown) == 4
    assert shown[0].key_frame


def test_fragments_are_numbered_and_small_frames_enlarged() -> None:
    live = FragmentedMp4(32, 32, FPS)
    numbers = []
    for _ in range(3):
        fragment = live.add(video(2, 32, 32))
        at = fragment.index(b"mfhd") + 8
        numbers.append(int.from_bytes(fragment[at : at + 4]))
    assert numbers == sorted(set(numbers))
    assert (read_back(live.init + fragment)[0].width, live.mime[:23]) == (256, 'video/mp4; codecs="avc1')


def test_frames_of_another_size_do_not_fit() -> None:
    live = FragmentedMp4(32, 32, FPS)
    for wrong in (video(2), video(0, 32, 32)):
        with pytest.raises(OutputError, match="32x32"):
            live.add(wrong)
    with pytest.raises(OutputError, match="fps is 0"):
        FragmentedMp4(32, 32, 0)
