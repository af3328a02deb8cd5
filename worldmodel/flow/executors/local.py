"""The executors of one machine: `local` gives every stage processes, `threads` gives it threads.

Threads are for notebooks and tests. Several machines may run either with one PostgreSQL catalog: they share
the work.
"""

import os
import threading
import time
from collections.abc import Callable
from signal import SIGTERM

from worldmodel import signals
from worldmodel.config.flow import FEED, FlowConfig
from worldmodel.errors import WorldModelError
from worldmodel.flow.errors import FlowError
from worldmodel.flow.executors.workers import Health, ThreadWorker, Worker, supervise
from worldmodel.flow.work.loops import BUSY, run_role
from worldmodel.processes import Child, ChildError, Connection

STDERR = 2
"""Descriptor of standard error."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
ENDED = "ended"
"""What a worker process reports when it has nothing more to do."""


def run(config: FlowConfig, watch: Callable[[], None], stop: threading.Event) -> None:
    """Run a flow; see `supervise`."""

    def start(health: Health) -> Worker:
        waits = health.role == FEED and not config.feed  # for other machines, which takes no process
        in_thread = waits or config.executor == "threads"
        return ThreadWorker(config, health) if in_thread else ProcessWorker(config, health)

    supervise(config, start, watch, stop)


class ProcessWorker:
    """A worker in a process of its own, and a thread that reads its reports."""

    def __init__(self, config: FlowConfig, health: Health) -> None:
        self.health, self.ended = health, False
        self.busy_since: float | None = None
        self.error: WorldModelError | None = None
        # Threads that the user has asked for go before one per worker; what a stage prints must not be in
        # the output of the command, so it goes to standard error.
        self.child = Child(
            f"{__name__}:work", config, health.role, environment={**ONE_THREAD, **os.environ}, stdout=STDERR
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        """Follow the reports; a thread, since a worker that nobody reads would have to wait."""
        while True:
            try:
                report = self.child.receive()
            except ChildError as error:
                self.health.last = str(error)
                return
            except WorldModelError as error:
                self.error = error
                return
            if report == ENDED:
                self.ended = True
            elif report == BUSY:
                self.busy_since = time.monotonic()
            else:
                if self.busy_since is not None:
                    self.health.deaths = 0
                self.busy_since = None

    def check(self) -> bool:
        timeout_s = self.health.timeout_s
        if self.busy_since is not None and time.monotonic() - self.busy_since > timeout_s:
            self.child.close()
            self.reader.join()
            self.health.last = f"did not finish a batch within {timeout_s:g} s"
            return False
        if self.child.alive:
            return True
        self.reader.join()  # its last report says why it ended
        self.child.close()
        if self.error is not None:
            raise FlowError(str(self.error))
        return False

    def stop(self) -> None:
        self.child.process.terminate()

    def join(self, timeout_s: float) -> None:
        self.child.close(timeout_s)


def work(executor: Connection, config: FlowConfig, role: str) -> None:
    """Run a worker in the process that `ProcessWorker` starts.

    It reports when it begins and ends a batch, so that one that hangs is seen. It ends with the process that
    started it, and after its batch when it gets SIGTERM.
    """
    stop = threading.Event()
    with signals.handled(lambda _: stop.set(), [SIGTERM]):
        run_role(config, role, stop, executor.send)
    executor.send(ENDED)
