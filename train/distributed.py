"""The processes of a run, as torchrun started them."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Processes:
    """This process among all."""

    rank: int
    world_size: int

    @property
    def first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0


def start() -> Processes:
    """Join the group that torchrun made; a plain start is a group of one."""
    if "RANK" not in os.environ:
        return Processes(0, 1)
    dist.init_process_group("gloo")
    return Processes(dist.get_rank(), dist.get_world_size())


def broadcast(model: nn.Module, processes: Processes) -> None:
    """Give every process the first one's weights."""
    if processes.world_size > 1:
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, src=0)


def average_gradients(model: nn.Module, processes: Processes) -> None:
    """Average gradients over processes in one message.

    A parameter that some process did not use counts there as zero; one that none used keeps no gradient,
    so that optimizers leave it alone.
    """
    if processes.world_size == 1:
        return
    trained = [p for p in model.parameters() if p.requires_grad]
    used = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    grads = []
    for parameter, wanted in zip(trained, used.tolist(), strict=True):
        if wanted and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            grads.append(parameter.grad)
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    flat /= processes.world_size
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def barrier(processes: Processes) -> None:
    """Wait for all."""
    if processes.world_size > 1:
        dist.barrier()


def stop(processes: Processes) -> None:
    """Leave the group."""
    if processes.world_size > 1:
        dist.destroy_process_group()
