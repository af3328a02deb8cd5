"""The executor that runs the stages with Spark: in the active session, or in one of its own.

A stage has as many partitions as `workers`. GPUs and memory of stages are not reserved: set them for Spark.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pyarrow as pa

from worldmodel.config.flow import FlowConfig
from worldmodel.errors import ConfigError, pip_install
from worldmodel.flow.catalog.chain import Chain
from worldmodel.flow.work.attempts import max_endings
from worldmodel.plugins.spark.rounds import Row, Task, remaining, run_rounds, run_task

try:
    from pyspark import TaskContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession
except ModuleNotFoundError:
    raise ConfigError(f"The executor spark needs PySpark: {pip_install('spark')}.") from None

COLUMNS = "clip string, stage string, delivery int, after_s double, error string"


def run_partition(task: Task, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run a stage on a partition, in a worker; Spark repeats it if a worker ends."""
    context = TaskContext.get()
    ended = 0 if context is None else context.attemptNumber()
    for batch in batches:
        yield from run_task(task, pa.Table.from_batches([batch]), ended).to_batches()


class SparkEngine:
    """Runs rounds with Spark.

    Args:
        config: the flow.

    Raises:
        ConfigError: Java is missing.
    """

    def __init__(self, config: FlowConfig) -> None:
        self.config, self.chain = config, Chain.of(config)
        active = SparkSession.getActiveSession()
        self.owned = active is None
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        failures = max_endings(config) + 1
        try:
            self.session = active or (
                SparkSession.builder.appName("worldmodel flow")
                .config("spark.task.maxFailures", failures)
                .config("spark.ui.showConsoleProgress", "false")
                .master(os.environ.get("SPARK_MASTER", f"local[*,{failures}]"))
                .getOrCreate()
            )
        except PySparkRuntimeError as error:
            raise ConfigError(
                f"Spark does not start; install Java 17 or newer, set JAVA_HOME: {error}"
            ) from None

    def play(self, rows: pa.Table) -> Sequence[Row]:
        """Run the stages in their order on rows; return the rows of failures and of errors."""
        data = self.session.createDataFrame(rows.to_pylist(), COLUMNS)
        partitions = 0
        for link in remaining(self.chain, rows):
            if link.workers != partitions:
                partitions = link.workers
                data = data.repartition(partitions)
            data = data.mapInArrow(partial(run_partition, Task.of(self.config, link.name)), COLUMNS)
        return [row.asDict() for row in data.collect()]

    def close(self) -> None:
        """Stop the session and its jobs; one that was active is kept."""
        if self.owned:
            self.session.stop()


def run(config: FlowConfig, watch: Callable[[], None], stop: threading.Event) -> None:
    """Run a flow until all clips of its sources are packed, or until told to stop.

    Args:
        config: the flow.
        watch: called several times a second.
        stop: ends the run when set.

    Raises:
        WorldModelError: as `run_rounds`, or Spark cannot start.
    """
    run_rounds(config, SparkEngine(config), watch, stop)
