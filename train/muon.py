"""Muon for weights that processes share: every matrix is orthogonalised by one of them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from worldmodel.parallel import planner
from worldmodel.train.distributed import local, whole

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
EPSILON = 1e-7


class Muon(torch.optim.Optimizer):
    """Momentum whose every step is made orthogonal, for the matrices of hidden layers (Jordan et al. 2024).

    Its numbers are those of `torch.optim.Muon`, bit for bit. That one leaves the products of an iteration to
    DTensor: each process computes all of them for all matrices, and gathers shards in most. Here a matrix has
    one owner, which takes its shards once and tells the others what came out. Momentum lies where the
    weights do, so checkpoints know nothing of owners.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})  # pyright: ignore[reportArgumentType]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move all parameters that have a gradient; every process of the mesh must call this."""
        moved = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        directions = [self._direction(parameter, group["momentum"]) for parameter, group in moved]
        for (parameter, group), made in zip(moved, orthogonalise(directions), strict=True):
            rows, columns = parameter.shape
            rate, weight = group["lr"], local(parameter)
            weight.mul_(1 - rate * group["weight_decay"])
            weight.add_(made, alpha=-rate * math.sqrt(max(1, rows / columns)))

    def _direction(self, parameter: Tensor, momentum: float) -> Tensor:
        """Take a gradient into its average and return where Nesterov's momentum points."""
        gradient = parameter.grad
        assert gradient is not None, "step chooses those that have one"
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"]
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum)


def orthogonalise(matrices: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield this process's part of every orthogonal matrix, in order and in bf16.

    Owners are chosen so that all processes finish together.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shares = planner.assign([math.prod(m.shape) * min(m.shape) for m in matrices], size)
    owners = {index: owner for owner, share in enumerate(shares) for index in share}
    own: dict[int, Tensor] = {}
    for index, matrix in enumerate(matrices):
        gathered = whole(matrix.bfloat16())
        if owners[index] == rank:
            own[index] = gathered
    own = {index: orthogonal(matrix) for index, matrix in own.items()}
    for index, matrix in enumerate(matrices):
        made = own.pop(index, None)
        if made is None:
            made = torch.empty(matrix.shape, dtype=torch.bfloat16, device=matrix.device)
        if size > 1:
            dist.broadcast(made, src=owners[index])
        yield part(made, matrix)


def orthogonal(matrix: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    """Return nearly `U V^T` of a bf16 matrix's singular value decomposition, by Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=EPSILON)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).contiguous()


def part(made: Tensor, like: Tensor) -> Tensor:
    """Return what this process holds of a matrix that all have whole."""
    if not isinstance(like, DTensor):
        return made
    return local(distribute_tensor(made, like.device_mesh, like.placements, src_data_rank=None))
