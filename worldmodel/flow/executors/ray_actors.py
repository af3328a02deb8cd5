"""The executor that runs the stages as actors of Ray: on a cluster with RAY_ADDRESS, else on this machine.

Every stage has `workers` actors with its resources. An actor runs the loop that a process of the local
executor runs, and claims clips from the catalog, so all machines need the package, the modules of one's own
stages, and the addresses of `catalog`, `buffer` and `log`.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from worldmodel.config import build, to_dict
from worldmodel.config.flow import FlowConfig
from worldmodel.database import connect, transaction
from worldmodel.errors import ConfigError, WorldModelError, pip_install
from worldmodel.flow.catalog.catalog import new_owner
from worldmodel.flow.catalog.chain import Chain, Link
from worldmodel.flow.catalog.schema import lease
from worldmodel.flow.errors import FlowError
from worldmodel.flow.executors.health import Health
from worldmodel.flow.work.loops import BUSY, FEED, run_feed, run_stage
from worldmodel.leases import Lease

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError
except ModuleNotFoundError:
    raise ConfigError(f"The executor ray needs Ray: {pip_install('ray')}.") from None

STOP_S = 30.0
"""How long workers may take to finish their batches at the end."""
START_S = 600.0
"""How long an actor may take to start: Ray may have to start a machine for it."""


class StageActor:
    """A worker of one stage, in a process of its own on some machine.

    Args:
        config: the flow, as JSON.
        name: the stage.
        owner: name of the worker in its claims.
        timeout_s: how long a batch may take; one that takes longer ends the process.
        paths: folders of the driver's modules, among them those with stages of one's own.
    """

    def __init__(self, config: str, name: str, owner: str, timeout_s: float, paths: list[str]) -> None:
        sys.path += [path for path in paths if path not in sys.path]
        self.config, self.name, self.owner = build(FlowConfig, json.loads(config)), name, owner
        self.timeout_s = timeout_s
        self.batches, self.error = 0, ""
        self.halt = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def state(self) -> tuple[int, str]:
        """Return the number of finished batches, and why the worker has ended, if it has."""
        return self.batches, self.error

    def stop(self) -> None:
        """End the loop after its batch."""
        self.halt.set()
        self.thread.join()

    def _work(self) -> None:
        try:
            run_stage(self.config, self.name, self.halt, self._report, self.owner)
        except WorldModelError as error:
            self.error = str(error)
        except BaseException:
            os._exit(1)  # as a process does that another error ends

    def _report(self, state: str) -> None:
        if state == BUSY:  # a batch that hangs may hold the GIL, so no thread of Python ends it
            faulthandler.dump_traceback_later(self.timeout_s, exit=True, file=sys.__stderr__ or sys.stderr)
        else:
            faulthandler.cancel_dump_traceback_later()
            self.batches += 1


@dataclass
class Worker:
    """An actor, and how the workers of its stage get on."""

    link: Link
    health: Health
    actor: Any
    owner: str
    started: float
    answer: Any = None
    batches: int = 0

    def check(self) -> bool:
        """Return whether it runs.

        Raises:
            FlowError: it failed in a way that another worker would, too.
        """
        if self.answer is None:
            self.answer = self.actor.state.remote()
        try:
            batches, error = ray.get(self.answer, timeout=0)
        except GetTimeoutError:
            return self.batches > 0 or time.monotonic() - self.started < START_S
        except RayActorError:
            self.health.last = f"ended, or did not finish a batch within {self.link.stage.timeout_s:g} s"
            return False
        self.answer = None
        if error:
            raise FlowError(error)
        if batches != self.batches:
            self.health.deaths, self.batches = 0, batches
        return True


class Cluster:
    """The connection to Ray, and the actors.

    Args:
        config: the flow.

    Raises:
        ConfigError: the cluster has too few CPUs or GPUs.
    """

    def __init__(self, config: FlowConfig) -> None:
        self.chain, self.config = Chain.of(config), json.dumps(to_dict(config))
        self.catalog = connect(config.place("catalog"))
        links = self.chain.links
        cpus = sum(link.workers * link.stage.resources.cpu for link in links)
        gpus = sum(link.workers * link.stage.resources.gpu for link in links)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers
        self.owned = not ray.is_initialized()
        if self.owned and (address := os.environ.get("RAY_ADDRESS")):
            ray.init(address, log_to_driver=False)
        elif self.owned:
            # A machine with fewer cores shares them; all actors must fit, or some would never start.
            cores = max(os.cpu_count() or 1, int(cpus) + 1)
            ray.init("local", num_cpus=cores, include_dashboard=False, log_to_driver=False)
        found = ray.cluster_resources()
        if found.get("CPU", 0) < cpus or found.get("GPU", 0) < gpus:
            self.close()
            raise ConfigError(
                f"The stages need {cpus:g} CPUs and {gpus:g} GPUs, and Ray has {found.get('CPU', 0):g} and "
                f"{found.get('GPU', 0):g}; lower the workers of stages."
            )

    def start(self, link: Link, health: Health) -> Worker:
        """Start a worker of a stage."""
        resources = link.stage.resources
        options = {"num_cpus": resources.cpu, "num_gpus": resources.gpu, "max_concurrency": 2}
        if not self.owned:
            options["memory"] = int(resources.memory_gb * 2**30)
        paths = [path for path in sys.path if path]
        kind: Any = ray.remote(StageActor).options(**options)
        owner = new_owner()
        actor = kind.remote(self.config, link.name, owner, link.stage.timeout_s, paths)
        return Worker(link, health, actor, owner, time.monotonic())

    def replace(self, worker: Worker) -> Worker:
        """Start a worker in place of one that has ended, whose clips others may claim at once."""
        worker.health.died()
        ray.kill(worker.actor)
        transaction(self.catalog, Lease(lease, 0.0, worker.owner).end)
        return self.start(worker.link, worker.health)

    def close(self) -> None:
        """Leave the cluster, or end the one of this machine; one that the caller joined is kept."""
        self.catalog.dispose()
        if self.owned:
            ray.shutdown()


def run(
    config: FlowConfig, watch: Callable[[], None], stop: threading.Event, interval_s: float = 0.1
) -> None:
    """Run a flow until all clips of its sources are packed, or until told to stop.

    Args:
        config: the flow.
        watch: called several times a second.
        stop: ends the run when set; batches in progress are finished.
        interval_s: time between looks at the workers.

    Raises:
        FlowError: the workers of a stage end again and again; the message names it. Or as a worker.
        ConfigError: the cluster is too small.
    """
    cluster = Cluster(config)
    workers: list[Worker] = []
    halt, failures = threading.Event(), list[BaseException]()
    feeding = threading.Thread(target=_feed, args=(config, halt, failures), name=FEED, daemon=True)
    try:
        for link in cluster.chain.links:
            health = Health(link.name)
            workers += [cluster.start(link, health) for _ in range(link.workers)]
        feeding.start()
        while not stop.is_set() and feeding.is_alive():
            for index, worker in enumerate(workers):
                if not worker.check():
                    workers[index] = cluster.replace(worker)
            watch()
            stop.wait(interval_s)
        if failures:
            raise failures[0]
    finally:
        halt.set()
        ended = [worker.actor.stop.remote() for worker in workers]
        ray.wait(ended, num_returns=len(ended), timeout=STOP_S) if ended else None
        for worker in workers:
            with contextlib.suppress(ValueError):  # it has ended
                ray.kill(worker.actor)
        if feeding.ident is not None:
            feeding.join(STOP_S)
        cluster.close()


def _feed(config: FlowConfig, halt: threading.Event, failures: list[BaseException]) -> None:
    """List, admit and pack in a thread of the driver; an error is raised by the one that waits."""
    try:
        run_feed(config, halt, lambda state: None)
    except BaseException as error:
        failures.append(error)
