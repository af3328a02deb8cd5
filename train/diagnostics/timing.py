"""Times of the phases of a step, and of a process's own computation, measured on its device."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

COLLECTIVES_KEPT = "4000"
"""Collectives that NCCL's flight recorder keeps: enough for a step of most models. Reading them stalls the
process, for about 0.05 s on one core."""


class Phases:
    """Seconds that a process spends in each phase.

    They are measured by the clock on a CPU, and between events of the stream on a GPU. Beginning a phase does
    not wait for the device; `take` does.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[str, Any]] = []

    def begin(self, name: str) -> None:
        """End the phase before and begin another."""
        self.marks.append((name, _now(self.device)))

    @property
    def current(self) -> str:
        """The phase that runs."""
        return self.marks[-1][0]

    def take(self) -> dict[str, float]:
        """Return the seconds of all ended phases since the last call, by name."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for (name, start), (_, end) in pairwise(self.marks):
            seconds[name] += _seconds(start, end)
        del self.marks[:-1]
        return dict(seconds)


class Computation:
    """A span in which a process computes; `seconds` leaves out the time in which it waits for others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.began = _now(device)
        self.process_s = time.process_time()
        self.began_ns = time.time_ns()

    def stop(self) -> None:
        """End the span."""
        self.ended = _now(self.device)
        self.ended_ns = time.time_ns()
        self.process_s = time.process_time() - self.process_s

    def seconds(self) -> float:
        """Return the seconds of computation; see `computation_seconds`."""
        return computation_seconds([self])[0]


def computation_seconds(spans: Sequence[Computation]) -> list[float]:
    """Return the seconds of computation of the spans that can still be measured, at least of the last one.

    On a CPU this is the time of the process, which does not advance while it waits for messages. On a GPU
    a process that waits keeps its CPU busy, so it is the time of the stream without that of collectives,
    including those that overlap with computation. The record of these is read once for all spans, and has
    forgotten those of earlier ones.
    """
    if spans[-1].device.type != "cuda":
        return [span.process_s for span in spans]
    trace = _recorded()
    oldest = min((entry["time_created_ns"] for entry in trace.get("entries", [])), default=0)
    known = [span for span in spans if span.began_ns >= oldest] or spans[-1:]
    return [
        max(
            _seconds(span.began, span.ended) - collective_seconds(trace, span.began_ns, span.ended_ns),
            0.0,
        )
        for span in known
    ]


@contextmanager
def computing(device: torch.device) -> Iterator[Computation]:
    """Measure the computation of a block; read `seconds` later, because it waits for the device."""
    span = Computation(device)
    try:
        yield span
    finally:
        span.stop()


def record_collectives() -> None:
    """Let NCCL record the durations of collectives; call before the process group is initialised."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", COLLECTIVES_KEPT)
    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")


def collective_seconds(trace: dict[str, Any], first_ns: int, last_ns: int) -> float:
    """Return the seconds of the collectives that began within a span.

    Args:
        trace: A dump of NCCL's flight recorder.
        first_ns: Start of the span, in nanoseconds since the epoch.
        last_ns: Its end.
    """
    return sum(
        (entry.get("duration_ms") or 0.0) / 1000
        for entry in trace.get("entries", [])
        if first_ns <= entry["time_created_ns"] <= last_ns
    )


def _recorded() -> dict[str, Any]:
    """Return a dump of NCCL's flight recorder; an empty one without NCCL."""
    library = getattr(torch._C, "_distributed_c10d", None)
    dump: Callable[..., str | bytes] | None = getattr(library, "_dump_nccl_trace_json", None)
    return {} if dump is None else json.loads(dump(includeCollectives=True, onlyActive=False))


def _now(device: torch.device) -> Any:
    """Return the time: a number on a CPU, an event on a GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000
