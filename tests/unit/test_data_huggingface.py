"""Streamed Hugging Face datasets from local folders: order, read-ahead and exact resume."""

import io
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from worldmodel.config import ActionConfig, DataConfig, SourceConfig, StageConfig, WorldModelConfig
from worldmodel.data import loader
from worldmodel.data.huggingface import ReadAhead, endless
from worldmodel.data.sources import open_source
from worldmodel.errors import ConfigError, InputError
from worldmodel.types import DESCRIBE, Action

MODEL = WorldModelConfig(action=ActionConfig(keys=("left", "right")))


class Rows:
    """What the reader needs of a `datasets.IterableDataset`."""

    def __init__(self, size: int, known: bool = False, breaks_at: int = -1, hangs_at: int = -1) -> None:
        self.size, self.breaks_at, self.hangs_at = size, breaks_at, hangs_at
        self.split = "train"
        self.info = SimpleNamespace(splits={"train": SimpleNamespace(num_examples=size)} if known else None)
        self.read = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.skip_to(0)

    def skip(self, number: int) -> "Skipped":
        return Skipped(self, number)

    def skip_to(self, first: int) -> Iterator[dict[str, Any]]:
        for number in range(first, self.size):
            if number == self.breaks_at:
                raise OSError("the line is dead")
            if number == self.hangs_at:
                time.sleep(60)
            self.read += 1
            yield {"number": number}


class Skipped:
    def __init__(self, rows: Rows, number: int) -> None:
        self.rows, self.number = rows, number

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.rows.skip_to(self.number)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("first", [0, 4, 9, 10, 27])
def test_a_stream_begins_again_at_its_end(known: bool, first: int) -> None:
    rows = endless(Rows(10, known), first)
    assert [next(rows)["number"] for _ in range(25)] == [(first + i) % 10 for i in range(25)]
    with pytest.raises(InputError, match="empty"):
        next(endless(Rows(0), 0))


def test_rows_near_each_other_come_in_any_order() -> None:
    rows = Rows(100)
    ahead = ReadAhead(rows, 8, 10.0, "here")
    for number in (3, 0, 7, 9, 15, 6, 8, 23, 17, 16, 5, 90, 91, 250, 3, 24):
        assert ahead.row(number)["number"] == number % 100
        assert len(ahead.windows) <= 4
    ahead.close()
    ahead = ReadAhead(rows := Rows(1000), 8, 10.0, "here")
    for number in range(80):
        ahead.row(number)
    assert rows.read <= 80 + 24  # two windows ahead at most
    ahead.close()


def test_many_threads_may_ask() -> None:
    ahead = ReadAhead(Rows(50), 4, 20.0, "here")
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
        ReadAhead(Rows(10, breaks_at=3), 8, 10.0, "here").row(0)
    with pytest.raises(ConfigError, match=r"here.* 8 .* 0.3 s"):
        ReadAhead(Rows(10, hangs_at=3), 8, 0.3, "here").row(0)


def test_closing_ends_those_who_wait() -> None:
    ahead, told = ReadAhead(Rows(10, hangs_at=3), 8, 60.0, "here"), []

    def ask() -> None:
        with pytest.raises(ConfigError, match=r"here.*closed"):
            ahead.row(0)
        told.append(True)

    thread = threading.Thread(target=ask)
    thread.start()
    while ahead.thread is None:
        time.sleep(0.01)
    ahead.close()
    thread.join(20)
    assert told
    with pytest.raises(ConfigError, match="closed"):  # and nothing is read any more
        ahead.row(0)
    assert ahead.thread is None


# Real datasets


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return pytest.importorskip("datasets", reason="datasets is not installed: worldmodel[data]")


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
    assert source.tasks == ("rounds", "imagine", "describe")
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
    assert [one + two for one, two in zip(names(size=2), names(rank=1, size=2), strict=True)] == whole


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
    for index in (0, 2, 5):
        assert source.at(index).episode("describe", 0, index, 1).answer == f"clip {index}"
    source.close()
    with pytest.raises(ConfigError, match=r"'txet'.*'text'"):
        open_source("hub", configured(folder, columns={"text": "txet"}), MODEL)
    with pytest.raises(ConfigError, match=r"columns.video"):
        open_source("hub", configured(folder, columns={"video": "film"}), MODEL)


def test_images_and_lists_of_images(datasets: Any, tmp_path: Path) -> None:
    def picture(value: int) -> bytes:
        out = io.BytesIO()
        Image.new("RGB", (64, 64), (value, value, value)).save(out, "PNG")
        return out.getvalue()

    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, rows in (
        (
            "stills",
            [{"image": {"bytes": picture(40 * i), "path": None}, "text": f"grey {i}"} for i in range(4)],
        ),
        ("frames", [{"frames": [picture(5 * i) for i in range(30)], "text": "brighter"} for _ in range(4)]),
    ):
        (tmp_path / name).mkdir()
        parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / name / "train.parquet")
    stills = open_source("hub", configured(tmp_path / "stills", columns={"video": "image"}), MODEL)
    assert stills.tasks == ("imagine", "describe")
    empty, clip = stills.at(2).episode("imagine", 0, 2, 1).observations
    assert empty.shape == (0, 64, 64, 3)
    assert clip.shape == (8, 64, 64, 3)
    assert (clip == 80).all()
    told = stills.at(3).episode("describe", 0, 3, 1)
    assert (told.prompt, told.answer, told.observations[0].shape) == (DESCRIBE, "grey 3", (1, 64, 64, 3))
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
