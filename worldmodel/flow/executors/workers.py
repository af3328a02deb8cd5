"""Workers of a flow, wherever they run: one that ends is replaced, up to a limit."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from worldmodel.config.flow import FEED, FlowConfig
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.errors import StageError
from worldmodel.flow.work.loops import BUSY, run_role

MAX_DEATHS = 5
"""Workers of a stage that may end or hang in a row, without a batch in between, before the run fails."""
STOP_S = 30.0
"""Time limit for workers to finish their batches at the end."""
FEED_TIMEOUT_S = 300.0
"""Time limit for listing some clips, or packing a segment."""
INTERVAL_S = 0.1
"""Time between looks at the workers."""

log = logging.getLogger(__name__)


@dataclass
class Health:
    """Whether the workers of a stage get on."""

    role: str
    """`FEED`, or the name of the stage."""
    timeout_s: float
    """How long a batch may take."""
    deaths: int = 0
    """Workers that ended or hung since the last finished batch."""
    last: str = ""
    """How the last of them ended."""

    def died(self) -> None:
        """Count a worker that ended.

        Raises:
            StageError: too many have in a row.
        """
        self.deaths += 1
        log.warning("A worker of the stage %s %s; it is replaced.", self.role, self.last)
        if self.deaths >= MAX_DEATHS:
            raise StageError(
                f"The stage {self.role} does not get on: {self.deaths} workers in a row ended or hung; the "
                f"last {self.last}."
            )


class Worker(Protocol):
    """A worker of a stage, or the one that feeds and packs."""

    health: Health
    """Of all workers of the role."""
    ended: bool
    """Whether it has nothing more to do."""

    def check(self) -> bool:
        """Return whether it runs; end it if it hangs.

        Raises:
            WorldModelError: it failed in a way that another worker would, too.
        """
        ...

    def stop(self) -> None:
        """Let it end after its batch."""
        ...

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended, and end it if it takes longer."""
        ...


def supervise(
    config: FlowConfig, start: Callable[[Health], Worker], watch: Callable[[], None], stop: threading.Event
) -> None:
    """Run the workers of a flow until all clips of its sources are packed, or until told to stop.

    On a machine that does not feed the worker of the role `FEED` waits until others have packed all.

    Args:
        config: the flow.
        start: starts a worker of a role.
        watch: called again and again meanwhile; may raise to end the run.
        stop: ends the run when set; batches in progress are finished.

    Raises:
        StageError: a stage hangs or its workers die again and again; the message names it.
        WorldModelError: as a worker.
    """
    links = Chain.of(config).links
    stages = [(Health(link.name, link.stage.timeout_s), link.workers) for link in links]
    workers: list[Worker] = []
    try:
        for health, count in [(Health(FEED, FEED_TIMEOUT_S), 1), *stages]:
            workers += [start(health) for _ in range(count)]
        while not stop.is_set() and not workers[0].ended:
            for index, worker in enumerate(workers):
                if worker.check() or worker.ended:
                    continue
                worker.health.died()
                workers[index] = start(worker.health)
            watch()
            stop.wait(INTERVAL_S)
    finally:
        deadline = time.monotonic() + STOP_S
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.join(max(0.1, deadline - time.monotonic()))


class ThreadWorker:
    """A worker in a thread of this process, which cannot be ended if it hangs."""

    def __init__(self, config: FlowConfig, health: Health) -> None:
        self.config, self.health = config, health
        self.ended = False
        self.busy_since: float | None = None
        self.error: BaseException | None = None
        self.halt = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            run_role(self.config, self.health.role, self.halt, self._report)
            self.ended = True
        except BaseException as error:  # raised by `check`
            self.error = error

    def _report(self, state: str) -> None:
        self.busy_since = time.monotonic() if state == BUSY else None

    @property
    def hangs(self) -> bool:
        """Whether its batch takes too long."""
        since = self.busy_since
        return since is not None and time.monotonic() - since > self.health.timeout_s

    def check(self) -> bool:
        if self.error is not None:
            raise self.error
        if self.hangs:
            raise StageError(
                f"The stage {self.health.role} did not finish a batch within {self.health.timeout_s:g} s."
            )
        return self.thread.is_alive()

    def stop(self) -> None:
        self.halt.set()

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended, unless it hangs."""
        if not self.hangs:
            self.thread.join(timeout_s)
