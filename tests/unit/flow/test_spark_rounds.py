"""Rounds of clips on an engine, beside the local executor: which attempts follow a failure, and when."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from flow_stages import flow_config, write_table

from worldmodel.config.flow import FlowConfig
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.log.status import StageStatus, StatusReader
from worldmodel.flow.stages.base import CLIP, RETRY, RETRY_AFTER, stage
from worldmodel.flow.work.run import run_flow
from worldmodel.plugins.spark.rounds import Row, Task, remaining, run_rounds, run_task

calls: list[tuple[float, list[str]]] = []
"""When the stages below were called, and with which clips."""


class Inline:
    """An engine whose workers are calls in this process; one that ends takes its rows with it."""

    def __init__(self, config: FlowConfig) -> None:
        self.config, self.chain = config, Chain.of(config)

    def play(self, rows: pa.Table) -> Sequence[Row]:
        for link in remaining(self.chain, rows):
            try:
                rows = run_task(Task.of(self.config, link.name), rows)
            except SystemExit:
                return []
        return rows.to_pylist()

    def close(self) -> None: ...


@stage(version="1", inputs=["address"], outputs=[], uncounted=["after_s"])
def busy(batch: pa.RecordBatch, *, after_s: float = 0.0) -> pa.RecordBatch:
    """Ask to be called again later, the first time."""
    size, first = batch.num_rows, not calls
    calls.append((time.monotonic(), batch.column(CLIP).to_pylist()))
    retry = pa.array(["the host is busy" if first else None] * size, pa.string())
    return pa.record_batch({CLIP: batch.column(CLIP), RETRY: retry, RETRY_AFTER: [after_s] * size})


@stage(version="1", inputs=["address"], outputs=[])
def ends(batch: pa.RecordBatch) -> pa.RecordBatch:
    """End the worker at one clip."""
    calls.append((time.monotonic(), batch.column(CLIP).to_pylist()))
    if any(address.endswith("/3.bin") for address in batch.column("address").to_pylist()):
        raise SystemExit
    return pa.record_batch({CLIP: batch.column(CLIP)})


@pytest.fixture
def table(tmp_path: Path) -> Path:
    calls.clear()
    (tmp_path / "files").mkdir()
    return write_table(tmp_path / "files", 6)


def run_inline(config: FlowConfig) -> StageStatus:
    """Run the one stage of a flow on the engine, and return its state."""
    run_rounds(config, Inline(config), lambda: None, threading.Event())
    reader = StatusReader(config)
    try:
        return reader.read().stages[0]
    finally:
        reader.close()


@pytest.mark.parametrize("run", [run_flow, run_inline])
@pytest.mark.parametrize(("after_s", "waits_s"), [(0.0, 0.2), (0.7, 0.7)])
def test_a_clip_is_tried_again_after_its_delay_or_when_its_stage_asks(
    tmp_path: Path, table: Path, run: Callable[[FlowConfig], object], after_s: float, waits_s: float
) -> None:
    stages = {"busy": {"function": f"{__name__}:busy", "settings": {"after_s": after_s}}}
    config = flow_config(tmp_path / "flow", table, stages, retry_delay_s=0.2)
    run(config)
    (first, clips), *others = calls
    assert sorted(clip for _, each in others for clip in each) == sorted(clips)
    assert [len(each) for _, each in others] == [1] * len(clips)
    assert min(when for when, _ in others) - first >= waits_s


@pytest.mark.parametrize("max_attempts", [1, 2])
def test_a_clip_that_ends_its_worker_takes_no_other_with_it(
    tmp_path: Path, table: Path, max_attempts: int
) -> None:
    stages = {"ends": {"function": f"{__name__}:ends"}}
    config = flow_config(tmp_path / "flow", table, stages, max_attempts=max_attempts)
    state = run_inline(config)
    assert (state.done, state.dead) == (5, 1)
    assert len(calls[0][1]) == 6
    assert all(len(clips) == 1 for _, clips in calls[1:])
