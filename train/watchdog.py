"""What keeps a run from standing still or going wrong unseen: hangs, slow processes, numbers that are none.

torchrun starts all processes again when one of them ends with an error (`--max-restarts`); what is here turns
trouble into such an end, and says where it was.
"""

import faulthandler
import os
import secrets
import statistics
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import TracebackType

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from worldmodel.data.loader import Batch
from worldmodel.errors import ConfigError
from worldmodel.parallel.mesh import Mesh
from worldmodel.types import Episode

HUNG = 75
"""Exit code of a process that the watchdog ended."""


def meet(timeout: timedelta) -> tuple[Store, int, int]:
    """Meet the processes that torchrun started with this one; for `init_process_group(store=, rank=, …)`.

    After a restart, torchrun's store still holds the addresses that the processes of the attempt before wrote
    there, and gloo connects to whichever it reads. So every attempt agrees on a prefix of its own: each
    process says a word that is new, and the first one answers it with the prefix.

    Returns:
        The store of this attempt, this process's rank and the number of processes.

    Raises:
        torch.distributed.DistError: the others did not come in time.
    """
    store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
    word = secrets.token_hex(8)
    if rank:
        store.set(f"word/{rank}", word)
        attempt = store.get(f"attempt/{word}").decode()
        store.set(f"heard/{attempt}/{rank}", "")
        return PrefixStore(attempt, store), rank, world_size
    waiting, deadline = set(range(1, world_size)), time.monotonic() + timeout.total_seconds()
    while waiting:
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"processes {sorted(waiting)[:8]} did not come in time")
        for other in waiting:
            if store.check([f"word/{other}"]):  # perhaps one of the attempt before: then nobody listens
                store.set(f"attempt/{store.get(f'word/{other}').decode()}", word)
        waiting = {other for other in waiting if not store.check([f"heard/{word}/{other}"])}
        time.sleep(0.01)
    return PrefixStore(word, store), rank, world_size


class Watchdog:
    """Ends the process when no `beat` comes in time, after writing every thread's stack to stderr.

    A process that waits for one which hangs stands still as well, so each of them tells where it stood.

    Args:
        timeout_s: Longest time between two beats.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.doing, self.since = "before the first step", 0.0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, doing: str = "") -> None:
        """Say that the process moves on, and what it does next."""
        self.doing, self.since = doing or self.doing, time.monotonic()
        # Should even the thread below stand still, because native code keeps the interpreter's lock.
        faulthandler.dump_traceback_later(self.timeout_s + 10, exit=True, file=_stderr())

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
        while not self.ended.wait(max(self.since + self.timeout_s - time.monotonic(), 0.01)):
            if time.monotonic() - self.since > self.timeout_s:
                rank = dist.get_rank() if dist.is_initialized() else 0
                where = f"process {rank} stands still since {self.timeout_s:g} s ({self.doing})"
                os.write(_stderr(), f"error: {where}; its threads:\n".encode())
                faulthandler.dump_traceback(_stderr(), all_threads=True)
                os._exit(HUNG)


class Stragglers:
    """Finds processes that compute slower than the others, which a step's time does not show: all wait.

    A process's slowdown is its median time over a window of steps, divided by the median over processes; it
    is slow when it exceeds a limit for some windows in a row (the idea of Minder, arXiv:2411.01791).

    Args:
        window: Steps in a window.
        limit: Slowdown from which a process is slow.
        patience: Windows in a row that it must be slow for.
    """

    def __init__(self, window: int = 20, limit: float = 1.3, patience: int = 3) -> None:
        self.window, self.limit, self.patience = window, limit, patience
        self.seconds: list[float] = []
        self.slow: dict[int, int] = {}

    def step(self, compute_s: float) -> dict[int, float]:
        """Count a step; all processes do so together.

        Args:
            compute_s: What this process computed, in seconds, without what it waited for others. On a CPU
                `time.process_time()` stands still while a process waits for messages.

        Returns:
            At the end of a window, the slowdown of every process that was slow for `patience` windows.
        """
        self.seconds.append(compute_s)
        if len(self.seconds) < self.window:
            return {}
        mine, self.seconds = statistics.median(self.seconds), []
        scores = slowdowns(_gathered(mine))
        self.slow = {
            rank: self.slow.get(rank, 0) + 1 for rank, score in enumerate(scores) if score > self.limit
        }
        return {rank: scores[rank] for rank, windows in self.slow.items() if windows >= self.patience}


def slowdowns(seconds: Sequence[float]) -> list[float]:
    """Divide each process's time by the median over processes."""
    usual = statistics.median(seconds)
    return [each / usual if usual else 1.0 for each in seconds]


def check_same(batches: Sequence[Batch], left_out: Sequence[tuple[str, str]], mesh: Mesh) -> None:
    """Refuse a step for which processes that share sequences have read different samples.

    Each of them reads for itself, in an order that is the same for all. A clip that one alone cannot read is
    replaced there alone, and parts of different clips would be taken for one.

    Args:
        batches: What this process read for the step.
        left_out: Source of each clip that it could not use for it, and why.
        mesh: All processes.

    Raises:
        ConfigError: a sample differs; the sentence is the same on all processes that share it, and says what
            each of them has in its place and could not read.
    """
    group = mesh.sequence
    if group.size == 1:
        return
    samples = {
        index: f"{episode.name}, checksum {checksum(episode):08x}"
        for batch in batches
        for index, episode in zip(batch.indices, batch.episodes, strict=True)
    }
    if len(set(_gathered(zlib.crc32(repr(samples).encode()), group.group))) == 1:
        return
    found = [(mesh.rank, samples, [reason for _, reason in left_out])] * group.size
    dist.all_gather_object(found, found[0], group=group.group)
    everyones = [theirs for _, theirs, _ in found]
    indices = sorted(set().union(*everyones))
    differs = next(i for i in indices if len({theirs.get(i) for theirs in everyones}) > 1)
    told = [
        f"process {rank}: {theirs.get(differs, 'nothing')}" + f", as it left out {'; '.join(why)}" * bool(why)
        for rank, theirs, why in found
    ]
    raise ConfigError(
        f"Sample {differs} of the stage differs between processes that share sequences ({' | '.join(told)}); "
        "see that all of them can read the same files, and start again."
    )


def checksum(episode: Episode) -> int:
    """Return a number that tells episodes apart: all that is said and shown in one goes into it."""
    clips = [*episode.observations, *(episode.labels or {}).values()]
    said = (episode.name, episode.actions, episode.prompt, episode.answer, [clip.shape for clip in clips])
    number = zlib.crc32(repr(said).encode())
    for clip in clips:
        number = zlib.crc32(np.ascontiguousarray(clip).data, number)
    return number


def check_finite(
    norm: Tensor,
    stage: str,
    step: int,
    batches: Sequence[Batch],
    mesh: Mesh,
    losses: Iterable[Tensor] = (),
) -> None:
    """Refuse a gradient that is not finite, on all processes and before any weight moved.

    Args:
        norm: Norm of the whole gradient, the same on all processes.
        stage: Name of the stage.
        step: Number of the step.
        batches: What this process saw in the step.
        mesh: All processes.
        losses: The losses it made of them; they tell whose samples it were.

    Raises:
        ConfigError: the norm is not finite; the sentence names the processes whose losses were not (or all,
            where the loss was finite and only its gradient was not) and their samples.
    """
    if torch.isfinite(norm):
        return
    own = all(bool(torch.isfinite(loss).all()) for loss in losses)
    samples = [index for batch in batches for index in batch.indices]
    found: list[tuple[bool, list[int]]] = [(own, samples)]
    if mesh.world_size > 1:
        found *= mesh.world_size
        dist.all_gather_object(found, (own, samples))
    guilty = [rank for rank, (finite, _) in enumerate(found) if not finite] or list(range(len(found)))
    told = "; ".join(f"process {rank}: samples {_few(found[rank][1])}" for rank in guilty[:4])
    raise ConfigError(
        f"The gradient of stage {stage!r} is not finite at step {step} ({told}); lower stages.{stage}.lr or "
        "muon_lr and start again: the last checkpoint is kept."
    )


def _gathered(value: float, group: dist.ProcessGroup | None = None) -> list[float]:
    """Return the value of every process of a group, by default of all."""
    if not dist.is_initialized():
        return [value]
    values = torch.empty(dist.get_world_size(group), dtype=torch.float64)
    dist.all_gather_into_tensor(values, torch.tensor([value], dtype=torch.float64), group=group)
    return values.tolist()


def _few(samples: list[int]) -> str:
    more = f" and {len(samples) - 8} more" if len(samples) > 8 else ""
    return ", ".join(map(str, samples[:8])) + more


def _stderr() -> int:
    """Return the real stderr, of which signal handlers need the number; sys.stderr may be replaced."""
    return sys.__stderr__.fileno() if sys.__stderr__ else 2
