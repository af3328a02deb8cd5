"""The executors of one machine: `local` gives every stage processes, `threads` gives it threads.

Several machines may run it with one PostgreSQL catalog: they share the work.
"""

import os
import queue
import threading
import time
from collections.abc import Callable

from worldmodel.config.flow import FlowConfig
from worldmodel.errors import WorldModelError
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.errors import FlowError, StageError
from worldmodel.flow.executors.health import Health
from worldmodel.flow.work.loops import BUSY, FEED, run_role
from worldmodel.flow.worker import ENDED
from worldmodel.processes import Child, ChildError

STOP_S = 30.0
"""Time limit for workers to finish their batches at the end."""
FEED_TIMEOUT_S = 300.0
"""Time limit for listing some clips, or packing a segment."""
STDERR = 2
"""Descriptor of standard error."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Worker:
    """A worker process, and a thread that reads its reports.

    Args:
        config: The flow.
        role: `FEED`, or the name of its stage.
        timeout_s: How long a batch may take.
        health: That of all workers of the role.
    """

    def __init__(self, config: FlowConfig, role: str, timeout_s: float, health: Health) -> None:
        self.role, self.timeout_s, self.health = role, timeout_s, health
        self.busy_since: float | None = None
        self.ended = False
        """Whether it has nothing more to do."""
        self.error: WorldModelError | None = None
        # Threads that the user has asked for go before one per worker; what a stage prints must not be in
        # the output of the command, so it goes to standard error.
        self.child = Child(
            "worldmodel.flow.worker:work",
            config,
            role,
            environment={**ONE_THREAD, **os.environ},
            stdout=STDERR,
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
        """Return whether it runs; kill it if it hangs.

        Raises:
            FlowError: it failed in a way that another worker would, too.
        """
        if self.busy_since is not None and time.monotonic() - self.busy_since > self.timeout_s:
            self.child.close()
            self.reader.join()
            self.health.last = f"did not finish a batch within {self.timeout_s:g} s"
            return False
        if self.child.alive:
            return True
        self.reader.join()  # its last report says why it ended
        self.child.close()
        if self.error is not None:
            raise FlowError(str(self.error))
        return False


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
    chain = Chain.of(config)
    if config.executor == "threads":
        _run_threads(config, chain, watch, stop, interval_s)
    else:
        _run_processes(config, chain, watch, stop, interval_s)


def _run_processes(
    config: FlowConfig,
    chain: Chain,
    watch: Callable[[], None],
    stop: threading.Event,
    interval_s: float,
) -> None:
    healths = {role: Health(role) for role in (FEED, *(link.name for link in chain.links))}

    def start(role: str) -> Worker:
        timeout_s = FEED_TIMEOUT_S if role == FEED else chain.link(role).stage.timeout_s
        return Worker(config, role, timeout_s, healths[role])

    workers = [start(FEED), *(start(link.name) for link in chain.links for _ in range(link.workers))]
    try:
        while not stop.is_set() and not workers[0].ended:
            for index, worker in enumerate(workers):
                if worker.check() or worker.ended:
                    continue
                worker.health.died()
                workers[index] = start(worker.role)
            watch()
            stop.wait(interval_s)
    finally:
        deadline = time.monotonic() + STOP_S
        for worker in workers:
            worker.child.process.terminate()
        for worker in workers:
            worker.child.close(max(0.1, deadline - time.monotonic()))


def _run_threads(
    config: FlowConfig,
    chain: Chain,
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
            run_role(config, role, halt, report)
        except BaseException as error:  # raised by the thread that waits
            errors.put(error)

    roles = [FEED, *(link.name for link in chain.links for _ in range(link.workers))]
    threads = [threading.Thread(target=work, args=(role,), daemon=True) for role in roles]
    for thread in threads:
        thread.start()
    try:
        while not stop.is_set() and threads[0].is_alive() and errors.empty():
            for ident, (role, since) in list(busy.items()):
                limit = FEED_TIMEOUT_S if role == FEED else chain.link(role).stage.timeout_s
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
