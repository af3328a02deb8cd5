"""Muon for sharded weights: each matrix is orthogonalised by one process."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from worldmodel.parallel import planner
from worldmodel.train.distributed import full_tensor, to_local

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
EPSILON = 1e-7


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for the matrices of hidden layers (Jordan et al. 2024).

    In bf16 results equal those of `torch.optim.Muon` bit for bit; CPUs are faster in fp32. With DTensors that
    optimizer computes every product on every process and gathers shards for most of them. Here each matrix
    has one owner, which gathers its shards once and broadcasts the result. Momentum is sharded like the
    weights, so checkpoints do not depend on owners.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})  # pyright: ignore[reportArgumentType]
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters that have a gradient; every process of the mesh must call this."""
        moved = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        directions = [self._direction(parameter, group["momentum"]) for parameter, group in moved]
        for (parameter, group), made in zip(moved, orthogonalise(directions, self.dtype), strict=True):
            rows, columns = parameter.shape
            rate, weight = group["lr"], to_local(parameter)
            weight.mul_(1 - rate * group["weight_decay"])
            weight.add_(made, alpha=-rate * math.sqrt(max(1, rows / columns)))

    def _direction(self, parameter: Tensor, momentum: float) -> Tensor:
        """Update the momentum buffer and return the Nesterov direction."""
        gradient = parameter.grad
        assert gradient is not None, "step selects parameters with a gradient"
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"]
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum)


def orthogonalise(matrices: Sequence[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield this process's shard of every orthogonalised matrix, in order and in `dtype`.

    Owners are chosen so that the work of all processes is balanced.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shares = planner.assign([math.prod(m.shape) * min(m.shape) for m in matrices], size)
    owners = {index: owner for owner, share in enumerate(shares) for index in share}
    owned: dict[int, Tensor] = {}
    for index, matrix in enumerate(matrices):
        gathered = full_tensor(matrix.to(dtype))
        if owners[index] == rank:
            owned[index] = gathered
    owned = {index: orthogonal(matrix) for index, matrix in owned.items()}
    for index, matrix in enumerate(matrices):
        made = owned.pop(index, None)
        if made is None:
            made = torch.empty(matrix.shape, dtype=dtype, device=matrix.device)
        if size > 1:
            dist.broadcast(made, src=owners[index])
        yield shard(made, matrix)


def orthogonal(matrix: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    """Approximate `U V^T` of a matrix's singular value decomposition by Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=EPSILON)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).contiguous()


def shard(made: Tensor, like: Tensor) -> Tensor:
    """Return this process's shard of a replicated matrix, distributed like another."""
    if not isinstance(like, DTensor):
        return made
    return to_local(distribute_tensor(made, like.device_mesh, like.placements, src_data_rank=None))
