"""Streamed Hugging Face datasets from local folders: order, read-ahead and exact resume."""

import dataclasses
import io
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from worldmodel.actions import Action
from worldmodel.config import ActionConfig, DataConfig, SourceConfig, StageConfig, WorldModelConfig
from worldmodel.data import loader
from worldmodel.data.argument import read_source
from worldmodel.data.huggingface import Cycle, EndlessRows, HuggingFaceSource, ReadAhead, num_streams, starts
from worldmodel.data.sources import open_source
from worldmodel.episodes import DESCRIBE
from worldmodel.errors import ConfigError, InputError

MODEL = WorldModelConfig(action=ActionConfig(keys=("left", "right")))


class Rows:
    """The methods of a `datasets.IterableDataset` that the reader uses."""

    def __init__(self, size: int, breaks_at: int = -1, hangs_at: int = -1) -> None:
        self.size, self.breaks_at, self.hangs_at = size, breaks_at, hangs_at
        self.read = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.size):
            if number == self.breaks_at:
                raise OSError("the line is dead")
            if number == self.hangs_at:
                time.sleep(60)
            self.read += 1
            yield {"number": number}


@pytest.mark.parametrize("first", [0, 4, 9, 10, 27, 1000])
def test_a_stream_begins_again_at_its_end(first: int) -> None:
    read = Rows(10)
    rows = EndlessRows(Cycle(lambda part: read))
    rows.skip(first)
    assert read.read <= 20
    assert [rows.next()["number"] for _ in range(25)] == [(first + i) % 10 for i in range(25)]
    with pytest.raises(InputError, match="empty"):
        EndlessRows(Cycle(lambda part: Rows(0))).next()
    with pytest.raises(InputError, match="empty"):
        EndlessRows(Cycle(lambda part: Rows(0))).skip(3)


def test_rows_near_each_other_come_in_any_order() -> None:
    rows = Rows(100)
    ahead = ReadAhead(Cycle(lambda part: rows), 8, 10.0, "here")
    for number in (3, 0, 7, 9, 15, 6, 8, 23, 17, 16, 5, 90, 91, 250, 3, 24):
        assert ahead.row(number)["number"] == number % 100
        assert len(ahead.windows) <= 4
    ahead.close()
    rows = Rows(1000)
    ahead = ReadAhead(Cycle(lambda part: rows), 8, 10.0, "here")
    for number in range(80):
        ahead.row(number)
    assert rows.read <= 80 + 24  # two windows ahead at most
    ahead.close()


def test_many_threads_may_ask() -> None:
    ahead = ReadAhead(Cycle(lambda part: Rows(50)), 4, 20.0, "here")
    wrong = []

    def ask(start: int) -> None:
        for number in range(start, start + 60, 3):
            if ahead.row(number)["number"] != number % 50:
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(start,)) for start in (0, 11, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
    ahead.close()


def test_a_stream_that_breaks_or_hangs_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"here.*the line is dead"):
        ReadAhead(Cycle(lambda part: Rows(10, breaks_at=3)), 8, 10.0, "here").row(0)
    with pytest.raises(ConfigError, match=r"here.* 8 .* 0.3 s"):
        ReadAhead(Cycle(lambda part: Rows(10, hangs_at=3)), 8, 0.3, "here").row(0)


def test_closing_ends_those_who_wait() -> None:
    ahead, described = ReadAhead(Cycle(lambda part: Rows(10, hangs_at=3)), 8, 60.0, "here"), []

    def ask() -> None:
        with pytest.raises(ConfigError, match=r"here.*closed"):
            ahead.row(0)
        described.append(True)

    thread = threading.Thread(target=ask)
    thread.start()
    while ahead.thread is None:
        time.sleep(0.01)
    ahead.close()
    thread.join(20)
    assert described
    with pytest.raises(ConfigError, match="closed"):  # and nothing is read any more
        ahead.row(0)
    assert ahead.thread is None


# Real datasets


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return pytest.importorskip("datasets", reason="datasets is not installed: openworldmodel[data]")


def configured(path: Path, window: int = 4, **more: Any) -> DataConfig:
    return DataConfig({"hub": SourceConfig(kind="huggingface", path=str(path), **more)}, window=window)


@pytest.fixture
def folder(recorded: Path, tmp_path: Path) -> Path:
    """A folder of videos with metadata.jsonl."""
    folder = tmp_path / "videos"
    folder.mkdir()
    rows = []
    for index, clip in enumerate(sorted(recorded.glob("*.mp4"))):
        shutil.copy(clip, folder / clip.name)
        rows.append({"file_name": clip.name, "caption": f"clip {index}", "keys": "left"})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_folder_of_videos(datasets: Any, folder: Path) -> None:
    config = configured(folder, columns={"keys": "keys"})
    source = open_source("hub", config, MODEL)
    assert source.tasks == ("rounds", "imagine", "describe", "inverse")
    for index in (1, 0, 7):
        episode = source.at(index).episode("rounds", 0, index, 2)
        assert episode.actions == (Action(f"clip {index % 6}", ("left",)),) * 2
        assert [clip.shape for clip in episode.observations] == [
            (1, 64, 64, 3),
            (8, 64, 64, 3),
            (8, 64, 64, 3),
        ]
    source.close()
    stage = StageConfig(steps=6, batch_size=4, rounds=1, tasks={"rounds": 0.5, "describe": 0.5})

    def names(first: int = 0, num_workers: int = 0, rank: int = 0, size: int = 1) -> list[list[str]]:
        data = DataConfig(config.sources, window=4, num_workers=num_workers)
        with loader.batches(data, MODEL, stage, 1, first, rank, size) as stream:
            return [[e.name for batch in step for e in batch.episodes] for step in stream]

    whole = names()
    assert len({name for step in whole for name in step}) == 24  # rows are numbered on over the epochs
    assert names(first=4, num_workers=1) == whole[4:]
    halves = zip(names(size=2), names(rank=1, size=2), strict=True)
    assert [sorted(one + two) for one, two in halves] == [sorted(step) for step in whole]


def test_bytes_in_parquet(datasets: Any, recorded: Path, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "parquet"
    folder.mkdir()
    for part in range(2):
        rows = [
            {"mp4": (recorded / f"clip-0000{i}.mp4").read_bytes(), "text": f"clip {i}", "unused": 1}
            for i in range(3 * part, 3 * part + 3)
        ]
        parquet.write_table(arrow.Table.from_pylist(rows), folder / f"train-{part}.parquet")
    source = open_source("hub", configured(folder), MODEL)
    for index, clip in ((0, 0), (2, 1), (5, 5)):  # two files are two streams, which take turns
        assert source.at(index).episode("describe", 0, index, 1).answer == f"clip {clip}"
    source.close()
    with pytest.raises(ConfigError, match=r"'txet'.*'text'"):
        open_source("hub", configured(folder, columns={"text": "txet"}), MODEL)
    with pytest.raises(ConfigError, match=r"columns.video"):
        open_source("hub", configured(folder, columns={"video": "film"}), MODEL)


ROWS = 48
"""Rows of the dataset in files."""


@pytest.fixture
def files(datasets: Any, recorded: Path, tmp_path: Path) -> Path:
    """A dataset of eight files with six rows each."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "files"
    folder.mkdir()
    clips = [clip.read_bytes() for clip in sorted(recorded.glob("*.mp4"))]
    for file in range(8):
        rows = [{"mp4": clips[i], "text": f"file {file} row {i}"} for i in range(6)]
        parquet.write_table(arrow.Table.from_pylist(rows), folder / f"train-{file}.parquet")
    return folder


STAGE = StageConfig(steps=9, batch_size=8, rounds=1, tasks={"describe": 1.0})


def answers(stream: loader.BatchLoader, steps: int = 99) -> list[list[tuple[int, str]]]:
    """Index and text of every episode, by step."""
    return [
        sorted(
            (index, episode.answer or "")
            for batch in step
            for index, episode in zip(batch.indices, batch.episodes, strict=True)
        )
        for step in islice(stream, steps)
    ]


@pytest.mark.parametrize("dp_size", [2, 4, 8, 16])
def test_a_rank_reads_its_own_streams_alone(files: Path, dp_size: int) -> None:
    stage = dataclasses.replace(STAGE, batch_size=16, steps=3)  # one pass
    with loader.batches(configured(files, window=16), MODEL, stage, 1) as stream:
        whole = answers(stream)
    parts = []
    for rank in range(dp_size):
        with loader.batches(configured(files, window=16), MODEL, stage, 1, 0, rank, dp_size) as stream:
            parts.append(answers(stream))
            source = stream.sources["hub"]
            assert isinstance(source, HuggingFaceSource)
            assert source.opened.keys() == {s for s in range(8) if s % min(dp_size, 8) == rank % 8 % dp_size}
        read = {text.split(" row")[0] for step in parts[-1] for _, text in step}
        assert read == {f"file {number}" for number in source.opened}
        assert {len(step) for step in parts[-1]} == {16 // dp_size}
    assert [sorted(chain.from_iterable(step)) for step in zip(*parts, strict=True)] == whole
    assert len({text for step in whole[:3] for _, text in step}) == ROWS


@pytest.mark.parametrize("streams", [1, 2, 8])
@pytest.mark.parametrize("dp_size", [1, 2])
def test_a_resumed_run_does_not_read_over_earlier_rows(
    files: Path, streams: int, dp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(files, window=8, streams=streams)
    with loader.batches(config, MODEL, STAGE, 1) as stream:
        whole = answers(stream)
    marks: dict[str, dict[str, Any]] = {"hub": {}}
    for rank in range(dp_size):
        with loader.batches(config, MODEL, STAGE, 1, 0, rank, dp_size) as stream:
            answers(stream, 5)
            marks["hub"] |= stream.state()["bookmarks"]["hub"]
    assert len(marks["hub"]) == streams
    marks = json.loads(json.dumps(marks))
    skipped, skip = [], EndlessRows.skip
    monkeypatch.setattr(EndlessRows, "skip", lambda self, n: skipped.append(n) or skip(self, n))
    with loader.batches(config, MODEL, STAGE, 1, 5, bookmarks=marks) as stream:
        assert answers(stream) == whole[5:]
    assert max(skipped) <= 8, "at most the window of a bookmark that was taken on the way to the next one"
    skipped.clear()
    with loader.batches(config, MODEL, STAGE, 1, 5) as stream:  # without bookmarks: the same, but slower
        assert answers(stream) == whole[5:]
    assert sum(skipped) == 40
    other = configured(files, window=8, streams=4)
    with loader.batches(other, MODEL, STAGE, 1, 5) as right:
        expected = answers(right)
    with loader.batches(other, MODEL, STAGE, 1, 5, bookmarks=marks) as stream:
        assert answers(stream) == expected  # bookmarks of other streams are of no use


@pytest.mark.parametrize(
    ("sizes", "kind"), [((6,) * 9, "parquet"), ((5, 1, 9, 3, 7), "parquet"), ((4, 7, 2), "jsonl")]
)
@pytest.mark.parametrize("streams", [1, 2, 4, 8])
def test_every_row_is_drawn_as_often_as_every_other(
    datasets: Any, tmp_path: Path, sizes: tuple[int, ...], kind: str, streams: int
) -> None:
    """With nine files in eight streams, rows of two files came half as often."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for file, size in enumerate(sizes):
        rows = [{"text": f"document {file} {row}"} for row in range(size)]
        if kind == "parquet":
            parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / f"{file}.parquet", row_group_size=4)
        else:
            (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig({"mine": SourceConfig("text", str(tmp_path), streams=streams)}, window=8)
    source = open_source("mine", config, MODEL)
    total = sum(sizes)
    drawn = Counter(str(source.at(index).texts[0]) for index in range(10 * total))
    assert len(drawn) == total
    assert set(drawn.values()) <= ({9, 10, 11} if total % source.streams else {10})
    source.close()


def test_a_stream_of_unknown_length_reads_all_files_in_turn() -> None:
    parts = [Rows(3), Rows(5), Rows(2)]
    rows = EndlessRows(Cycle(parts.__getitem__, 3, first=1, skipped=2))
    assert [rows.next()["number"] for _ in range(12)] == [2, 3, 4, 0, 1, 0, 1, 2, 0, 1, 2, 3]
    assert rows.total == 10
    assert starts(None, 9, 4) == [(0, 0), (2, 0), (4, 0), (6, 0)]
    assert starts([3, 5, 2], 3, 2) == [(0, 0), (1, 2)]


def test_a_relative_folder_is_no_builder(
    datasets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`text` is a builder of `datasets`, which reads all files below the current folder."""
    for folder in ("text", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_text(json.dumps({"text": f"of {folder}"}) + "\n")
    monkeypatch.chdir(tmp_path)
    source = open_source("mine", DataConfig({"mine": SourceConfig("text", "text")}), MODEL)
    assert source.at(0).texts == ("of text",)
    source.close()


def test_rows_of_one_file_are_divided_by_row_groups(datasets: Any, recorded: Path, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    clip = next(recorded.glob("*.mp4")).read_bytes()
    rows = [{"mp4": clip, "text": f"row {i}"} for i in range(12)]
    (tmp_path / "one").mkdir()
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "one" / "train.parquet", row_group_size=3)
    source = open_source("hub", configured(tmp_path / "one"), MODEL)
    assert source.streams == 4
    found = [source.at(index).episode("describe", 0, index, 1).answer for index in range(12)]
    assert sorted(found) == sorted(row["text"] for row in rows)
    assert found[:5] == ["row 0", "row 3", "row 6", "row 9", "row 1"]
    source.close()
    assert [num_streams(files, 8) for files in (1, 2, 3, 7, 8, 100)] == [1, 2, 2, 4, 8, 8]


def test_images_and_lists_of_images(datasets: Any, tmp_path: Path) -> None:
    def image(value: int) -> bytes:
        out = io.BytesIO()
        Image.new("RGB", (64, 64), (value, value, value)).save(out, "PNG")
        return out.getvalue()

    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, rows in (
        (
            "stills",
            [{"image": {"bytes": image(40 * i), "path": None}, "text": f"grey {i}"} for i in range(4)],
        ),
        ("frames", [{"frames": [image(5 * i) for i in range(30)], "text": "brighter"} for _ in range(4)]),
    ):
        (tmp_path / name).mkdir()
        parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / name / "train.parquet")
    stills = open_source("hub", configured(tmp_path / "stills", columns={"video": "image"}), MODEL)
    assert stills.tasks == ("imagine", "describe")
    empty, clip = stills.at(2).episode("imagine", 0, 2, 1).observations
    assert empty.shape == (0, 64, 64, 3)
    assert clip.shape == (8, 64, 64, 3)
    assert (clip == 80).all()
    described = stills.at(3).episode("describe", 0, 3, 1)
    assert (described.prompt, described.answer, described.observations[0].shape) == (
        DESCRIBE,
        "grey 3",
        (1, 64, 64, 3),
    )
    stills.close()
    columns = {"video": "image", "question": "text", "answer": "text"}
    asking = open_source("hub", configured(tmp_path / "stills", columns=columns), MODEL)
    asked = asking.at(1).episode("ask", 0, 1, 1)
    assert (asked.prompt, asked.answer, asked.observations[0].shape) == ("grey 1", "grey 1", (1, 64, 64, 3))
    asking.close()
    frames = open_source("hub", configured(tmp_path / "frames"), MODEL)
    episode = frames.at(1).episode("rounds", 0, 1, 2)
    values = np.concatenate(episode.observations)[:, 0, 0, 0]
    assert list(values) == list(range(values[0], values[0] + 85, 5))
    frames.close()


def test_lists_that_lack_images_are_bad_clips(datasets: Any, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    there = [{"bytes": b"x", "path": None}] * 20
    rows = [{"frames": [], "text": "x"}, {"frames": [*there, {"bytes": None, "path": "a.png"}], "text": "x"}]
    (tmp_path / "set").mkdir()
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "set" / "train.parquet")
    source = open_source("hub", configured(tmp_path / "set"), MODEL)
    for index in range(2):
        with pytest.raises(InputError, match="images"):
            source.at(index).episode("rounds", 0, index, 1)
    source.close()


def test_a_row_cannot_name_files_elsewhere(datasets: Any, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "set").mkdir()
    outside = [
        "/etc/hostname",
        "../x.mp4",
        "https://example.org/x.mp4",
        "hf://datasets/someone/else@main/x.mp4",
        f"file:///etc/hostname::hf://datasets/{tmp_path / 'set'}@main/x.mp4",
    ]
    rows = [{"video": path, "text": "x"} for path in outside]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "set" / "train.parquet")
    source = open_source("hub", configured(tmp_path / "set"), MODEL)
    for index in range(len(outside)):
        with pytest.raises(InputError, match=r"outside of|not in the dataset's own"):
            source.at(index).episode("rounds", 0, index, 1)
    source.close()


def test_a_dataset_that_is_not_there(datasets: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.sources.hub") as caught:
        open_source("hub", configured(tmp_path / "nothing"), MODEL)
    assert "\n" not in str(caught.value)


def test_rlds_is_not_read_and_a_converter_is_named(datasets: Any, tmp_path: Path) -> None:
    folder = tmp_path / "bridge" / "1.0.0"
    folder.mkdir(parents=True)
    (folder / "features.json").write_text('{"steps": {}}')  # which `datasets` would read as rows
    (folder / "bridge-train.tfrecord-00000-of-00001").write_bytes(b"\0" * 64)
    for path in (folder, folder.parent):
        with pytest.raises(ConfigError, match=r"RLDS.*any4lerobot"):
            open_source("hub", configured(path), MODEL)
        with pytest.raises(InputError, match=r"RLDS.*any4lerobot"):
            read_source(str(path))
