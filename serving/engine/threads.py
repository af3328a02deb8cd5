"""How many threads PyTorch uses on a CPU: those that the process may use, if they make it faster."""

import os
import time
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")
GAIN = 1.1
"""Factor by which twice as many threads must be faster to be used: beside a busy neighbour they are slower,
since all wait for the one that lost its core."""
ROUNDS = 12


def available(cgroup: Path = CGROUP) -> int:
    """Return the number of cores of the process: by its affinity, and by the CPU quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text("ascii").split()
    except (OSError, ValueError):
        try:
            quota, period = (
                (cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
        except OSError:
            return cores
    if not quota.strip().isdecimal():  # "max", or -1: no quota
        return cores
    return max(1, min(cores, int(quota) // int(period)))


def choose(threads: int | None = None) -> int:
    """Set the number of threads of this process, and return it; by default the fastest of 1, 2, 4, ...

    A number in OMP_NUM_THREADS is kept.
    """
    if threads is None and "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    torch.set_num_threads(1)
    best, most = 1, threads or available()
    while threads is None and (more := min(2 * best, most)) > best and _seconds(best) > GAIN * _seconds(more):
        best = more
    torch.set_num_threads(threads or best)
    return torch.get_num_threads()


def _seconds(threads: int) -> float:
    """Return the median time of a small layer, as rounds of worlds have many."""
    torch.set_num_threads(threads)
    inputs, weights = torch.randn(256, 512), torch.randn(512, 512)
    took = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(4):
            torch.nn.functional.gelu(inputs @ weights).softmax(dim=-1)
        took.append(time.perf_counter() - began)
    return sorted(took)[ROUNDS // 2]
