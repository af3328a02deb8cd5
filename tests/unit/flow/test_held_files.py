"""Flows over data sets whose rows hold the files."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from worldmodel.cli import main
from worldmodel.config import build, to_dict
from worldmodel.config.flow import FlowConfig
from worldmodel.data.clips import Part
from worldmodel.flow.buffer import open_buffer
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.catalog.clip_table import ClipTable
from worldmodel.flow.catalog.records import BEGINNING
from worldmodel.flow.log.log import Log
from worldmodel.flow.log.status import StatusReader
from worldmodel.flow.work import feeder
from worldmodel.flow.work.feeder import Feeder
from worldmodel.flow.work.run import run_flow
from worldmodel.io import TEMPORARY_PREFIX

datasets = pytest.importorskip("datasets")


@pytest.fixture
def videos(recorded: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(recorded.glob("*.mp4"))]


@pytest.fixture
def held(videos: list[bytes], tmp_path: Path) -> Path:
    """Rows of a column `mp4`: videos, one that is too large, one that is text, and one without a file."""
    cells = [*videos[:4], videos[0] + bytes(2**20), b"<html>no video</html>", None]
    table = pa.table({"mp4": pa.array(cells, pa.binary()), "txt": [f"clip {n}" for n in range(7)]})
    (tmp_path / "held").mkdir()
    for number, (first, size) in enumerate([(0, 3), (3, 4)]):
        part = table.slice(first, size)
        pq.write_table(part, tmp_path / "held" / f"train-{number}.parquet", row_group_size=2)
    return tmp_path / "held"


def config(folder: Path, held: Path, **settings: Any) -> FlowConfig:
    values = {
        "folder": str(folder),
        "executor": "threads",
        "sources": {"held": {"kind": "huggingface", "path": str(held), "licence": "cc0"}},
        "stages": {"fetch": {"settings": {"max_bytes": 2**20}}, "probe": {}},
        "segment_size": 2,
        "max_in_flight": 4,
    }
    return build(FlowConfig, {**values, **settings})


def packed(found: FlowConfig) -> list[bytes]:
    """Return the videos of the log, in its order."""
    log = Log(found.place("log"))
    clips = [clip for number in range((log.end() or (0, 0))[0]) for clip in log.segment(number)]
    return [Part(clip.file, *clip.parts["video"]).read() for clip in clips]


@pytest.mark.parametrize("buffer", ["", "lance:"])
def test_files_of_rows_are_checked_and_packed_like_fetched_ones(
    buffer: str, held: Path, videos: list[bytes], tmp_path: Path
) -> None:
    if buffer:
        pytest.importorskip("lance")
    found = config(tmp_path / "flow", held, buffer=buffer and f"{buffer}{tmp_path / 'buffer'}")
    assert run_flow(found) == 0
    assert packed(found) == videos[:4]
    with closing(StatusReader(found)) as reader:
        fetch, probe, _ = reader.read().stages
        entries = ClipTable(reader.catalog).page(BEGINNING, 9)
        names = ["sha256", "media_type", "robots", "final_address"]
        rows, _ = reader.catalog.columns([entries[1].id], names, "pack")
        places = list(reader.catalog.places())
    assert (fetch.done, fetch.dropped, fetch.dead, probe.done) == (4, 3, 0, 4)
    reasons = {entry.address: entry.reason or "" for entry in entries if entry.reason}
    assert "1 MiB" in reasons[f"{held}/train#4"]
    assert "web page" in reasons[f"{held}/train#5"]
    assert "row 7" in reasons[""]
    assert {name: value for name, (value,) in rows.items()} == {
        "sha256": hashlib.sha256(videos[1]).hexdigest(),
        "media_type": "video/mp4", "robots": "not asked", "final_address": f"{held}/train#1",
    }  # fmt: skip
    assert len(places) == 6  # each file once: `fetch` does not store it again
    assert {stage for stage, _ in open_buffer(found.place("buffer")).sizes()} == {"listed"}


def test_a_changed_stage_reads_files_from_the_buffer(held: Path, videos: list[bytes], tmp_path: Path) -> None:
    assert run_flow(config(tmp_path / "flow", held)) == 0
    changed = config(tmp_path / "flow", held, stages={"fetch": {"settings": {"max_bytes": 2**22}}})
    assert run_flow(changed) == 0
    assert packed(changed)[-5:] == [*videos[:4], videos[0] + bytes(2**20)]
    path = tmp_path / "flow.yaml"
    path.write_text(json.dumps(to_dict(changed)))
    assert main(["flow", "prune", str(path), "--delete"]) == 0
    assert main(["flow", "compact", str(path)]) == 0
    with closing(Catalog(changed.place("catalog"), Chain.of(changed))) as catalog:
        places = list(catalog.places())
        assert len(places) == 6
        stored = open_buffer(changed.place("buffer")).read(places, "video")
        assert sorted(stored, key=lambda each: each or b"")[1:]


def test_few_large_files_are_listed_together_and_none_twice(
    held: Path, videos: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeder, "MAX_BYTES", len(videos[0]) + 1)
    found, steps = config(tmp_path / "flow", held), []
    while not steps or not steps[-1][1]:
        with closing(Catalog(found.place("catalog"), Chain.of(found))) as catalog:
            lister = Feeder(found, catalog)  # a new one, as after an interruption
            lister.list_next()
            steps.append(lister.listed["held"])
    assert [rows for rows, _ in steps] == [2, 3, 4, 5, 7]
    with closing(Catalog(found.place("catalog"), Chain.of(found))) as catalog:
        clips = [each.id for each in catalog.after(BEGINNING, 10)]
        rows, places = catalog.columns(clips, ["text", "video"], "fetch")
    assert rows["text"][:6] == [f"clip {n}" for n in range(6)]
    stored = open_buffer(found.place("buffer")).read([place for place in places["video"] if place], "video")
    assert stored[:4] == videos[:4]


def test_rows_with_several_clips_share_their_file(videos: list[bytes], tmp_path: Path) -> None:
    rows = [
        {
            "videoID": "x", "url": {"bytes": data, "path": None}, "caption": "['first', 'second']",
            "timestamp": "[['0:00:00', '0:00:00.4'], ['0:00:00.4', '0:00:00.8']]",
        }
        for data in videos[:2]
    ]  # fmt: skip
    (tmp_path / "held").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "held" / "train.parquet")
    source = {"kind": "huggingface", "path": str(tmp_path / "held"), "preset": "panda70m"}
    found = config(tmp_path / "flow", tmp_path / "held", sources={"held": source})
    assert run_flow(found) == 0
    assert packed(found) == [videos[0]] * 2 + [videos[1]] * 2
    with closing(Catalog(found.place("catalog"), Chain.of(found))) as catalog:
        assert len(set(catalog.places())) == 2


def test_parts_of_a_divided_clip_read_the_file_of_its_row(
    videos: list[bytes], held: Path, tmp_path: Path
) -> None:
    stages = {
        "fetch": {},
        "measure": {"function": "flow_stages:measure"},
        "halves": {"function": "flow_stages:halves"},
        "sum": {"function": "flow_stages:Sum"},
    }
    source = {"kind": "huggingface", "path": str(held), "limit": 2}
    found = config(tmp_path / "flow", held, sources={"held": source}, stages=stages)
    assert run_flow(found) == 0
    assert packed(found) == [videos[0]] * 2 + [videos[1]] * 2


@pytest.mark.slow
def test_a_killed_flow_goes_on_with_the_same_segments(held: Path, tmp_path: Path) -> None:
    once = config(tmp_path / "once", held)
    assert run_flow(once) == 0
    again = config(tmp_path / "again", held, executor="local", max_in_flight=4)
    path = tmp_path / "flow.yaml"
    path.write_text(json.dumps(to_dict(again)))
    command = [sys.executable, "-m", "worldmodel", "flow", "run", str(path)]
    killed = subprocess.Popen(command, start_new_session=True)
    while killed.poll() is None and not any(Path(again.place("log")).rglob("0*.tar")):
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    interrupted = next(Path(again.place("log")).rglob("0*.tar")).with_name(f"{TEMPORARY_PREFIX}0.tar")
    interrupted.touch()
    os.utime(interrupted, (0, 0))
    assert subprocess.run(command, check=False).returncode == 0
    assert not interrupted.exists()
    # The kill itself may leave a temporary file, which is too young to be removed.
    names = [sorted(path.name for path in Path(each.place("log")).rglob("0*.tar")) for each in (once, again)]
    assert names[0] == names[1]
    assert packed(once) == packed(again)
