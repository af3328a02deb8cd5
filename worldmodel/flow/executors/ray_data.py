"""The executor that runs the stages with Ray Data: on a cluster with RAY_ADDRESS, else on this machine.

Every stage has `workers` actors with its resources, which last for a round of `max_in_flight` clips.
"""

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Sequence

import pyarrow as pa

from worldmodel.config.flow import FlowConfig
from worldmodel.errors import ConfigError
from worldmodel.flow.chain import Chain
from worldmodel.flow.executors.rounds import Row, Task, remaining, run_rounds, run_task

try:
    import ray
    from ray.data import ActorPoolStrategy, DataContext, from_arrow
except ModuleNotFoundError:
    raise ConfigError("The executor ray needs Ray: pip install 'worldmodel[ray]'.") from None


class StageActor:
    """A worker of one stage."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __call__(self, rows: pa.Table) -> pa.Table:
        return run_task(self.task, rows)


class RayEngine:
    """Runs rounds with Ray Data.

    Args:
        config: the flow.

    Raises:
        ConfigError: the cluster has too few CPUs or GPUs.
    """

    def __init__(self, config: FlowConfig) -> None:
        self.config, self.chain = config, Chain.of(config)
        links = self.chain.links
        cpus = sum(link.workers * link.stage.resources.cpu for link in links)
        gpus = sum(link.workers * link.stage.resources.gpu for link in links)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers
        self.owned = not ray.is_initialized()
        if self.owned and (address := os.environ.get("RAY_ADDRESS")):
            ray.init(address, log_to_driver=False)
        elif self.owned:
            # A machine with fewer cores shares them; all actors must fit, or they would wait for each other.
            cores = max(os.cpu_count() or 1, int(cpus) + 1)
            ray.init("local", num_cpus=cores, include_dashboard=False, log_to_driver=False)
        found = ray.cluster_resources()
        if found.get("CPU", 0) < cpus or found.get("GPU", 0) < gpus:
            self.close()
            raise ConfigError(
                f"The stages need {cpus:g} CPUs and {gpus:g} GPUs, and Ray has {found.get('CPU', 0):g} and "
                f"{found.get('GPU', 0):g}; lower the workers of stages."
            )
        context = DataContext.get_current()
        context.enable_progress_bars = False
        context.max_errored_blocks = -1  # a worker that ends takes only its batch with it

    def play(self, rows: pa.Table) -> Sequence[Row]:
        """Run the stages in their order on rows; return those of failures and of errors."""
        names: list[str] = []

        def named() -> dict[str, str]:
            names.append(f"worldmodel-{uuid.uuid4().hex}")
            return {"name": names[-1]}

        size = min(link.stage.batch_size for link in self.chain.links)
        data = from_arrow([rows.slice(first, size) for first in range(0, rows.num_rows, size)])
        for link in remaining(self.chain, rows):
            resources = link.stage.resources
            data = data.map_batches(
                StageActor,
                fn_constructor_args=(Task.of(self.config, link.name),),
                batch_format="pyarrow",
                batch_size=link.stage.batch_size,
                compute=ActorPoolStrategy(size=link.workers),
                num_cpus=resources.cpu,
                num_gpus=resources.gpu or None,
                memory=int(resources.memory_gb * 2**30) if not self.owned else None,
                max_restarts=-1,
                max_task_retries=0,  # the next round tries again, and counts it
                ray_remote_args_fn=named,
            )
        try:
            return data.take_all()
        finally:
            for (
                name
            ) in names:  # Ray Data leaves workers that it has restarted, whose CPUs the next round needs
                with contextlib.suppress(ValueError):  # it has ended
                    ray.kill(ray.get_actor(name))

    def close(self) -> None:
        """Leave the cluster, or end the one of this machine; one that the caller joined is kept."""
        if self.owned:
            ray.shutdown()


def run(config: FlowConfig, watch: Callable[[], None], stop: threading.Event) -> None:
    """Run a flow until all clips of its sources are packed, or until told to stop.

    Args:
        config: the flow.
        watch: called several times a second.
        stop: ends the run when set.

    Raises:
        WorldModelError: as `run_rounds`, or the cluster is too small.
    """
    run_rounds(config, RayEngine(config), watch, stop)
