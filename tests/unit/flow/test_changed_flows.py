"""A flow that runs again with other stages, sources or folders: what goes on, and what is refused."""

import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa
from flow_stages import CALLS, flow_config, write_table

from worldmodel.config import DataConfig, SourceConfig, WorldModelConfig, build
from worldmodel.config.flow import FlowConfig, FlowSourceConfig
from worldmodel.database import transaction
from worldmodel.errors import ConfigError
from worldmodel.flow.buffer import open_buffer
from worldmodel.flow.catalog import schema
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.chain import PACK, Chain
from worldmodel.flow.catalog.records import BEGINNING, NewClip
from worldmodel.flow.errors import FlowError, StageError
from worldmodel.flow.log.log import FINISHED, Log
from worldmodel.flow.log.pack import Packer
from worldmodel.flow.log.source import FlowSource
from worldmodel.flow.stages.base import CLIP, Stage, stage
from worldmodel.flow.work import feeder
from worldmodel.flow.work.feeder import Feeder
from worldmodel.flow.work.run import run_flow

LIMIT_S = 300.0
"""Time after which a flow that takes a second is taken to hang."""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return write_table(tmp_path / "files", 16)


def run(config: FlowConfig) -> list[dict[str, Any]]:
    """Run a flow to its end, and return the columns of the clips in its log."""
    stop, end = threading.Event(), time.monotonic() + LIMIT_S

    def watch() -> None:
        if time.monotonic() > end:
            stop.set()

    run_flow(config, watch, stop=stop)
    assert not stop.is_set(), "it hangs"
    log = Log(config.place("log"))
    clips = [clip for number in range((log.end() or (0, 0))[0]) for clip in log.segment(number)]
    parts = [(clip.file, *clip.parts["json"]) for clip in clips]
    return [json.loads(Path(file).read_bytes()[first : first + size]) for file, first, size in parts]


def opened(config: FlowConfig) -> closing[Catalog]:
    return closing(Catalog(config.place("catalog"), Chain.of(config)))


def texts(rows: list[dict[str, Any]]) -> list[str]:
    return [row["text"] for row in rows]


@pytest.mark.parametrize("before", [{"read": {}, "measure": {}, "sum": {}}, {"read": {}, "sum": {}}])
def test_a_stage_whose_column_no_later_one_reads_is_changed_or_added(
    before: dict[str, Any], tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(run(flow_config(tmp_path / "flow", table, before))) == 16
    calls = tmp_path / "calls"
    monkeypatch.setenv(CALLS, str(calls))
    changed = {"read": {}, "measure": {"settings": {"least": 110}}, "sum": {}}
    rows = run(flow_config(tmp_path / "flow", table, changed))
    assert texts(rows) == [f"clip {number}" for number in range(10, 16)]
    assert all(row["sum"] for row in rows)
    assert {line.split()[0] for line in calls.read_text().splitlines()} == {"measure"}


def test_a_stage_is_added_before_one_that_divides_clips(tmp_path: Path, table: Path) -> None:
    divided = {"read": {}, "halves": {}, "sum": {}}
    assert len(run(flow_config(tmp_path / "flow", table, divided))) == 32
    added = {"read": {}, "trouble": {"settings": {"how": "raise", "where": "/7.bin"}}, **divided}
    found = texts(run(flow_config(tmp_path / "flow", table, added, max_attempts=1)))
    assert found == [f"clip {number}" for number in range(16) if number != 7 for _ in range(2)]
    assert len(run(flow_config(tmp_path / "flow", table, {"read": {}, "sum": {}}))) == 16


def test_a_run_that_was_killed_while_it_began_changes_nothing_for_the_former_chain(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = flow_config(tmp_path / "flow", table, {"read": {}})
    first = run(config)
    other = flow_config(tmp_path / "flow", table, {"read": {}}, segment_size=4)

    def killed(self: Catalog, *args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, opened(other) as catalog:
        patch.setattr(Catalog, "_register", killed)
        with pytest.raises(KeyboardInterrupt):
            catalog.begin()
    assert run(config) == first
    assert sorted(texts(run(other))) == sorted(texts(first))


def meeting(monkeypatch: pytest.MonkeyPatch, method: str) -> set[Catalog]:
    """Let two catalogs wait for each other, but not for long, in a method; return those that call it."""
    callers: set[Catalog] = set()
    barrier, original = threading.Barrier(2), getattr(Catalog, method)

    def waiting(self: Catalog, *args: Any) -> Any:
        if self not in callers:
            callers.add(self)
            with suppress(threading.BrokenBarrierError):
                barrier.wait(2.0)
        return original(self, *args)

    monkeypatch.setattr(Catalog, method, waiting)
    return callers


@pytest.mark.parametrize("other", [{"read": {}}, {"measure": {}}])
def test_machines_that_begin_a_changed_flow_at_the_same_time_take_turns(
    other: dict[str, Any], database_url: str, tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = flow_config(tmp_path, table, catalog=database_url)
    with opened(former) as catalog:
        Feeder(former, catalog).list_next()
        catalog.end(catalog.begin())
    restating = meeting(monkeypatch, "_restate")

    def begins(stages: dict[str, Any]) -> bool:
        with opened(flow_config(tmp_path, table, stages, catalog=database_url)) as catalog:
            try:
                catalog.begin()
            except FlowError:  # a run with other stages is alive
                return False
        return True

    with ThreadPoolExecutor(2) as pool:
        began = list(pool.map(begins, [{"read": {}}, other]))
    assert len(restating) == 1
    assert sum(began) == (2 if other == {"read": {}} else 1)


def test_the_run_that_began_last_is_the_newest_whatever_the_clock_of_another_machine(
    tmp_path: Path, table: Path
) -> None:
    former, changed = flow_config(tmp_path, table), flow_config(tmp_path, table, {"read": {}})
    with opened(former) as first, opened(changed) as second:
        first.end(first.begin())
        ahead = sa.update(schema.run).values(started_at=time.time() + 100)
        transaction(first.engine, lambda db: db.execute(ahead))
        second.begin()
        assert second.last_chain() == second.chain.key


def test_the_same_name_for_another_function_is_another_stage(tmp_path: Path, table: Path) -> None:
    keys = {
        Chain.of(flow_config(tmp_path, table, {"mine": {"function": f"flow_stages:{name}"}})).links[0].key
        for name in ("read", "measure")
    }
    assert len(keys) == 2
    own = Stage("a", "2", ("x",), ("y",), make=lambda batch, **settings: batch, settings={"b": 1})
    assert own.key(["p"]) == "2-a1184fbae98e", "results of earlier versions are found"


def test_values_that_no_catalog_holds_are_named() -> None:
    @stage(version="1", inputs=["address"], outputs=["when"])
    def when(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({CLIP: batch.column(CLIP), "when": pa.array([0], pa.timestamp("us"))})

    with pytest.raises(StageError, match=r"when.*timestamp.*numbers, texts"):
        when.function()(pa.record_batch({CLIP: ["a"], "address": ["b"]}))


# ---- sources ----------------------------------------------------------------------------------------


def test_a_source_that_has_become_another_one_is_refused(tmp_path: Path, table: Path) -> None:
    source = {"path": str(table), "columns": {"address": "address", "text": "text"}}
    config = flow_config(tmp_path / "flow", table, sources={"files": {**source, "limit": 8}})
    assert len(run(config)) == 8
    for changed in ({"path": str(table.with_name("b.jsonl"))}, {"columns": {"address": "text"}}):
        with pytest.raises(ConfigError, match=r"sources\.files .* another name"):
            run(flow_config(tmp_path / "flow", table, sources={"files": {**source, **changed}}))
    with opened(config) as catalog:  # made by an earlier version
        forget = sa.update(schema.listing).values(digest=None)
        transaction(catalog.engine, lambda db: db.execute(forget))
        assert (
            len(run(flow_config(tmp_path / "flow", table, sources={"files": {**source, "licence": "x"}})))
            == 16
        )
        assert catalog.listed("files").digest is not None


def test_a_file_that_comes_before_the_others_of_a_folder_is_listed(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    sources = {"mine": {"kind": "folder", "path": str(tmp_path / "videos")}}
    config = flow_config(tmp_path / "flow", tmp_path, {"read": {}}, sources=sources)
    for count, name in enumerate(("b", "c", "a", "d"), 1):
        (tmp_path / "videos" / f"{name}.mp4").write_bytes(name.encode())
        assert len(run(config)) == count
    with opened(config) as catalog:
        assert catalog.listed("mine").rows == 4


def test_rows_that_name_the_same_clip_are_reported(
    tmp_path: Path, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with table.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"address": "0.bin", "text": text}) + "\n" for text in "ab")
    config = flow_config(tmp_path / "flow", table)
    with caplog.at_level(logging.WARNING):
        assert texts(run(config))[0] == "clip 0"
        run(config)
    assert [record.getMessage() for record in caplog.records if "files" in record.getMessage()] == [
        "2 rows of the source files name the same file and times as an earlier row: they are one clip, with "
        "the text of the first."
    ]


@pytest.mark.parametrize("turns", [False, True])
def test_rows_with_files_are_listed_once_by_several_machines(
    turns: bool, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr(feeder, "ROWS", 10)
    (tmp_path / "held").mkdir()
    files = [f"file {number}".encode() for number in range(45)]
    rows = pa.table({"mp4": pa.array(files, pa.binary()), "caption": [f"{each}" for each in files]})
    pq.write_table(rows, tmp_path / "held" / "train.parquet")
    sources = {"held": {"kind": "huggingface", "path": str(tmp_path / "held")}}
    config = flow_config(tmp_path, tmp_path, {"read": {}}, sources=sources, catalog=database_url)
    with opened(config) as first, opened(config) as second:
        listers = [Feeder(config, catalog) for catalog in (first, second)]
        listers[0].list_next()  # and is lost, unless they take turns
        while any([lister.list_next() for lister in (listers if turns else listers[1:])]):
            pass
        clips = [each.id for each in first.after(BEGINNING, 99)]
        places = first.columns(clips, ["video"], "read")[1]["video"]
        stored = open_buffer(config.place("buffer")).read([place for place in places if place], "video")
        assert stored == files
        assert first.listed("held").rows == 45


def test_what_another_process_has_listed_is_not_listed_over_it(tmp_path: Path, table: Path) -> None:
    with opened(flow_config(tmp_path, table)) as catalog:
        assert catalog.add("files", [NewClip("a", "a"), NewClip("b", "b")], 2, False) == 2
        assert catalog.add("files", [NewClip("a", "a")], 1, False) is None
        assert catalog.add("files", [NewClip("c", "c")], 3, True, before=2) == 1
        assert (catalog.listed("files").rows, len(catalog.after(BEGINNING, 9))) == (3, 3)


def test_sources_that_machines_list_at_the_same_time_have_ordinals_of_their_own(
    database_url: str, tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = flow_config(tmp_path, table, catalog=database_url)

    def add(name: str) -> int | None:
        with opened(config) as catalog:
            return catalog.add(name, [NewClip(f"{name}{number}", "x") for number in range(2)], 2, True)

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        meeting(patch, "_add_results")
        assert list(pool.map(add, "ab")) == [2, 2]
    with opened(config) as catalog:
        assert [each.place for each in catalog.after(BEGINNING, 9)] == [(number, 0) for number in range(4)]
        positions = sa.select(schema.listing.c.position).order_by(schema.listing.c.position)
        assert transaction(catalog.engine, lambda db: db.execute(positions).scalars().all()) == [0, 1]


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        (FlowSourceConfig, {"limit": -1}, "limit"),
        (FlowConfig, {"folder": "s3://bucket/flow"}, "buffer, log and catalog"),
    ],
)
def test_settings_that_would_do_something_else_are_refused(
    kind: type, values: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        build(kind, values)


# ---- the log ----------------------------------------------------------------------------------------


def test_a_log_without_the_recorded_segments_is_refused(tmp_path: Path, table: Path) -> None:
    config = flow_config(tmp_path / "flow", table)
    first = run(config)
    (Path(config.place("log")) / Chain.of(config).key / "000001.json").unlink()  # its run was killed
    assert run(config) == first
    moved = flow_config(tmp_path / "flow", table, log=str(tmp_path / "empty"))
    with pytest.raises(FlowError, match="another folder"):
        run(moved)
    assert not (tmp_path / "empty").exists()


def test_a_log_that_is_extended_has_no_end_meanwhile(tmp_path: Path, table: Path) -> None:
    config = flow_config(tmp_path / "flow", table)
    run(config)
    end = Path(config.place("log")) / Chain.of(config).key / FINISHED
    with opened(config) as catalog:
        Packer(config, catalog).seal_next(True)
        assert end.exists(), "nothing is added"
        catalog.add("files", [NewClip("new", "new")], 17, False, before=16)
        assert not Packer(config, catalog).seal_next(False)
        assert catalog.waiting_for(PACK, BEGINNING, 1) == []
    assert not end.exists()


def test_training_does_not_read_on_behind_a_short_segment(tmp_path: Path, table: Path) -> None:
    config = flow_config(tmp_path / "flow", table, {"read": {}}, segment_size=10)
    run(config)
    with table.open("a", encoding="utf-8") as file:
        for number in range(4):
            (table.parent / f"new{number}.bin").write_bytes(b"new")
            file.write(json.dumps({"address": f"new{number}.bin", "text": "new"}) + "\n")
    assert len(run(config)) == 20
    source = FlowSource(
        "web", DataConfig({"web": SourceConfig("flow", config.place("log"))}), WorldModelConfig()
    )
    with pytest.raises(ConfigError, match="another `folder`"):
        source.at(17)
