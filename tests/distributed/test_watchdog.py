"""The watchdog on several processes: failing samples, slow processes, and restarts."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import torchrun

from worldmodel.config import MeshConfig
from worldmodel.data.loader import Batch
from worldmodel.errors import ConfigError
from worldmodel.parallel.mesh import Mesh
from worldmodel.train.diagnostics.timing import computing
from worldmodel.train.diagnostics.watchdog import StragglerDetector, check_finite, rendezvous_store

pytestmark = pytest.mark.slow
NUM_PROCESSES = 4


def refuse() -> None:
    mesh = Mesh.build(MeshConfig(), torch.device("cpu"))
    rank = mesh.rank
    batches = [Batch(3, "rounds", (2 * rank,), []), Batch(3, "rounds", (2 * rank + 1,), [])]
    nan, fine = torch.tensor(float("nan")), torch.tensor(1.0)
    with pytest.raises(ConfigError, match=r"step 3 \(process 2: samples 4, 5\)"):
        check_finite(nan, "state", 3, batches, mesh, [fine, nan if rank == 2 else fine])
    with pytest.raises(ConfigError, match=r"process 0: samples 0, 1; process 1: samples 2, 3; process 2"):
        check_finite(nan, "state", 3, batches, mesh, [fine, fine])


def slow() -> None:
    """Process 2 computes three times as much; it is named in the third window, by all."""
    rank, slowdowns = dist.get_rank(), []
    stragglers = StragglerDetector(Mesh.build(MeshConfig(), torch.device("cpu")), window=4)
    for _ in range(20):
        began = time.process_time()
        with computing(torch.device("cpu")) as computed:
            while time.process_time() - began < (0.009 if rank == 2 else 0.003):
                pass
        slowdowns.append(stragglers.step(computed))
    assert [index for index, found in enumerate(slowdowns) if found] == [11, 15, 19]
    assert all(list(found) == [2] and 2 < found[2] < 4 for found in slowdowns if found)


def test_failing_and_slow_processes_are_named(tmp_path: Path) -> None:
    torchrun(__file__, NUM_PROCESSES, tmp_path, max_restarts=2)
    # Started three times by torchrun, with the same store; no process connected to one of an earlier attempt.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt 0", "attempt 1", "attempt 2"]


def work(folder: Path) -> None:
    """In each of four processes; the first two attempts die at different points of coming together."""
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    if rank == 0:
        (folder / f"attempt {attempt}").touch()
    store, rank, world_size = rendezvous_store(timedelta(seconds=60))
    store.set(f"attempt of {rank}", str(attempt))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    assert all(store.get(f"attempt of {other}") == str(attempt).encode() for other in range(world_size))
    if attempt < 2 and rank == 1 + attempt:
        os._exit(7)
    refuse()
    slow()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    work(Path(sys.argv[1]))
