"""The executor that runs the stages with Spark: in the active session, or in one of its own.

Spark has jobs with an end and no workers that stay. So its tasks claim clips from the catalog, as the workers
of other executors do, take the stages in turn, and end when nothing waits; the driver lists, admits and packs
in a thread, and starts jobs until all is packed. GPUs and memory of stages are not reserved: set them for
Spark.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

from worldmodel.config import build, to_dict
from worldmodel.config.flow import FEED, FlowConfig
from worldmodel.errors import ConfigError, WorldModelError, pip_install
from worldmodel.flow.catalog.catalog import new_owner
from worldmodel.flow.errors import FlowError
from worldmodel.flow.executors.workers import FEED_TIMEOUT_S, INTERVAL_S, STOP_S, Health, ThreadWorker
from worldmodel.flow.work.loops import run_waiting
from worldmodel.flow.work.work import Work

try:
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession
except ModuleNotFoundError:
    raise ConfigError(f"The executor spark needs PySpark: {pip_install('spark')}.") from None

IDLE_S = 5.0
"""How long a task looks for clips in vain before it ends."""
FAILURES = 100
"""Workers that may end in one task before its job fails, and with it all others: a clip that ends its workers
ends `max_attempts` of them, and at least two."""
GROUP = "worldmodel flow"


@cache  # a worker's process, which Spark uses for many tasks, constructs the stages once
def _stages(config: str, paths: tuple[str, ...]) -> list[Work]:
    sys.path += [path for path in paths if path not in sys.path]
    flow = build(FlowConfig, json.loads(config))
    return [Work(flow, name) for name, stage in flow.stages.items() if stage.workers]


def run_task(
    config: str, paths: tuple[str, ...], owner: str, number: int, parts: Iterator[int]
) -> Iterator[str]:
    """Run what waits, in a worker; yield why it cannot go on.

    Spark begins a task again whose worker has ended. It then has the same owner, and so its clips at once.

    Args:
        config: the flow, as JSON.
        paths: folders of the driver's modules, among them those with stages of one's own.
        owner: the driver, as claims name its workers.
        number: of the task.
        parts: nothing of interest.
    """
    try:
        run_waiting(_stages(config, paths), f"{owner}-{number}", IDLE_S)
    except WorldModelError as error:
        yield str(error)


def run(config: FlowConfig, watch: Callable[[], None], stop: threading.Event) -> None:
    """Run a flow until all clips of its sources are packed, or until told to stop.

    Args:
        config: the flow.
        watch: called several times a second.
        stop: ends the run when set; batches in progress are done again by the next run.

    Raises:
        ConfigError: Java is missing.
        StageError: jobs fail again and again, and no clip gets on.
        WorldModelError: as a worker.
    """
    session, owned = _session()
    context = session.sparkContext
    tasks = max(1, sum(stage.workers for stage in config.stages.values()))  # Spark has no job without one
    paths = tuple(path for path in sys.path if path)
    task = partial(run_task, json.dumps(to_dict(config)), paths, new_owner())
    feeding, jobs = ThreadWorker(config, Health(FEED, FEED_TIMEOUT_S)), Health("of Spark", 0.0)

    def play() -> list[str]:
        context.setJobGroup(GROUP, "stages of a flow", interruptOnCancel=True)
        return context.parallelize(range(tasks), tasks).mapPartitionsWithIndex(task).collect()

    with ThreadPoolExecutor(1) as thread:
        try:
            while feeding.check() and not stop.is_set():
                job = thread.submit(play)
                while feeding.check() and not job.done() and not stop.is_set():
                    watch()
                    stop.wait(INTERVAL_S)
                if job.done() and (error := job.exception()):
                    jobs.last = f"ended ({' '.join(str(error).split())[:500]})"
                    jobs.died()
                elif job.done():
                    jobs.deaths = 0
                    if errors := job.result():
                        raise FlowError(errors[0])
        finally:
            feeding.stop()
            context.cancelJobGroup(GROUP)
            feeding.join(STOP_S)
            if owned:
                session.stop()


def _session() -> tuple[SparkSession, bool]:
    """Return the active session or a new one, and whether it is new."""
    if active := SparkSession.getActiveSession():
        return active, False
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.Builder().appName(GROUP).config("spark.task.maxFailures", FAILURES)
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    try:
        return builder.master(os.environ.get("SPARK_MASTER", f"local[*,{FAILURES}]")).getOrCreate(), True
    except PySparkException as error:
        raise ConfigError(f"Spark does not start; install Java 17 or newer, set JAVA_HOME: {error}") from None
