"""The executor that runs the stages as actors of Ray: on a cluster with RAY_ADDRESS, else on this machine.

Every stage has `workers` actors with its resources. An actor runs the loop that a process of the local
executor runs, and claims clips from the catalog, so all machines need the package, the modules of one's own
stages, and the addresses of `catalog`, `buffer` and `log`.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine

from worldmodel.config import build, to_dict
from worldmodel.config.flow import FEED, FlowConfig
from worldmodel.database import connect, transaction
from worldmodel.errors import ConfigError, WorldModelError, pip_install
from worldmodel.flow.catalog.catalog import new_owner
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.catalog.schema import lease
from worldmodel.flow.errors import FlowError
from worldmodel.flow.executors.workers import Health, ThreadWorker, Worker, supervise
from worldmodel.flow.work.loops import IDLE, ends_hanging, run_stage
from worldmodel.leases import Lease

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError
except ModuleNotFoundError:
    raise ConfigError(f"The executor ray needs Ray: {pip_install('ray')}.") from None

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
        self.end_hanging = ends_hanging(timeout_s)
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

    def _report(self, state: Any) -> None:
        self.end_hanging(state)
        self.batches += state == IDLE


class ActorWorker:
    """An actor, as its driver sees it."""

    ended = False

    def __init__(self, actor: Any, owner: str, health: Health, catalog: Engine) -> None:
        self.actor, self.owner, self.health, self.catalog = actor, owner, health, catalog
        self.started, self.batches = time.monotonic(), 0
        self.answer = self.stopped = None

    def check(self) -> bool:
        """Return whether it runs; others may claim the clips of one that does not."""
        if self.answer is None:
            self.answer = self.actor.state.remote()
        try:
            batches, error = ray.get(self.answer, timeout=0)
        except GetTimeoutError:
            if self.batches > 0 or time.monotonic() - self.started < START_S:
                return True
            self.health.last = f"did not start within {START_S:g} s"
        except RayActorError:
            self.health.last = f"ended, or did not finish a batch within {self.health.timeout_s:g} s"
        else:
            self.answer = None
            if error:
                raise FlowError(error)
            if batches != self.batches:
                self.health.deaths, self.batches = 0, batches
            return True
        ray.kill(self.actor)
        transaction(self.catalog, Lease(lease, 0.0, self.owner).end)
        return False

    def stop(self) -> None:
        self.stopped = self.actor.stop.remote()

    def join(self, timeout_s: float) -> None:
        ray.wait([self.stopped], timeout=timeout_s)
        with contextlib.suppress(ValueError):  # it has ended
            ray.kill(self.actor)


def run(config: FlowConfig, watch: Callable[[], None], stop: threading.Event) -> None:
    """Run a flow; see `supervise`. The driver lists, admits and packs in a thread.

    Raises:
        ConfigError: the cluster has too few CPUs or GPUs.
    """
    chain, text, catalog = Chain.of(config), json.dumps(to_dict(config)), connect(config.place("catalog"))
    owned = not ray.is_initialized()
    try:
        _connect(chain, owned)

        def start(health: Health) -> Worker:
            if health.role == FEED:
                return ThreadWorker(config, health)
            resources = chain.link(health.role).stage.resources
            options = {"num_cpus": resources.cpu, "num_gpus": resources.gpu, "max_concurrency": 2}
            if not owned:
                options["memory"] = int(resources.memory_gb * 2**30)
            kind: Any = ray.remote(StageActor).options(**options)
            owner, paths = new_owner(), [path for path in sys.path if path]
            actor = kind.remote(text, health.role, owner, health.timeout_s, paths)
            return ActorWorker(actor, owner, health, catalog)

        supervise(config, start, watch, stop)
    finally:
        catalog.dispose()
        if owned:  # one that the caller joined is kept
            ray.shutdown()


def _connect(chain: Chain, owned: bool) -> None:
    """Join the cluster of RAY_ADDRESS, or start one on this machine, unless the caller has joined one."""
    cpus = sum(link.workers * link.stage.resources.cpu for link in chain.links)
    gpus = sum(link.workers * link.stage.resources.gpu for link in chain.links)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers
    if owned and (address := os.environ.get("RAY_ADDRESS")):
        ray.init(address, log_to_driver=False)
    elif owned:
        # A machine with fewer cores shares them; all actors must fit, or some would never start.
        cores = max(os.cpu_count() or 1, int(cpus) + 1)
        ray.init("local", num_cpus=cores, include_dashboard=False, log_to_driver=False)
    found = ray.cluster_resources()
    if found.get("CPU", 0) < cpus or found.get("GPU", 0) < gpus:
        raise ConfigError(
            f"The stages need {cpus:g} CPUs and {gpus:g} GPUs, and Ray has {found.get('CPU', 0):g} and "
            f"{found.get('GPU', 0):g}; lower the workers of stages."
        )
