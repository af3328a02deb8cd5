"""Prometheus metrics: latency of chunks, batch occupancy, and outcomes of requests."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        shared: Any = {"namespace": "worldmodel", "registry": self.registry}
        histogram = partial(Histogram, buckets=BUCKETS_S, **shared)
        gauge, counter = partial(Gauge, **shared), partial(Counter, **shared)
        self.time_to_first_chunk = histogram(
            "time_to_first_chunk_seconds", "Time from requesting a world to its first frames."
        )
        self.chunk_seconds = histogram("chunk_seconds", "Time from an action to its frames.")
        self.sessions = gauge("sessions", "Live worlds.")
        self.queued_jobs = gauge("queued_jobs", "Queued videos.")
        self.running_jobs = gauge("running_jobs", "Videos being generated.")
        self.batch_occupancy = gauge("batch_occupancy", "Mean number of chunks per denoising step.")
        self.kv_bytes = gauge("kv_bytes", "Size of the engine's KV cache.")
        self.kv_bytes_per_session = gauge("kv_bytes_per_session", "Size of the KV cache per live world.")
        self.deadline_attainment = gauge(
            "deadline_attainment", "Share of chunks generated within their playback time."
        )
        self.chunks = counter("chunks", "Chunks by whether they were in time.", ["in_time"])
        self.requests = counter("requests", "Requests by outcome.", ["route", "outcome"])
        self.model_seconds = counter(
            "model_seconds",
            "Time of the model by key (empty for the server's own calls) and purpose.",
            ["key", "purpose"],
        )
        self.jobs = counter("jobs", "Videos by outcome.", ["outcome"])
        self.rejects = counter("rejects", "Rejected requests by reason.", ["reason"])
        self._num_chunks = self._num_in_time = 0

    def chunk(self, seconds: float, playback_s: float) -> None:
        """Count a chunk, the time from its action to its frames, and whether it plays no longer than that."""
        in_time = seconds <= playback_s
        self._num_chunks, self._num_in_time = self._num_chunks + 1, self._num_in_time + in_time
        self.chunk_seconds.observe(seconds)
        self.chunks.labels(in_time=str(in_time).lower()).inc()
        self.deadline_attainment.set(self._num_in_time / self._num_chunks)

    def request(self, route: str, outcome: str) -> None:
        """Count a finished request; `outcome` is ok, rejected, cancelled or failed."""
        self.requests.labels(route=route, outcome=outcome).inc()

    def reject(self, reason: str) -> None:
        """Count a rejected request; `reason` is the error code."""
        self.rejects.labels(reason=reason).inc()

    def observe(self, stats: Callable[[], Mapping[str, float]], num_worlds: Callable[[], int]) -> None:
        """Read statistics of the service and the number of live worlds at every scrape."""

        def kv_bytes() -> float:
            return stats().get("kv_bytes", 0.0)

        def occupancy() -> float:
            now = stats()
            return now["denoising_rows"] / max(1.0, now["denoising_steps"])

        self.sessions.set_function(num_worlds)
        self.kv_bytes.set_function(kv_bytes)
        self.kv_bytes_per_session.set_function(lambda: kv_bytes() / num_worlds() if num_worlds() else 0.0)
        self.batch_occupancy.set_function(occupancy)

    def text(self) -> bytes:
        """Return the metrics in the text format of Prometheus."""
        return generate_latest(self.registry)
