"""Frames that torchcodec decodes are those of PyAV."""

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from worldmodel.config import DataConfig, SourceConfig, StageConfig
from worldmodel.data import loader
from worldmodel.errors import ConfigError, InputError
from worldmodel.media import read_video, shared_video, torchcodec
from worldmodel.media.torchcodec import use_decoder
from worldmodel.models.world_model import WorldModel

FPS, COUNT = 8, 40
COLUMNS = {"video": "video", "text": "text"}
STAGE = StageConfig("generator", steps=1, batch_size=2, tasks={"rounds": 1.0})
TURN = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
"""A display matrix of phones: a quarter clockwise."""


def installed() -> bool:
    try:
        use_decoder("torchcodec")
    except ConfigError:
        return False
    use_decoder("pyav")
    return True


needs_torchcodec = pytest.mark.skipif(not installed(), reason="torchcodec cannot be imported")


@pytest.fixture(autouse=True)
def _pyav() -> Iterator[None]:
    yield
    use_decoder("pyav")


def both(read: Callable[[], Any]) -> list[Any]:
    """Return what is read by PyAV and by torchcodec, or the message of the error."""
    found = []
    for name in ("pyav", "torchcodec"):
        use_decoder(name)
        try:
            found.append(read())
        except InputError as error:
            found.append(str(error))
    return found


def write(path: Path, codec: str = "libx264", keyframes: int = 12) -> bytes:
    """Write frames of 96 x 64 pixels that all differ."""
    rng = np.random.default_rng(0)
    ground = np.kron(rng.integers(0, 255, (8, 12, 3), dtype=np.uint8), np.ones((8, 8, 1), np.uint8))
    with av.open(path, "w") as container:
        stream = container.add_stream(codec, rate=FPS, options={"g": str(keyframes)})
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for index in range(COUNT):
            frame = av.VideoFrame.from_ndarray(np.roll(ground, 2 * index, 1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path.read_bytes()


@needs_torchcodec
@pytest.mark.parametrize(
    ("suffix", "codec"), [(".mp4", "libx264"), (".mkv", "libx264"), (".webm", "libvpx-vp9")]
)
def test_frames_of_files_are_those_of_pyav(tmp_path: Path, suffix: str, codec: str) -> None:
    data = write(tmp_path / f"clip{suffix}", codec)
    for fps, count, start in ((FPS, 99, 0.0), (FPS, 7, 2.5), (3, 9, 0.0), (20, 50, 1.3), (FPS, 99, 4.75)):
        one, other = both(lambda: read_video(data, (40, 64), fps, count, start))  # noqa: B023
        assert one.shape == other.shape
        assert np.abs(one.astype(int) - other).max() <= 1


@needs_torchcodec
def test_rotated_and_damaged_files_are_those_of_pyav(tmp_path: Path) -> None:
    data = write(tmp_path / "clip.mp4")
    matrix = data.index(b"tkhd") + 44
    turned = data[:matrix] + TURN + data[matrix + 36 :]
    one, other = both(lambda: read_video(turned, 64, FPS, 99))
    assert np.abs(one.astype(int) - other).max() <= 1
    middle = data.index(b"mdat") + 400
    damaged = (
        data[:middle] + bytes(byte ^ 0x5A for byte in data[middle : middle + 600]) + data[middle + 600 :]
    )
    assert [type(each) for each in both(lambda: read_video(damaged, 64, FPS, 99))] == [str, str]
    cut = write(tmp_path / "clip.mkv")
    assert [type(each) for each in both(lambda: read_video(cut[: len(cut) // 2], 64, FPS, 99))] == [str, str]


@needs_torchcodec
def test_frames_of_long_files_are_those_of_pyav(tmp_path: Path) -> None:
    write(tmp_path / "long.mp4")
    for times in ([0.02, 0.15, 0.4], [2.02, 2.03, 3.9], [4.0, 6.0]):
        one, other = both(lambda: shared_video(str(tmp_path / "long.mp4")).read(32, times))  # noqa: B023
        if isinstance(one, str):
            assert one == other
        else:
            assert np.abs(one.astype(int) - other).max() <= 1


@needs_torchcodec
def test_the_loader_reads_with_the_decoder(
    make_model: Callable[..., WorldModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "clip.mp4")
    (tmp_path / "clips.csv").write_text("video,text\nclip.mp4,it goes on\n")
    used, at = [], torchcodec.TimedFrames.at
    monkeypatch.setattr(
        torchcodec.TimedFrames, "at", lambda self, times: used.append(len(times)) or at(self, times)
    )
    sources, found = {"own": SourceConfig("clips", str(tmp_path / "clips.csv"), columns=COLUMNS)}, []
    for name in ("pyav", "torchcodec"):
        config = DataConfig(sources, decoder=name)
        assert not used
        with loader.batches(config, make_model().config, STAGE, seed=0) as stream:
            found.append(
                [frames for batch in next(stream) for each in batch.episodes for frames in each.observations]
            )
    assert used
    for one, other in zip(*found, strict=True):
        assert np.abs(one.astype(int) - other).max() <= 1


@pytest.mark.skipif(installed(), reason="torchcodec can be imported")
def test_a_decoder_that_cannot_run_is_refused(make_model: Callable[..., WorldModel]) -> None:
    config = DataConfig({"shapes": SourceConfig("shapes")}, decoder="torchcodec")
    with (
        pytest.raises(ConfigError, match=r"data\.decoder"),
        loader.batches(config, make_model(world="shapes").config, STAGE, seed=0),
    ):
        pass
