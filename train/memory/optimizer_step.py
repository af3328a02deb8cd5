"""The memory of the optimizers of a stage while they step."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._pytree import tree_leaves

from worldmodel.config import StageConfig
from worldmodel.train.optim.muon import Muon, batched
from worldmodel.train.optim.optimizers import optimizers_for, trained_parameters

CPU = torch.device("cpu")


@dataclass(frozen=True)
class OptimizerStep:
    """Bytes of one optimizer of a stage, on a process that holds all weights."""

    states: float
    gradients: float
    """Gradients when it steps: its own, and those of the optimizers that step after it."""
    temporary: float
    """What it allocates in a step, which processes share as they share the weights."""
    whole: float
    """What it allocates however many processes there are."""


def optimizer_steps(root: nn.Module, stage: StageConfig, muon_dtype: torch.dtype) -> list[OptimizerStep]:
    """Return the memory of the optimizers of a stage, in the order in which they step.

    Args:
        root: The model and its objective, whose parameters need no memory.
        stage: Settings of the stage.
        muon_dtype: Data type of Muon's products.
    """
    steps: list[OptimizerStep] = []
    with FakeTensorMode():
        trained = [
            (name, nn.Parameter(torch.empty(each.shape, dtype=each.dtype)))
            for name, each in trained_parameters(root)
        ]
        optimizers = optimizers_for(trained, stage, muon_dtype)
        left = sum(parameter.nbytes for _, parameter in trained)
        for optimizer in optimizers.values():
            own = [each for group in optimizer.param_groups for each in group["params"]]
            gradients = sum(each.nbytes for each in own)
            temporary = 0
            whole = 0
            if isinstance(optimizer, torch.optim.AdamW):
                states = 2 * gradients  # on GPUs it is fused, and allocates nothing else
            elif isinstance(optimizer, Muon):
                states = gradients
                # Batch by batch, one on each process: the first of every shape are the largest.
                alike = {each[0].shape: each for each in reversed([*batched(own)])}
                _, whole = _play(optimizer, [each for batch in alike.values() for each in batch])
            else:
                states, temporary = _play(optimizer, own)
            steps.append(OptimizerStep(states, left, temporary, whole))
            left -= gradients  # each frees its gradients before the next one steps
    return steps


def _play(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> tuple[int, int]:
    """Let an optimizer step on fake tensors; return the bytes of its states and of what else it allocates."""
    for each in parameters:
        each.grad = torch.empty_like(each)
    optimizer.step()  # makes the states
    states = [each for each in tree_leaves(dict(optimizer.state)) if isinstance(each, Tensor)]
    tracker = MemTracker()
    tracker.track_external(*parameters, *(each.grad for each in parameters if each.grad is not None), *states)
    before = tracker.get_tracker_snapshot()[CPU]["Total"]
    with tracker:
        optimizer.step()
    peak = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    return sum(each.nbytes for each in states), peak - before
