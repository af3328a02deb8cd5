"""Rounds of clips that pass the stages on an engine such as Ray Data or Spark.

The driver lists clips, hands those in flight to the engine as one table, and packs meanwhile. The engine runs
all stages on the table; a worker reads, computes and records as in the local executor, so the catalog, the
buffer and the log are the same. A clip that failed is tried again in a later round. A round ends with its
slowest clip, so `max_in_flight` should be many times the number of workers. All machines need the package,
the modules of one's own stages, and the addresses of `catalog`, `buffer` and `log`.
"""

import faulthandler
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import pyarrow as pa

from worldmodel.config import build, to_dict
from worldmodel.config.flow import FlowConfig
from worldmodel.errors import WorldModelError
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.chain import PACK, Chain, Link
from worldmodel.flow.catalog.records import BEGINNING, Waiting
from worldmodel.flow.errors import FlowError, StageError
from worldmodel.flow.log.pack import Packer
from worldmodel.flow.work.attempts import delay_s, groups
from worldmodel.flow.work.feeder import Lister
from worldmodel.flow.work.work import Work

SCHEMA = pa.schema(
    [
        ("clip", pa.string()), ("stage", pa.string()), ("delivery", pa.int32()), ("after_s", pa.float64()),
        ("error", pa.string()),
    ]
)  # fmt: skip
"""Rows between stages: a clip, the stage it waits for, the number of its delivery there, and after how many
seconds it is tried again if that delivery has failed; or an error."""
Row = Mapping[str, Any]
MAX_STUCK = 5
"""Rounds in a row that may bring no clip on, beyond the attempts at each, before the run fails."""
INTERVAL_S = 0.1


class Engine(Protocol):
    """Runs tables of clips through the stages."""

    def play(self, rows: pa.Table) -> Sequence[Row]:
        """Run the stages in their order on rows of `SCHEMA`; return the rows of failures and of errors."""
        ...

    def close(self) -> None:
        """End what the engine has started, also a round in progress."""
        ...


@dataclass(frozen=True)
class Task:
    """Work of a worker.

    Args:
        config: the flow, as JSON.
        stage: name of the stage.
        paths: folders of the driver's modules, among them those with stages of one's own.
    """

    config: str
    stage: str
    paths: tuple[str, ...]

    @classmethod
    def of(cls, config: FlowConfig, stage: str) -> "Task":
        """Return the task of a stage, with the paths of this process."""
        return cls(json.dumps(to_dict(config)), stage, tuple(path for path in sys.path if path))


@cache  # a process constructs a stage once
def _work(task: Task) -> Work:
    sys.path += [path for path in task.paths if path not in sys.path]
    return Work(build(FlowConfig, json.loads(task.config)), task.stage)


def run_task(task: Task, rows: pa.Table, ended: int = 0) -> pa.Table:
    """Run a stage on the rows that wait for it, in a worker.

    A call that takes longer than the stage may ends the process, and so the attempt.

    Args:
        task: the stage.
        rows: table of `SCHEMA`.
        ended: how many workers the engine has given these rows before, which ended.

    Returns:
        The rows of other stages, and of the clips that continue or are to be tried again.
    """
    onward = [row for row in rows.to_pylist() if row["stage"] != task.stage]
    mine = [row for row in rows.to_pylist() if row["stage"] == task.stage]
    try:
        work = _work(task)
        size, timeout_s = work.link.stage.batch_size, work.link.stage.timeout_s
        for some in groups(mine, lambda row: row["delivery"] + ended, size):
            delivery = some[0]["delivery"] + ended
            faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.__stderr__ or sys.stderr)
            try:
                outcome = work.process([row["clip"] for row in some], delivery)
            finally:
                faulthandler.cancel_dump_traceback_later()
            onward += _onward(work, outcome.done)
            onward += [_row(clip, task.stage, delivery, wait_s) for clip, wait_s in outcome.retry.items()]
    except WorldModelError as error:
        onward.append({**_row("", "", 1), "error": str(error)})
    return pa.Table.from_pylist(onward, SCHEMA)


def _onward(work: Work, done: Sequence[str]) -> list[dict[str, Any]]:
    following = work.chain.after(work.link.name)
    states = dict.fromkeys(done, following)
    if work.link.stage.expands:
        states = {each.id: each.state for each in work.catalog.parts(done)}
    return [_row(clip, state, 1) for clip, state in states.items() if state != PACK]


def _row(clip: str, stage: str, delivery: int, after_s: float | None = None) -> dict[str, Any]:
    return {"clip": clip, "stage": stage, "delivery": delivery, "after_s": after_s, "error": None}


def remaining(chain: Chain, rows: pa.Table) -> Sequence[Link]:
    """Return the stages from the first one that a row waits for."""
    waited = set(rows.column("stage").to_pylist())
    return chain.links[min(chain.names.index(name) for name in waited) :]


class Deliveries:
    """Which clips were delivered in vain, how often, and when they are tried again."""

    def __init__(self, config: FlowConfig) -> None:
        self.config = config
        self.number: Counter[tuple[str, str]] = Counter()
        self.due: dict[tuple[str, str], float] = {}
        self.stuck = 0

    def ready(self, waiting: Sequence[Waiting]) -> list[Waiting]:
        """Return the waiting clips that a stage may begin now."""
        now = time.monotonic()
        return [
            each for each in waiting if each.state != PACK and self.due.get((each.id, each.state), 0) <= now
        ]

    def table(self, clips: Sequence[Waiting]) -> pa.Table:
        """Return the rows of clips."""
        rows = [_row(each.id, each.state, self.number[each.id, each.state] + 1) for each in clips]
        return pa.Table.from_pylist(rows, SCHEMA)

    def failed(self, before: Sequence[Waiting], after: Sequence[Waiting], rows: Sequence[Row]) -> None:
        """Count a delivery of the clips of a round, or parts of them, that still wait for a stage after it.

        Args:
            before: the clips of the round.
            after: all clips that wait, or at least those up to the last one of the round.
            rows: what the round returned, with the waits of those whose workers have not ended.

        Raises:
            StageError: no clip gets on any more.
        """
        round_ids, ordinals = {each.id for each in before}, {each.place[0] for each in before}
        left = {
            (each.id, each.state)
            for each in after
            if each.state != PACK and (each.id in round_ids or (each.place[1] and each.place[0] in ordinals))
        }
        left -= {key for key, due in self.due.items() if due > time.monotonic()}
        waits = {(row["clip"], row["stage"]): row["after_s"] for row in rows}
        for key in left:
            self.number[key] += 1
            wait_s = waits.get(key)
            wait_s = delay_s(self.config, self.number[key]) if wait_s is None else wait_s
            self.due[key] = time.monotonic() + wait_s
        self.stuck = self.stuck + 1 if left >= {(each.id, each.state) for each in before} else 0
        if self.stuck > self.config.max_attempts + MAX_STUCK:
            stages = ", ".join(sorted({stage for _, stage in left}))
            raise StageError(
                f"The stages {stages} do not get on: {self.stuck} rounds in a row brought no clip on, since "
                "workers ended or hung; the log of the engine says how."
            )


def run_rounds(config: FlowConfig, engine: Engine, watch: Callable[[], None], stop: threading.Event) -> None:
    """Run rounds on an engine until all clips are packed, or until told to stop, and close the engine.

    Args:
        config: the flow.
        engine: runs the stages.
        watch: called several times a second.
        stop: ends the run when set; batches in progress are done again by the next run.

    Raises:
        WorldModelError: a source, the catalog, the buffer or the log cannot be used, or a stage is at fault.
    """
    catalog = Catalog(config.place("catalog"), Chain.of(config))
    lister, packer, deliveries = Lister(config, catalog), Packer(config, catalog), Deliveries(config)
    with ThreadPoolExecutor(1) as thread:
        try:
            while not stop.is_set():
                watch()
                if packer.seal_next(lister.all_listed):
                    continue
                waiting = catalog.waiting(BEGINNING, config.max_in_flight)
                if len(waiting) < config.max_in_flight and lister.list_next():
                    continue
                if not waiting:
                    packer.finish()
                    return
                clips = deliveries.ready(waiting)
                if clips:
                    playing = thread.submit(engine.play, deliveries.table(clips))
                    rows = _wait(playing, lambda: packer.seal_next(lister.all_listed), watch, stop)
                    deliveries.failed(clips, catalog.waiting(BEGINNING, catalog.in_flight()), rows)
                else:
                    stop.wait(INTERVAL_S)
        finally:
            engine.close()
            lister.close()
            catalog.close()


def _wait(
    playing: Future[Sequence[Row]], pack: Callable[[], bool], watch: Callable[[], None], stop: threading.Event
) -> Sequence[Row]:
    """Pack while a round is in progress; return its rows when it has ended, or none when told to stop.

    Raises:
        FlowError: a worker reports an error that another one would, too.
    """
    while not playing.done() and not stop.is_set():
        watch()
        if not pack():
            stop.wait(INTERVAL_S)
    rows = playing.result() if playing.done() and playing.exception() is None else []
    if errors := [row["error"] for row in rows if row["error"]]:
        raise FlowError(errors[0])
    return rows
