"""Numbers for Prometheus: how fast chunks come, how full the batches are, what became of every request."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE

__all__ = ["CONTENT_TYPE", "OUTCOMES", "Metrics"]

BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0)
OUTCOMES = ("ok", "rejected", "cancelled", "failed")
"""Every request ends as one of these."""


class Metrics:
    """The server's own registry; nothing of other libraries in the process mixes in."""

    def __init__(self, chunk_deadline_s: float = 1.0) -> None:
        """Count chunks as in time that come within `chunk_deadline_s`, the time they take to be shown."""
        self.registry = CollectorRegistry()
        self.chunk_deadline_s = chunk_deadline_s
        self.time_to_first_chunk = self._histogram(
            "time_to_first_chunk_seconds", "From asking for a world to its first frames."
        )
        self.chunk_seconds = self._histogram("chunk_seconds", "From an action to the frames that answer it.")
        self.sessions = self._gauge("sessions", "Live worlds.")
        self.queued_jobs = self._gauge("queued_jobs", "Videos that wait.")
        self.running_jobs = self._gauge("running_jobs", "Videos that are being made.")
        self.batch_occupancy = self._gauge("batch_occupancy", "Mean number of chunks in one denoising step.")
        self.kv_bytes = self._gauge("kv_bytes", "Bytes of keys and values that the engine holds.")
        self.kv_bytes_per_session = self._gauge("kv_bytes_per_session", "The same, per live world.")
        self.deadline_attainment = self._gauge(
            "deadline_attainment", "Share of chunks that came in the time they take to be shown."
        )
        self.chunks = self._counter("chunks", "Chunks, by whether they came in time.", "in_time")
        self.requests = self._counter("requests", "Requests, by what became of them.", "route", "outcome")
        self.jobs = self._counter("jobs", "Videos, by what became of them.", "outcome")
        self.rejects = self._counter("rejects", "Requests that were refused, by why.", "reason")
        self._met = self._missed = 0

    def chunk(self, seconds: float) -> None:
        """Count a chunk that took so long from its action to its frames."""
        in_time = seconds <= self.chunk_deadline_s
        self._met, self._missed = self._met + in_time, self._missed + (not in_time)
        self.chunk_seconds.observe(seconds)
        self.chunks.labels(in_time=str(in_time).lower()).inc()
        self.deadline_attainment.set(self._met / (self._met + self._missed))

    def first_chunk(self, seconds: float) -> None:
        """Count a world whose first frames took so long."""
        self.time_to_first_chunk.observe(seconds)

    def request(self, route: str, outcome: str) -> None:
        """Count a request at its end; `outcome` is one of `OUTCOMES`."""
        self.requests.labels(route=route, outcome=outcome).inc()

    def reject(self, reason: str) -> None:
        """Count a refusal; `reason` is the error's code."""
        self.rejects.labels(reason=reason).inc()

    def watch(self, stats: Callable[[], Mapping[str, float]]) -> None:
        """Read the service's numbers whenever somebody asks for the metrics."""

        def kv_per_session() -> float:
            now = stats()
            return now.get("kv_bytes", 0.0) / max(1.0, now["worlds"])

        def occupancy() -> float:
            now = stats()
            return now["denoising_rows"] / max(1.0, now["denoising_steps"])

        self.sessions.set_function(lambda: stats()["worlds"])
        self.kv_bytes.set_function(lambda: stats().get("kv_bytes", 0.0))
        self.kv_bytes_per_session.set_function(kv_per_session)
        self.batch_occupancy.set_function(occupancy)

    def text(self) -> bytes:
        """Return the exposition that Prometheus reads."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(name, about, namespace="worldmodel", registry=self.registry, buckets=BUCKETS_S)

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(name, about, namespace="worldmodel", registry=self.registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, labels, namespace="worldmodel", registry=self.registry)
