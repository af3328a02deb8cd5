"""Flows from a table to a log: what is done once, what is done again, and what happens to trouble."""

import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from flow_stages import flow_config, write_table

from worldmodel.config.flow import FlowConfig
from worldmodel.errors import ConfigError, DatabaseError
from worldmodel.flow.buffer import open_buffer
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.errors import FlowError, StageError
from worldmodel.flow.log.log import Log
from worldmodel.flow.log.status import FlowStatus, StatusReader
from worldmodel.flow.work.run import run_flow


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return write_table(tmp_path / "files", 30)


def counts(calls: Path) -> Counter[str]:
    """Number of clips that each stage was called for, and forget them."""
    lines = calls.read_text().splitlines()
    calls.write_text("")
    return Counter(line.split()[0] for line in lines)


def status(config: FlowConfig) -> FlowStatus:
    reader = StatusReader(config)
    try:
        return reader.read()
    finally:
        reader.close()


def rows(config: FlowConfig) -> list[dict]:
    """The clips of a finished log, in its order."""
    log = Log(config.place("log"))
    end = log.end()
    assert end is not None
    found = []
    for number in range(end[0]):
        for clip in log.segment(number):
            data = Path(clip.file).read_bytes()
            parts = {name: data[start : start + size] for name, (start, size) in clip.parts.items()}
            found.append({**json.loads(parts.pop("json")), **parts})
    assert len(found) == end[1]
    return found


def hashes(config: FlowConfig) -> list[str]:
    log = Log(config.place("log"))
    return [json.loads(log.storage.read(f"{n:06d}.json"))["sha256"] for n in range((log.end() or (0,))[0])]


def test_clips_pass_all_stages_and_are_packed_in_the_order_of_the_table(tmp_path: Path, table: Path) -> None:
    config = flow_config(tmp_path / "flow", table, {"read": {}, "measure": {"settings": {"least": 105}}})
    assert run_flow(config) == 0
    found = rows(config)
    assert [row["row"]["text"] for row in found] == [f"clip {number}" for number in range(5, 30)]
    assert [row["length"] for row in found] == list(range(105, 130))
    assert all(row["video"] == Path(row["address"]).read_bytes() for row in found)
    state = status(config)
    assert (state.listed, state.all_listed, state.packed, state.segments) == (30, True, 25, 4)
    by_name = {stage.name: stage for stage in state.stages}
    assert (by_name["read"].done, by_name["measure"].done, by_name["measure"].dropped) == (30, 25, 5)
    assert by_name["measure"].waiting == 0


def test_a_finished_flow_does_nothing_when_it_runs_again(tmp_path: Path, table: Path, calls: Path) -> None:
    config = flow_config(tmp_path / "flow", table)
    run_flow(config)
    assert counts(calls) == {"read": 30, "measure": 30}
    first = hashes(config)
    run_flow(config)
    assert counts(calls) == {}
    assert hashes(config) == first


def test_only_a_changed_stage_and_what_reads_it_is_computed_again(
    tmp_path: Path, table: Path, calls: Path
) -> None:
    config = flow_config(tmp_path / "flow", table)
    run_flow(config)
    counts(calls)
    first = hashes(config)
    changed = flow_config(tmp_path / "flow", table, {"read": {}, "measure": {"settings": {"least": 110}}})
    run_flow(changed)
    assert counts(calls) == {"measure": 30}
    assert len(rows(changed)) == 20
    waiting = flow_config(
        tmp_path / "flow", table, {"read": {}, "measure": {"settings": {"least": 110, "wait_s": 0.001}}}
    )
    run_flow(waiting)  # a setting that changes no result
    assert counts(calls) == {}
    run_flow(config)  # the first again: its results are kept, and what is packed is not packed again
    assert counts(calls) == {}
    assert hashes(config) == first


def test_divided_clips_go_on_as_parts_with_the_columns_of_the_whole(
    tmp_path: Path, table: Path, calls: Path
) -> None:
    stages = {"read": {}, "measure": {}, "halves": {}, "sum": {}}
    config = flow_config(tmp_path / "flow", table, stages)
    run_flow(config)
    found = rows(config)
    assert [(row["row"]["text"], row["start_s"]) for row in found] == [
        (f"clip {number}", float(part)) for number in range(30) for part in range(2)
    ]
    assert all(row["sum"] == sum(row["video"]) for row in found)
    assert counts(calls) == {"read": 30, "measure": 30, "halves": 30, "sum": 60}
    three = flow_config(tmp_path / "flow", table, {**stages, "halves": {"settings": {"parts": 3}}})
    run_flow(three)
    assert counts(calls) == {"halves": 30, "sum": 90}
    assert len(rows(three)) == 90


@pytest.mark.parametrize("how", ["raise", "retry"])
def test_a_clip_that_fails_is_tried_again_and_then_a_dead_letter(
    tmp_path: Path, table: Path, calls: Path, how: str
) -> None:
    trouble = {"settings": {"how": how, "where": "/7.bin"}}
    config = flow_config(tmp_path / "flow", table, {"read": {}, "trouble": trouble})
    run_flow(config)
    state = status(config).stages[1]
    assert (state.done, state.dead) == (29, 1)
    attempts = Counter(line for line in calls.read_text().splitlines() if line.startswith("trouble"))
    assert sorted(attempts.values(), reverse=True)[0] >= 3
    assert len(rows(config)) == 29
    reader = StatusReader(config)
    (dead,) = reader.verdicts("trouble")
    reader.close()
    assert dead.examples[0]["address"].endswith("7.bin")
    assert ("strange" if how == "raise" else "busy") in dead.reason

    catalog = Catalog(config.place("catalog"), Chain.of(config))
    assert catalog.retry(["read"]) == 0
    assert catalog.retry(["trouble"]) == 1
    catalog.close()
    calls.write_text("")
    run_flow(config)
    assert counts(calls)["trouble"] >= 3  # again in vain
    assert status(config).stages[1].dead == 1


@pytest.mark.slow
def test_processes_give_the_same_log_as_threads(tmp_path: Path, table: Path) -> None:
    threads = flow_config(tmp_path / "threads", table)
    processes = flow_config(
        tmp_path / "processes", table, {"read": {"workers": 2}, "measure": {"workers": 2}}, executor="local"
    )
    run_flow(threads)
    run_flow(processes)
    assert hashes(threads) == hashes(processes)
    assert len(hashes(threads)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "hang"])
def test_a_clip_that_ends_its_worker_takes_no_other_with_it(tmp_path: Path, table: Path, how: str) -> None:
    # On a busy machine, batches of other clips take seconds, too: neither limit may end those.
    stages = {"read": {}, "trouble": {"settings": {"how": how, "where": "/7.bin"}, "timeout_s": 10}}
    config = flow_config(tmp_path / "flow", table, stages, executor="local", lease_s=6, max_attempts=2)
    run_flow(config)
    state = status(config).stages[1]
    assert (state.done, state.dead) == (29, 1)
    reader = StatusReader(config)
    (dead,) = reader.verdicts("trouble")
    reader.close()
    assert dead.examples[0]["address"].endswith("7.bin")


@pytest.mark.parametrize("executor", ["threads", pytest.param("local", marks=pytest.mark.slow)])
def test_a_stage_that_hangs_ends_the_run_with_its_name(tmp_path: Path, table: Path, executor: str) -> None:
    stages = {"read": {}, "trouble": {"settings": {"how": "hang"}, "timeout_s": 0.3}}
    config = flow_config(tmp_path / "flow", table, stages, executor=executor, lease_s=0.2, max_attempts=9)
    with pytest.raises(StageError, match="trouble"):
        run_flow(config)
    assert status(config).stages[0].done > 0


@pytest.mark.parametrize("executor", ["threads", pytest.param("local", marks=pytest.mark.slow)])
def test_a_stage_that_loses_rows_ends_the_run(tmp_path: Path, table: Path, executor: str) -> None:
    stages = {"trouble": {"settings": {"how": "fewer"}}}
    with pytest.raises(FlowError, match="trouble"):
        run_flow(flow_config(tmp_path / "flow", table, stages, executor=executor))


def test_a_database_that_cannot_be_used_ends_the_run_and_fails_no_clip(tmp_path: Path, table: Path) -> None:
    stages = {"trouble": {"settings": {"how": "database"}, "timeout_s": 60}}
    config = flow_config(tmp_path / "flow", table, stages, executor="threads", max_attempts=1)
    with pytest.raises(DatabaseError, match=r"\.bin"):
        run_flow(config)
    state = status(config)
    assert state.error is not None
    assert ".bin" in state.error
    assert (state.stages[0].dead, state.stages[0].waiting) == (0, 30)


def test_a_run_that_is_stopped_goes_on_where_it_ended(tmp_path: Path, table: Path, calls: Path) -> None:
    config = flow_config(tmp_path / "flow", table, {"read": {}, "measure": {"settings": {"wait_s": 0.05}}})
    stop = threading.Event()

    def watch() -> None:
        if len(calls.read_text().splitlines()) > 20:
            stop.set()

    run_flow(config, watch, stop=stop)
    assert not (Path(config.place("log")) / "finished.json").exists()
    run_flow(config)
    done = counts(calls)
    assert done["read"] == 30
    assert done["measure"] == 30
    whole = flow_config(tmp_path / "whole", table)
    run_flow(whole)
    assert hashes(config) == hashes(whole)


def test_threads_finish_their_batches_before_a_stopped_run_ends(
    tmp_path: Path, table: Path, calls: Path
) -> None:
    config = flow_config(tmp_path / "flow", table, {"read": {}, "measure": {"settings": {"wait_s": 0.5}}})
    stop = threading.Event()

    def watch() -> None:
        if "measure" in calls.read_text():
            stop.set()

    run_flow(config, watch, stop=stop)
    done = [stage.done for stage in status(config).stages]
    called = counts(calls)
    assert done[:2] == [called["read"], called["measure"]]
    assert done[1] > 0


def test_clips_in_flight_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    table = write_table(tmp_path / "files", 100)
    config = flow_config(
        tmp_path / "flow", table, {"read": {}, "measure": {"settings": {"wait_s": 0.01}}},
        max_in_flight=16,
    )  # fmt: skip
    most = 0
    reader = StatusReader(config, create=True)

    def watch() -> None:
        nonlocal most
        most = max(most, sum(stage.waiting for stage in reader.read().stages))

    run_flow(config, watch)
    reader.close()
    assert len(rows(config)) == 100
    assert 0 < most <= 256  # listed together


def test_two_runs_with_other_stages_do_not_mix(tmp_path: Path, table: Path) -> None:
    config = flow_config(tmp_path / "flow", table)
    catalog = Catalog(config.place("catalog"), Chain.of(config))
    run = catalog.begin()
    other = flow_config(tmp_path / "flow", table, {"read": {}})
    with pytest.raises(FlowError, match="other stages"):
        run_flow(other)
    catalog.end(run)
    catalog.close()
    run_flow(other)


def test_rows_that_are_added_to_a_table_are_done_by_the_next_run(tmp_path: Path, table: Path) -> None:
    config = flow_config(tmp_path / "flow", table, segment_size=10)
    run_flow(config)
    first = hashes(config)
    (table.parent / "new.bin").write_bytes(b"new")
    with table.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"address": "new.bin", "text": "new"}) + "\n")
    run_flow(config)
    assert hashes(config)[:3] == first
    assert [row["row"]["text"] for row in rows(config)][30:] == ["new"]


def test_unused_results_are_removed_and_used_ones_are_not(tmp_path: Path, table: Path) -> None:
    config = flow_config(tmp_path / "flow", table)
    run_flow(config)
    catalog = Catalog(config.place("catalog"), Chain.of(config))
    buffer = open_buffer(config.place("buffer"))
    places = list(catalog.places())
    assert buffer.compact(places, older_than_s=0) == 0
    kept = [place for place in places if place.split(",")[0] == places[0].split(",")[0]]
    content = buffer.read(kept, "video")
    assert buffer.compact(kept, older_than_s=0) > 0
    assert buffer.read(kept, "video") == content
    with pytest.raises(FlowError, match="cannot be read"):
        buffer.read(places, "video")
    catalog.close()


@pytest.mark.parametrize(
    ("stages", "named"),
    [
        ({}, "stages"),
        ({"nothing": {"function": ""}}, "nothing"),
        ({"read": {"function": "flow_stages:missing"}}, "missing"),
        ({"read": {"settings": {"speed": 1}}}, "speed"),
        ({"trouble": {}}, "how"),
        ({"pack": {"function": "flow_stages:read"}}, "pack"),
    ],
)
def test_a_wrong_stage_is_an_error_before_anything_runs(
    tmp_path: Path, table: Path, stages: dict, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        run_flow(flow_config(tmp_path / "flow", table, stages))


def test_declaring_stages_imports_no_model_library() -> None:
    code = (
        "import sys; from worldmodel.flow import stages; from worldmodel.flow.executors import local;"
        "[stages.find_stage(name) for name in stages.STAGES];"
        "print({'torch', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
