"""Detection of hangs, slow processes and gradients that are not finite.

Each becomes an error that names its cause and ends the process; torchrun then restarts all processes
(`--max-restarts`).
"""

import faulthandler
import os
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from worldmodel.data.loader import Batch
from worldmodel.errors import ConfigError
from worldmodel.parallel.mesh import Mesh
from worldmodel.train.diagnostics.timing import Computation, computation_seconds

EXIT_CODE_HUNG = 75
"""Exit code of a process that the watchdog ended."""


def rendezvous_store(timeout: timedelta) -> tuple[Store, int, int]:
    """Return a store for `init_process_group` that contains nothing of earlier restarts.

    After a restart, torchrun's store still contains the addresses of the previous processes, and gloo may
    connect to those. So the processes of each attempt agree on a new prefix: each writes a random token, and
    rank 0 answers it with the prefix.

    Returns:
        The store, this process's rank and the number of processes.

    Raises:
        torch.distributed.DistError: some processes did not start in time.
    """
    store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
    token = secrets.token_hex(8)
    if rank:
        store.set(f"token/{rank}", token)
        prefix = store.get(f"prefix/{token}").decode()
        store.set(f"joined/{prefix}/{rank}", "")
        return PrefixStore(prefix, store), rank, world_size
    waiting = set(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while waiting:
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"processes {sorted(waiting)[:8]} did not start in time")
        for other in waiting:
            if store.check([f"token/{other}"]):  # perhaps of an earlier attempt, whose process is gone
                store.set(f"prefix/{store.get(f'token/{other}').decode()}", token)
        waiting = {other for other in waiting if not store.check([f"joined/{token}/{other}"])}
        time.sleep(0.01)
    return PrefixStore(token, store), rank, world_size


class Watchdog:
    """Ends the process if no `beat` arrives in time, after writing every thread's stack to stderr.

    Processes that wait for a hanging one time out as well, so each reports its own stacks.

    Args:
        timeout_s: Longest time between two beats.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.activity = "before the first step"
        self.last_beat = 0.0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, activity: str = "") -> None:
        """Report progress, and what the process does next."""
        self.activity = activity or self.activity
        self.last_beat = time.monotonic()
        # In case the thread below cannot run because native code holds the GIL.
        faulthandler.dump_traceback_later(self.timeout_s + 10, exit=True, file=_stderr())

    @contextmanager
    def during(self, model: nn.Module, activity: str) -> Iterator[None]:
        """Beat within the block whenever a part of a component of `model` runs.

        For work that takes many passes, such as sampling.
        """
        self.beat(activity)
        # Layers get no hooks: they may be compiled, and a new hook would compile them again.
        parts = [part for component in model.children() for part in (component, *component.children())]
        hooks = [part.register_forward_pre_hook(lambda *_: self.beat(activity)) for part in parts]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __enter__(self) -> "Watchdog":
        self.beat()
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
        self.thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self.ended.wait(max(self.last_beat + self.timeout_s - time.monotonic(), 0.01)):
            if time.monotonic() - self.last_beat > self.timeout_s:
                rank = dist.get_rank() if dist.is_initialized() else 0
                message = f"process {rank} has made no progress for {self.timeout_s:g} s ({self.activity})"
                os.write(_stderr(), f"error: {message}; its threads:\n".encode())
                faulthandler.dump_traceback(_stderr(), all_threads=True)
                os._exit(EXIT_CODE_HUNG)


class StragglerDetector:
    """Finds processes that compute slower than the others, which step times do not show because all wait.

    The slowdown of a process is its median time over a window of steps divided by the median over processes.
    It is slow if that exceeds a limit for several windows in a row. Source: Minder (arXiv:2411.01791).

    Args:
        mesh: All processes.
        window: Steps in a window.
        limit: Slowdown above which a process counts as slow.
        patience: Number of slow windows in a row before a process is reported.
    """

    def __init__(self, mesh: Mesh, window: int = 20, limit: float = 1.3, patience: int = 3) -> None:
        self.mesh = mesh
        self.window = window
        self.limit = limit
        self.patience = patience
        self.spans: list[Computation] = []
        self.slow: dict[int, int] = {}

    def step(self, computed: Computation) -> dict[int, float]:
        """Record the computation of a step; every process must call this for each step.

        Returns:
            At the end of a window, the slowdown of every process that was slow for `patience` windows.
        """
        self.spans.append(computed)
        if len(self.spans) < self.window:
            return {}
        own = statistics.median(computation_seconds(self.spans))
        self.spans = []
        scores = slowdowns(self.mesh.all_gather(own))
        self.slow = {
            rank: self.slow.get(rank, 0) + 1 for rank, score in enumerate(scores) if score > self.limit
        }
        return {rank: scores[rank] for rank, windows in self.slow.items() if windows >= self.patience}


def slowdowns(seconds: Sequence[float]) -> list[float]:
    """Divide each process's time by the median over processes."""
    median = statistics.median(seconds)
    return [each / median if median else 1.0 for each in seconds]


def check_finite(
    norm: Tensor,
    stage: str,
    step: int,
    batches: Sequence[Batch],
    mesh: Mesh,
    losses: Iterable[Tensor] = (),
) -> None:
    """Check that the gradient is finite, on all processes and before any weight changes.

    Args:
        norm: Norm of the whole gradient, the same on all processes.
        stage: Name of the stage.
        step: Number of the step.
        batches: Batches of this process in the step.
        mesh: All processes.
        losses: Their losses, which show which process has the samples at fault.

    Raises:
        ConfigError: the norm is not finite; the message names the processes whose losses are not (or all, if
            every loss is finite) and their samples.
    """
    if torch.isfinite(norm):
        return
    finite = all(bool(torch.isfinite(loss).all()) for loss in losses)
    samples = [index for batch in batches for index in batch.indices]
    found: list[tuple[bool, list[int]]] = mesh.all_gather((finite, samples))
    failed = [rank for rank, (finite, _) in enumerate(found) if not finite] or list(range(len(found)))
    described = "; ".join(f"process {rank}: samples {_shortened(found[rank][1])}" for rank in failed[:4])
    raise ConfigError(
        f"The gradient of stage {stage!r} is not finite at step {step} ({described}); lower "
        f"stages.{stage}.lr or muon_lr and resume from the last checkpoint."
    )


def _shortened(samples: list[int]) -> str:
    more = f" and {len(samples) - 8} more" if len(samples) > 8 else ""
    return ", ".join(map(str, samples[:8])) + more


def _stderr() -> int:
    """Return the file descriptor of the original stderr; sys.stderr may be replaced."""
    return sys.__stderr__.fileno() if sys.__stderr__ else 2
