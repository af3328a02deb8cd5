"""The check of collectives names the first difference between processes, and a process that has stopped."""

import contextlib
import io
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from processes import torchrun
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from worldmodel.train.diagnostics.collective_check import CollectiveCheck, CollectiveError

pytestmark = pytest.mark.slow


class Pair(nn.Module):
    """Two layers of equal size."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, names: Sequence[str]) -> Tensor:
        for name in names:
            x = getattr(self, name)(x)
        return x


def swap() -> None:
    """Runs in each of two processes, which call two layers of equal size in different orders."""
    net, rank = Pair(), dist.get_rank()
    for module in (net.left, net.right, net):
        fully_shard(module)
    own, other = ("left", "right") if rank == 0 else ("right", "left")
    with CollectiveCheck(timedelta(seconds=30)), pytest.raises(CollectiveError) as raised:
        net(torch.ones(1, 4), (own, other))
    entry = "_allgather_base_(float32[10]) on ranks 0 1 for"
    assert f"process {rank} {entry} {own}, process {1 - rank} {entry} {other}." in str(raised.value)


def stop() -> None:
    """Runs in each of two processes: the second one stops after a collective."""
    written = io.StringIO()
    with CollectiveCheck(timedelta(seconds=1)):
        dist.all_reduce(torch.ones(3))
        if dist.get_rank() == 1:
            return
        with pytest.raises(CollectiveError) as raised, contextlib.redirect_stderr(written):
            dist.broadcast(torch.ones(2, dtype=torch.int64), src=0)
    done, waiting = "allreduce_(float32[3]) on ranks 0 1", "broadcast_(int64[2]) on ranks 0 1"
    assert waiting in str(raised.value)
    assert f"process 1, whose last collective is {done}" in str(raised.value)
    assert [line.partition(" for ")[0].strip() for line in written.getvalue().splitlines()[1:]] == [
        done,
        waiting,
    ]


def test_the_check_names_the_first_difference_and_the_process_that_stopped() -> None:
    torchrun(__file__, 2)


def work() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    swap()
    stop()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    work()
