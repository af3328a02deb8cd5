"""Ray Data and Spark give the same log as the local executor, and survive workers that end or hang."""

import json
import shutil
from pathlib import Path

import pytest
from flow_stages import flow_config, write_table

from worldmodel.config.flow import FlowConfig
from worldmodel.errors import ConfigError
from worldmodel.flow.errors import FlowError
from worldmodel.flow.log.log import Log
from worldmodel.flow.log.status import StatusReader
from worldmodel.flow.work.run import run_flow

pytestmark = pytest.mark.slow


@pytest.fixture(params=["ray", "spark"])
def engine(request: pytest.FixtureRequest) -> str:
    pytest.importorskip("pyspark" if request.param == "spark" else "ray")
    if request.param == "spark" and shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    return request.param


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return write_table(tmp_path / "files", 30)


def hashes(config: FlowConfig) -> list[str]:
    log = Log(config.place("log"))
    return [json.loads(log.storage.read(f"{n:06d}.json"))["sha256"] for n in range((log.end() or (0,))[0])]


def test_engines_give_the_same_log_as_threads(tmp_path: Path, table: Path, engine: str) -> None:
    """Dropped clips, a stage that divides clips, and one that fails at a clip until it is a dead letter."""
    stages = {
        "read": {"workers": 2},
        "measure": {"settings": {"least": 105}},
        "trouble": {"settings": {"how": "raise", "where": "/7.bin"}, "timeout_s": 20.0},
        "halves": {},
        "sum": {},
    }
    threads = flow_config(tmp_path / "threads", table, stages, max_attempts=2)
    config = flow_config(tmp_path / engine, table, stages, executor=engine, max_attempts=2)
    run_flow(threads)
    run_flow(config)
    assert hashes(config) == hashes(threads)
    assert len(hashes(config)) == 6
    reader = StatusReader(config)
    state = {stage.name: stage for stage in reader.read().stages}
    (dead,) = reader.verdicts("trouble")
    reader.close()
    assert dead.examples[0]["address"].endswith("7.bin")
    assert "strange" in dead.reason
    assert (state["measure"].dropped, state["trouble"].done, state["sum"].done) == (5, 24, 48)


@pytest.mark.parametrize("max_attempts", [1, 2])
def test_clips_that_end_or_hang_their_workers_take_no_others_with_them(
    tmp_path: Path, table: Path, engine: str, max_attempts: int
) -> None:
    stages = {
        "read": {},
        "kills": {
            "function": "flow_stages:trouble",
            "settings": {"how": "kill", "where": "/7.bin"},
            "timeout_s": 20.0,
        },
        "hangs": {
            "function": "flow_stages:trouble",
            "settings": {"how": "hang", "where": "/21.bin"},
            "timeout_s": 3.0,
        },
    }
    config = flow_config(tmp_path / "flow", table, stages, executor=engine, max_attempts=max_attempts)
    run_flow(config)
    reader = StatusReader(config)
    kills, hangs = reader.read().stages[1:3]
    examples = [reader.verdicts(stage.name)[0].examples[0]["address"] for stage in (kills, hangs)]
    reader.close()
    assert (kills.done, kills.dead, hangs.done, hangs.dead) == (29, 1, 28, 1)
    assert examples[0].endswith("/7.bin")
    assert examples[1].endswith("/21.bin")


BUSY = """
import time
import pyarrow as pa
from worldmodel.flow.stages.base import stage

@stage(version="1", inputs=["address"], outputs=[])
def busy(batch: pa.RecordBatch, *, calls: str) -> pa.RecordBatch:
    with open(calls, "a") as file:
        first = file.tell() == 0
        file.write(f"{time.time()}\\n")
    size = batch.num_rows
    retry = pa.array(["the host is busy" if first else None] * size, pa.string())
    return pa.record_batch({"clip": batch.column("clip"), "retry": retry, "retry_after_s": [15.0] * size})
"""


def test_a_stage_decides_when_its_clips_are_tried_again(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "busy_host.py").write_text(BUSY)
    monkeypatch.syspath_prepend(tmp_path)
    calls = tmp_path / "calls"
    stages = {"busy": {"function": "busy_host:busy", "settings": {"calls": str(calls)}}}
    run_flow(flow_config(tmp_path / "flow", write_table(tmp_path, 2), stages, executor=engine))
    first, *others = map(float, calls.read_text().split())
    assert len(others) == 2
    assert min(others) - first >= 15.0


def test_a_stage_that_loses_rows_ends_the_run(tmp_path: Path, table: Path, engine: str) -> None:
    stages = {"trouble": {"settings": {"how": "fewer"}}}
    with pytest.raises(FlowError, match="trouble"):
        run_flow(flow_config(tmp_path / "flow", table, stages, executor=engine))


@pytest.mark.parametrize("name", ["ray", "spark"])
def test_a_missing_package_is_named(tmp_path: Path, table: Path, name: str) -> None:
    try:
        __import__({"spark": "pyspark"}.get(name, name))
    except ModuleNotFoundError:
        with pytest.raises(ConfigError, match=rf"worldmodel\[{name}\]"):
            run_flow(flow_config(tmp_path / "flow", table, executor=name))
    else:
        pytest.skip("it is installed")
