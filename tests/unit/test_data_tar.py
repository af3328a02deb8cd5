"""WebDataset shards: read in any order, by their headers, and nothing but clips."""

import gzip
import io
import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from worldmodel import media
from worldmodel.actions import Action
from worldmodel.config import ActionConfig, DataConfig, SourceConfig, StageConfig, WorldModelConfig
from worldmodel.data import files, loader, tar
from worldmodel.data.argument import read_source
from worldmodel.data.clips import Clip
from worldmodel.data.index_file import MIN_BYTES
from worldmodel.data.sources import Source, open_source
from worldmodel.errors import ConfigError, InputError

MODEL = WorldModelConfig(action=ActionConfig(keys=("left", "right"), vector=2))


def open_tar(path: str | Path, **more: object) -> Source:
    source = SourceConfig(kind="webdataset", path=str(path), **more)
    return open_source("shards", DataConfig({"shards": source}), MODEL)


def write(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def video(recorded: Path) -> bytes:
    return (recorded / "clip-00000.mp4").read_bytes()


def test_clips_are_found_in_any_order(shard: Path, recorded: Path) -> None:
    source = open_tar(shard)
    assert source.size == 6
    assert source.tasks == ("rounds", "imagine", "describe", "inverse")
    for index in (5, 0, 3, 9):
        clip = source.at(index)
        assert isinstance(clip, Clip)
        assert clip.name == f"shard-000.tar/train/clip-{index % 6:05d}.mp4"
        episode = clip.episode("rounds", 0, index, 2)
        assert episode.actions == (Action(f"clip number {index % 6}"),) * 2
        whole = media.read_video(recorded / f"clip-{index % 6:05d}.mp4", 64, 8, 17)
        assert np.array_equal(np.concatenate(episode.observations), whole)


def test_hidden_files_between_the_parts_of_a_clip_are_no_clips(tmp_path: Path, video: bytes) -> None:
    members = [("one.mp4", video), ("one.txt", b"first"), ("two.mp4", video), ("two.txt", b"second")]
    doubled = [each for name, data in members for each in ((f"._{name}", b"Mac OS X"), (name, data))]
    source = open_tar(write(tmp_path / "mac.tar", doubled))
    episodes = [source.at(index).episode("describe", 0, index, 1) for index in range(source.size or 0)]
    assert [episode.answer for episode in episodes] == ["first", "second"]


def test_parts_of_a_clip_need_not_follow_each_other(tmp_path: Path, video: bytes) -> None:
    names = ("one", "two", "three")
    members = [
        *((f"{name}.mp4", video) for name in names),
        *((f"{name}.txt", f"the {name}".encode()) for name in reversed(names)),
        ("two.mp4", video), ("two.txt", b"the second two"),
    ]  # fmt: skip
    source = open_tar(write(tmp_path / "apart.tar", members))
    answers = [source.at(index).episode("describe", 0, index, 1).answer for index in range(source.size or 0)]
    assert answers == ["the one", "the two", "the three", "the second two"], "none is lost"


def test_what_is_passed_over_is_counted_and_said_once(
    tmp_path: Path, video: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        odd = [("a.cls", b"1"), ("b.v1.mp4", video), ("c.txt", b"no video"), ("._d.mp4", b"Mac OS X")]
        write(tmp_path / f"{number}.tar", [("a.mp4", video), *odd])
    assert open_tar(tmp_path / "*.tar").size == 3
    (said,) = [record.getMessage() for record in caplog.records]
    assert all(
        words in said for words in ("3 members .cls", "3 members .v1.mp4", "3 samples without a video")
    )
    assert "d.mp4" not in said


def test_the_name_of_a_shard_may_have_brackets(shard: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run [1]"
    folder.mkdir()
    (folder / "a*.tar").write_bytes(shard.read_bytes())
    assert open_tar(folder / "a*.tar").size == 6


def test_several_shards_are_one_source(shard: Path, tmp_path: Path, video: bytes) -> None:
    for number in range(2):
        (tmp_path / f"s-{number}.tar").write_bytes(shard.read_bytes())
    write(tmp_path / "s-2.tar", [("a/x.mp4", video), ("a/x.txt", b"last"), ("a/x.json", b"{}")])
    source = open_tar(tmp_path / "s-*.tar")
    assert source.size == 13
    assert source.at(12).episode("describe", 0, 0, 1).answer == "last"


def test_json_has_the_actions(tmp_path: Path, video: bytes) -> None:
    record = {"text": "go", "keys": ["left"], "score": 3, "vector": [[1, 2], [3, 4]], "end": 2.0}
    path = write(
        tmp_path / "a.tar",
        [("one.mp4", video), ("one.json", json.dumps(record).encode()), ("one.txt", b"txt")],
    )
    episode = open_tar(path).at(0).episode("rounds", 0, 0, 2)
    assert episode.actions == (Action("go", ("left",), (1.0, 2.0)),)  # it ends after two seconds
    assert open_tar(path, columns={"text": "txt"}).at(0).episode("describe", 0, 0, 1).answer == "txt"
    with pytest.raises(ConfigError, match=r"'caption'.*end, keys, score, text, txt, vector"):
        open_tar(path, columns={"text": "caption"})


def test_json_may_ask(tmp_path: Path, video: bytes) -> None:
    for record, tasks in (
        ({"question": "is it late?", "answer": "no"}, ("rounds", "ask")),
        ({"answer": "no"}, ("rounds",)),
    ):
        path = write(tmp_path / "a.tar", [("one.mp4", video), ("one.json", json.dumps(record).encode())])
        assert open_tar(path).tasks == tasks
    path = write(
        tmp_path / "b.tar", [("one.mp4", video), ("one.json", b'{"question": "late?", "answer": "no"}')]
    )
    asked = open_tar(path).at(0).episode("ask", 0, 0, 1)
    assert (asked.prompt, asked.answer, len(asked.observations)) == ("late?", "no", 1)


@pytest.fixture
def large(tmp_path: Path, video: bytes) -> Path:
    """Six shards that are large enough to have an index."""
    (tmp_path / "shards").mkdir()
    for number in range(6):
        clips = [(f"{number}-{i}.mp4", video) for i in range(2)]
        write(tmp_path / "shards" / f"s-{number}.tar", [*clips, ("padding.bin", bytes(MIN_BYTES))])
    return tmp_path / "shards"


def hide_headers(path: Path) -> None:
    """Make a shard unreadable as a tar file, without a change of its size or modification time."""
    status = path.stat()
    with path.open("r+b") as file:
        file.write(bytes(range(256)) * 2)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("writable", [True, False])
def test_headers_are_read_once(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if not writable:  # also for root, who may write anywhere
        for shard in large.glob("*.tar"):
            (large / f".{shard.name}.clips.index").mkdir()
    first = open_tar(large / "*.tar")
    assert (tmp_path / "cache").exists() != writable
    for shard in large.glob("*.tar"):
        hide_headers(shard)
    again = open_tar(large / "*.tar")
    assert (first.size, again.size) == (12, 12)
    assert [again.at(i).video for i in range(12)] == [first.at(i).video for i in range(12)]
    again.at(7).episode("rounds", 0, 7, 1)
    os.utime(large / "s-3.tar", ns=(0, 0))  # changed: the index is of another file
    with pytest.raises(ConfigError, match=r"s-3.tar"):
        open_tar(large / "*.tar")


def test_a_damaged_index_is_made_again(large: Path) -> None:
    first = open_tar(large / "*.tar")
    for index, file in enumerate(sorted(large.glob(".*.index"))):
        data = file.read_bytes()
        file.write_bytes((b"", data[:100], data[:-8], b"x" * len(data), data[:200], data[:1])[index])
    again = open_tar(large / "*.tar")
    assert [again.at(i).video for i in range(12)] == [first.at(i).video for i in range(12)]


def test_processes_share_the_reading_of_headers(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins elsewhere and takes what others have stored: together they read each shard once."""
    read: list[str] = []
    samples, most = tar.samples, 2

    def counted(path: str, passed: Counter[str]) -> Iterator[dict[str, tar.ByteRange]]:
        if len(read) == most:
            raise TimeoutError  # this process has come no further yet
        read.append(Path(path).name)
        return samples(path, passed)

    monkeypatch.setattr(tar, "samples", counted)
    monkeypatch.setenv("WORLD_SIZE", "3")
    shards = [str(large / f"s-{i}.tar") for i in range(6)]
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(TimeoutError):
        tar.clip_ranges(shards)
    assert read == ["s-2.tar", "s-3.tar"]
    most = 6
    for rank in (2, 0, 1):
        monkeypatch.setenv("RANK", str(rank))
        ranges = tar.clip_ranges(shards)
        assert [len(each) for each in ranges] == [2] * 6
        assert read == [f"s-{i}.tar" for i in (2, 3, 4, 5, 0, 1)]


def jpegs(count: int, step: int = 3) -> list[bytes]:
    """Images whose grey value is 20 + `step` * number."""
    found = []
    for number in range(count):
        out = io.BytesIO()
        Image.new("RGB", (32, 32), (20 + step * number,) * 3).save(out, "JPEG", quality=95)
        found.append(out.getvalue())
    return found


@pytest.mark.parametrize("name", ["000", "frame_000", "left.000"])
def test_numbered_images_under_one_key_are_a_clip(tmp_path: Path, name: str) -> None:
    images, before = jpegs(40), name[:-3]
    frames = [(f"run/a.{before}{number:03d}.jpg", image) for number, image in enumerate(images)]
    right = [(f"run/a.right.{number:03d}.jpg", jpegs(1)[0]) for number in range(40)]
    other = [(f"run/b.{before}{number:03d}.JPEG", image) for number, image in enumerate(images[::-1])]
    record = {"text": "turn", "keys": [["left"]] * 4}
    # The parts of both clips and of a second camera alternate, and the numbers of the first go down.
    alternating = [each for three in zip(frames[::-1], right, other, strict=True) for each in three]
    path = write(tmp_path / "a.tar", [*alternating, ("run/a.json", json.dumps(record).encode())])
    source = open_tar(path)
    assert source.size == 2
    assert source.at(0).name == f"a.tar/run/a.{before}039.jpg"
    whole = source.at(0).episode("rounds", 0, 0, 4)
    seen = np.concatenate([each.mean(axis=(1, 2, 3)) for each in whole.observations])
    assert np.abs(seen - (20 + 3 * np.arange(len(seen)))).max() < 2
    assert {action.keys for action in whole.actions} == {("left",)}
    seen = np.concatenate(
        [x.mean(axis=(1, 2, 3)) for x in source.at(1).episode("rounds", 0, 0, 4).observations]
    )
    assert np.abs(np.diff(seen) + 3).max() < 2


def test_images_have_the_rate_of_their_json(tmp_path: Path) -> None:
    """Of images at 16 per second, a model at 8 sees every other."""
    frames = [(f"a.{number}.png", image) for number, image in enumerate(jpegs(64))]
    record = {"fps": 16}
    source = open_tar(write(tmp_path / "a.tar", [*frames, ("a.json", json.dumps(record).encode())]))
    episode = source.at(0).episode("rounds", 0, 0, 3)
    seen = np.concatenate([each.mean(axis=(1, 2, 3)) for each in episode.observations])
    assert np.abs(np.diff(seen) - 6).max() < 2
    bad = open_tar(write(tmp_path / "b.tar", [*frames, ("a.json", b'{"fps": "fast"}')]))
    with pytest.raises(InputError, match="its fps is 'fast'"):
        bad.at(0).episode("rounds", 0, 0, 1)


def test_a_missing_image_is_no_shorter_clip(tmp_path: Path) -> None:
    frames = [(f"a.{number:02d}.jpg", image) for number, image in enumerate(jpegs(20))]
    source = open_tar(write(tmp_path / "a.tar", [*frames[:7], *frames[8:]]))
    with pytest.raises(InputError, match="19 images with numbers from 0 to 19, and some"):
        source.at(0).episode("rounds", 0, 0, 1)
    every_other = open_tar(write(tmp_path / "b.tar", frames[::2]))
    assert len(every_other.at(0).episode("rounds", 0, 0, 1).observations[1]) == 8


def test_images_beside_a_video_and_of_other_cameras_are_counted(
    tmp_path: Path, video: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (image,) = jpegs(1)
    members = [("a.mp4", video), ("a.0.jpg", image), ("a.1.jpg", image), ("a.jpg", image)]
    members += [(f"b.{camera}.{number}.jpg", image) for camera in "lr" for number in range(9)]
    path = write(tmp_path / "a.tar", members)
    with tarfile.open(path, "a") as tar:
        link = tarfile.TarInfo("c.mp4")
        link.type, link.linkname = tarfile.SYMTYPE, "a.mp4"
        tar.addfile(link)
    assert open_tar(path).size == 2
    (said,) = [record.getMessage() for record in caplog.records]
    for words in (
        "2 images beside a video", "9 images of another sequence", "1 members .jpg", "1 links and devices"
    ):  # fmt: skip
        assert words in said


@pytest.mark.parametrize("end", [".tar.gz", ".tgz"])
def test_packed_shards_are_unpacked_once(
    shard: Path, tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    packed = tmp_path / f"s{end}"
    packed.write_bytes(gzip.compress(shard.read_bytes()))
    (settings,) = read_source(str(tmp_path)).sources.values()
    assert (settings.kind, settings.path) == ("webdataset", str(tmp_path / f"*{end}"))
    plain, source = open_tar(shard), open_tar(settings.path)
    assert "1 packed shards" in caplog.text
    assert source.size == plain.size == 6
    for index in range(6):
        expected, found = (each.at(index).episode("describe", 0, index, 1) for each in (plain, source))
        assert np.array_equal(found.observations[0], expected.observations[0])
    (kept,) = (tmp_path / "cache").rglob("*.tar")
    before = kept.stat().st_mtime_ns
    open_tar(settings.path)
    assert kept.stat().st_mtime_ns == before
    packed.write_bytes(packed.read_bytes()[:-5000])
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        open_tar(packed)
    monkeypatch.setattr(files, "MAX_UNPACKED_BYTES", 10_000)
    packed.write_bytes(gzip.compress(bytes(2**21)))
    with pytest.raises(ConfigError, match="GiB when unpacked"):
        open_tar(packed)


def test_other_members_are_ignored(tmp_path: Path, video: bytes) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name, data in (
            ("one.mp4", video),
            ("one.pyd", b"\x80\x04cos\nsystem\n"),
            ("../../two.mp4", video),
            ("three.txt", b"no video"),
            ("four.mp4", video[:-900]),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("five.mp4")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(link)
    before = sorted(tmp_path.parent.iterdir())
    source = open_tar(path)
    assert source.size == 3
    assert [source.at(i).name for i in range(3)] == ["a.tar/one.mp4", "a.tar/../../two.mp4", "a.tar/four.mp4"]
    source.at(1).episode("rounds", 0, 0, 1)
    with pytest.raises(InputError, match=r"a.tar/four.mp4.*cut off"):
        source.at(2).episode("rounds", 0, 0, 1)
    assert sorted(tmp_path.parent.iterdir()) == before


@pytest.mark.parametrize("text", [b"{", b"[1]", b'{"keys": ["fly"]}', b"\xff"])
def test_invalid_json_is_a_bad_clip(tmp_path: Path, video: bytes, text: bytes) -> None:
    path = write(tmp_path / "a.tar", [("good.mp4", video), ("good.json", b'{"keys": "left"}')])
    good = path.read_bytes()
    bad = write(tmp_path / "b.tar", [("bad.mp4", video), ("bad.json", text)])
    source = open_tar(tmp_path / "*.tar")
    assert path.read_bytes() == good
    assert source.at(0).episode("rounds", 0, 0, 1).actions[0].keys == ("left",)
    with pytest.raises(InputError, match=rf"{bad.name}/bad.mp4: "):
        source.at(1).episode("rounds", 0, 0, 1)


def test_invalid_shards(shard: Path, tmp_path: Path) -> None:
    whole = shard.read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"cut.tar.*cut off"):
        open_tar(tmp_path / "cut.tar")
    (tmp_path / "no.tar").write_bytes(b"hello" * 500)
    with pytest.raises(ConfigError, match=r"no.tar"):
        open_tar(tmp_path / "no.tar")
    with tarfile.open(tmp_path / "z.tar", "w:gz") as tar:
        tar.add(shard, "x.mp4")
    with pytest.raises(ConfigError, match=r"tar.gz"):
        open_tar(tmp_path / "z.tar")
    write(tmp_path / "text.tar", [("a.txt", b"x")])
    with pytest.raises(ConfigError, match="video"):
        open_tar(tmp_path / "text.tar")


def test_a_shard_that_goes_away_ends_the_run(shard: Path, tmp_path: Path) -> None:
    path = tmp_path / "gone.tar"
    path.write_bytes(shard.read_bytes())
    config = DataConfig({"shards": SourceConfig(kind="webdataset", path=str(path))})
    stage = StageConfig(steps=99, batch_size=2, rounds=1, tasks={"rounds": 1.0})
    with loader.batches(config, MODEL, stage, 0) as stream:
        next(stream)
        path.unlink()
        with pytest.raises(ConfigError, match=r"data.sources.shards"):
            list(stream)
