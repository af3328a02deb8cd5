"""The executor of one machine: processes per stage, or threads with `topics: memory:`.

Several machines may run it with one PostgreSQL catalog: they share the work.
"""

import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from worldmodel.config import to_dict
from worldmodel.config.flow import FlowConfig
from worldmodel.flow.chain import Chain
from worldmodel.flow.errors import FlowError, StageError
from worldmodel.flow.worker import BUSY, FEED, run_role

MAX_DEATHS = 5
"""Workers of a stage that may end or hang in a row, without a batch in between, before the run fails."""
STOP_S = 30.0
"""How long workers may take to finish their batches at the end."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

log = logging.getLogger(__name__)


@dataclass
class Health:
    """Whether the workers of a stage get on."""

    deaths: int = 0
    """Workers that ended or hung since the last finished batch."""
    last: str = ""
    """How the last of them ended."""


@dataclass
class Process:
    """A worker process."""

    role: str
    timeout_s: float
    task: str
    health: Health
    busy_since: float | None = None
    ended: bool = False
    error: str = ""
    process: Any = field(init=False)
    reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "worldmodel.flow.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **ONE_THREAD,
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
        )
        self.process.stdin.write(self.task + "\n")
        self.process.stdin.flush()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            report = json.loads(line)
            if "state" in report:
                if self.busy_since is not None and report["state"] != BUSY:
                    self.health.deaths = 0
                self.busy_since = time.monotonic() if report["state"] == BUSY else None
            self.ended = self.ended or "ended" in report
            self.error = report.get("error", self.error)

    def check(self) -> bool:
        """Return whether it runs; kill it if it hangs.

        Raises:
            FlowError: it failed in a way that another worker would, too.
        """
        if self.busy_since is not None and time.monotonic() - self.busy_since > self.timeout_s:
            self.process.kill()
            self.process.wait()
            self.health.last = f"did not finish a batch within {self.timeout_s:g} s"
            return False
        if self.process.poll() is None:
            return True
        self.reader.join(5.0)  # its last line says why it ended
        if self.error:
            raise FlowError(self.error)
        self.health.last = f"ended with code {self.process.returncode}"
        return False

    def stop(self, deadline: float) -> None:
        """End it after its batch."""
        self.process.terminate()
        try:
            self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run(
    config: FlowConfig, watch: Callable[[], None], stop: threading.Event, interval_s: float = 0.1
) -> None:
    """Run a flow until all clips of its sources are packed, or until told to stop.

    Args:
        config: the flow.
        watch: called again and again meanwhile; may raise to end the run.
        stop: ends the run when set; batches in progress are finished.
        interval_s: time between looks at the workers.

    Raises:
        FlowError: a stage hangs or its workers die again and again; the message names it. Or as the worker.
    """
    topics = config.topics or config.place("catalog")
    chain = Chain.of(config)
    if topics.startswith("memory:"):
        return _run_threads(config, chain, topics, watch, stop, interval_s)
    _run_processes(config, chain, topics, watch, stop, interval_s)
    return None


def _run_processes(
    config: FlowConfig,
    chain: Chain,
    topics: str,
    watch: Callable[[], None],
    stop: threading.Event,
    interval_s: float,
) -> None:
    healths = {role: Health() for role in (FEED, *(link.name for link in chain.links))}

    def start(role: str) -> Process:
        timeout_s = config.feed_timeout_s if role == FEED else chain.link(role).stage.timeout_s
        task = json.dumps({"config": to_dict(config), "role": role, "topics": topics})
        return Process(role, timeout_s, task, healths[role])

    workers = [start(FEED), *(start(link.name) for link in chain.links for _ in range(link.workers))]
    try:
        while not stop.is_set() and not workers[0].ended:
            for index, worker in enumerate(workers):
                if worker.check() or worker.ended:
                    continue
                health = worker.health
                health.deaths += 1
                log.warning("A worker of the stage %s %s; it is replaced.", worker.role, health.last)
                if health.deaths >= MAX_DEATHS:
                    raise StageError(
                        f"The stage {worker.role} does not get on: {health.deaths} workers in a row ended "
                        f"or hung; the last {health.last}."
                    )
                workers[index] = start(worker.role)
            watch()
            stop.wait(interval_s)
    finally:
        deadline = time.monotonic() + STOP_S
        for worker in workers:
            if worker.process.poll() is None:
                worker.process.terminate()
        for worker in workers:
            worker.stop(deadline)


def _run_threads(
    config: FlowConfig,
    chain: Chain,
    topics: str,
    watch: Callable[[], None],
    stop: threading.Event,
    interval_s: float,
) -> None:
    """Run the same loops in threads: for notebooks and tests. A thread that hangs cannot be ended."""
    halt, errors = threading.Event(), queue.SimpleQueue[BaseException]()
    busy: dict[int, tuple[str, float]] = {}
    hanging: set[int] = set()

    def work(role: str) -> None:
        def report(state: str) -> None:
            busy.pop(threading.get_ident(), None)
            if state == BUSY:
                busy[threading.get_ident()] = (role, time.monotonic())

        try:
            run_role(config, role, topics, halt, report)
        except BaseException as error:  # raised by the thread that waits
            errors.put(error)

    roles = [FEED, *(link.name for link in chain.links for _ in range(link.workers))]
    threads = [threading.Thread(target=work, args=(role,), daemon=True) for role in roles]
    for thread in threads:
        thread.start()
    try:
        while not stop.is_set() and threads[0].is_alive() and errors.empty():
            for ident, (role, since) in list(busy.items()):
                limit = config.feed_timeout_s if role == FEED else chain.link(role).stage.timeout_s
                if time.monotonic() - since > limit:
                    hanging.add(ident)
                    raise StageError(f"The stage {role} did not finish a batch within {limit:g} s.")
            watch()
            stop.wait(interval_s)
    finally:
        halt.set()
        deadline = time.monotonic() + STOP_S
        for thread in threads:
            if thread.ident not in hanging:
                thread.join(max(0.0, deadline - time.monotonic()))
    if not errors.empty():
        raise errors.get()
