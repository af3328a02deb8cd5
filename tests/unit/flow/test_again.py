"""What a run would do before it does it, and clips that a stage works on again."""

import threading
from collections import Counter
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from flow_stages import flow_config, write_table

from worldmodel.cli import main
from worldmodel.config import to_dict
from worldmodel.config.flow import FlowConfig
from worldmodel.errors import InputError
from worldmodel.flow.catalog.again import Planner, Range
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.errors import FlowError
from worldmodel.flow.log.log import Log
from worldmodel.flow.log.status import StatusReader
from worldmodel.flow.work.run import run_flow

SHORT = {"read": {}, "measure": {"settings": {"least": 110}}, "halves": {}, "sum": {}}
"""Stages of which the second drops 10 of 20 clips, and the third makes two parts of each."""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return write_table(tmp_path / "files", 20)


def catalog_of(config: FlowConfig) -> Catalog:
    return Catalog(config.place("catalog"), Chain.of(config), create=False)


def planned(config: FlowConfig) -> dict[str, tuple[int, int]]:
    with closing(catalog_of(config)) as catalog:
        return {stage.name: (stage.num_kept, stage.num_open) for stage in Planner(catalog).stages()}


def counts(calls: Path) -> dict[str, int]:
    """Number of clips that each stage was called for, and forget them."""
    lines = calls.read_text().splitlines()
    calls.write_text("")
    return dict(Counter(line.split()[0] for line in lines))


def test_a_dry_run_says_what_the_run_then_does(tmp_path: Path, table: Path, calls: Path) -> None:
    config = flow_config(tmp_path / "flow", table, SHORT)
    run_flow(config)
    assert planned(config) == {"read": (20, 0), "measure": (20, 0), "halves": (10, 0), "sum": (20, 0)}
    changed = flow_config(tmp_path / "flow", table, {**SHORT, "sum": {"settings": {"plus": 1}}})
    before = (tmp_path / "flow" / "catalog.db").read_bytes()
    assert planned(changed) == {"read": (20, 0), "measure": (20, 0), "halves": (10, 0), "sum": (0, 20)}
    longer = flow_config(tmp_path / "flow", table, {**SHORT, "measure": {"settings": {"least": 105}}})
    assert planned(longer)["measure"] == (0, 20)
    assert planned(longer)["read"] == (20, 0)
    assert (tmp_path / "flow" / "catalog.db").read_bytes() == before
    counts(calls)
    run_flow(changed)
    assert counts(calls) == {"sum": 20}
    assert planned(changed)["sum"] == (20, 0)


def test_a_stage_works_again_on_clips_of_a_range_that_are_not_packed(
    tmp_path: Path, table: Path, calls: Path
) -> None:
    config = flow_config(tmp_path / "flow", table, SHORT)
    run_flow(config)
    counts(calls)
    with closing(catalog_of(config)) as catalog:
        planner = Planner(catalog)
        assert [link.name for link in planner.readers("measure")] == ["measure", "halves", "sum"]
        assert planner.within(5, 15) == Range(5, 5), "the first ten are dropped, the others packed"
        assert planner.forget("measure", 5, 15) == Range(5, 5)
    assert planned(config)["measure"] == (15, 5)
    with closing(StatusReader(config)) as reader:
        measure = reader.read().stages[1]
        assert (measure.done, measure.dropped, measure.waiting) == (10, 5, 5)
    segments = Log(config.place("log")).end()
    run_flow(config)
    assert counts(calls) == {"measure": 5}, "its input is kept, and it drops them again"
    assert Log(config.place("log")).end() == segments
    with closing(StatusReader(config)) as reader:
        measure = reader.read().stages[1]
        assert (measure.done, measure.dropped, measure.waiting) == (10, 10, 0)


def test_parts_are_made_again_and_packed_once(tmp_path: Path, table: Path, calls: Path) -> None:
    config, stop = flow_config(tmp_path / "flow", table, {**SHORT, "measure": {}}, segment_size=64,
                               max_in_flight=128), threading.Event()  # fmt: skip
    feeding = flow_config(
        tmp_path / "flow", table, {**SHORT, "measure": {}}, segment_size=64, max_in_flight=128
    ).only(["read", "measure", "halves", "feed"])
    with closing(StatusReader(config, create=True)) as reader:

        def stop_when_divided() -> None:
            if reader.read().stages[2].done == 20:
                stop.set()

        run_flow(feeding, stop_when_divided, stop=stop)
    with closing(catalog_of(config)) as catalog:
        assert Planner(catalog).forget("read", 0, 20) == Range(20, 0)
    counts(calls)
    run_flow(config)
    assert counts(calls) == {"read": 20, "measure": 20, "halves": 20, "sum": 40}
    assert Log(config.place("log")).end() == (1, 40)


def test_a_flow_that_runs_is_not_made_to_work_again(tmp_path: Path, table: Path) -> None:
    config = flow_config(tmp_path / "flow", table, SHORT)
    run_flow(config)
    with closing(catalog_of(config)) as catalog:
        with pytest.raises(InputError, match="'banana'"):
            Planner(catalog).forget("banana", 0, 5)
        run = catalog.begin()
        with pytest.raises(FlowError, match="stop it first"):
            Planner(catalog).forget("measure", 0, 5)
        catalog.end(run)


def test_the_commands_for_both(tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, path = flow_config(tmp_path / "flow", table, SHORT), tmp_path / "flow.yaml"
    path.write_text(yaml.safe_dump(to_dict(config), sort_keys=False))
    run_flow(config)
    assert main(["flow", "export", str(path), str(tmp_path / "clips.parquet")]) == 0
    rows = pq.read_table(tmp_path / "clips.parquet").to_pylist()
    assert [row["ordinal"] for row in rows if row["verdict"] == "dropped"] == list(range(10))
    assert main(["flow", "run", str(path), "stages.sum.settings.plus=1", "--dry-run"]) == 0
    assert "sum: 0 results are kept, at most 20 clips are open" in capsys.readouterr().out
    backfill = ["flow", "backfill", str(path), "--stage", "measure", "--range"]
    assert main([*backfill, "5:15", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "5 clips pass measure, halves, sum again in a run without --dry-run" in shown
    assert "5 are in segments" in shown
    assert planned(config)["measure"] == (20, 0), "a dry run changes nothing"
    assert main([*backfill, "5:15"]) == 0
    assert planned(config)["measure"] == (15, 5)
    assert main([*backfill, "15:5"]) == 2
    assert "--range 100:200" in capsys.readouterr().err
