"""Prometheus metrics of a flow, read from its catalog whenever they are asked for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worldmodel.errors import ConfigError
from worldmodel.flow.log.status import FlowStatus

STAGE_METRICS = {
    "clips_done": ("done", "Clips that the stage has finished."),
    "clips_dropped": ("dropped", "Clips that the stage has dropped."),
    "clips_dead": ("dead", "Dead letters: clips that failed in every attempt."),
    "attempts_failed": ("retried", "Attempts that failed and were to be made again."),
    "clips_waiting": ("waiting", "Clips that wait for the stage or are worked on."),
    "clips_per_second": ("rate", "Clips finished per second over the last minute."),
    "oldest_clip_age_seconds": ("oldest_s", "Time since the oldest waiting clip was listed."),
    "workers": ("workers", "Workers that are alive."),
    "worker_seconds": ("worker_s", "Time that workers of the stage have spent."),
    "remaining_seconds": ("end_s", "Time to finish the clips in flight; absent while it is unknown."),
}
"""Metrics with the label `stage`: field of its status and description."""
FLOW_METRICS = {
    "clips_listed": ("listed", "Rows of the sources that are listed."),
    "clips_packed": ("packed", "Clips in sealed segments."),
    "segments_sealed": ("segments", "Segments that training can read."),
    "total_remaining_seconds": ("end_s", "Time until all clips are packed; absent while it is unknown."),
    "runs": ("running", "Processes of `worldmodel flow run` that are alive."),
}


class FlowCollector(Collector):
    """Metrics `worldmodel_flow_…` of one flow.

    All are gauges: a count goes back when dead letters are tried again, and begins at 0 when a stage changes.

    Args:
        read: returns the status; called at every scrape, in the thread of the server.
    """

    def __init__(self, read: Callable[[], FlowStatus]) -> None:
        self.read = read

    def collect(self) -> Iterator[Metric]:
        status = self.read()
        for name, (field, description) in STAGE_METRICS.items():
            metric = GaugeMetricFamily(f"worldmodel_flow_{name}", description, labels=["stage"])
            for stage in status.stages:
                value = getattr(stage, field)
                if value is not None:
                    metric.add_metric([stage.name], value)
                elif field == "oldest_s":  # no clip waits
                    metric.add_metric([stage.name], 0)
            yield metric
        for name, (field, description) in FLOW_METRICS.items():
            if (value := getattr(status, field)) is not None:
                yield GaugeMetricFamily(f"worldmodel_flow_{name}", description, value)

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering does not read the catalog."""
        return []


@contextmanager
def metrics_server(read: Callable[[], FlowStatus], host: str, port: int) -> Iterator[int]:
    """Serve `/metrics` during the block; yields the port, a free one if `port` is 0.

    Raises:
        ConfigError: the port is in use, or the address is not one of this machine.
    """
    registry = CollectorRegistry()
    registry.register(FlowCollector(read))
    try:
        server, thread = start_http_server(port, host, registry)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"Metrics cannot be served at {host}:{port} ({error}); choose another --metrics-port."
        ) from None
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
