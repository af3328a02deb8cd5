"""Muon for sharded weights: each batch of matrices is orthogonalised by one process."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from worldmodel.parallel import planner
from worldmodel.train.distributed import full_tensor, to_local

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
EPSILON = 1e-7
BATCH_ELEMENTS = 2**22
"""Elements of matrices that are orthogonalised together: small ones are limited by kernel launches."""


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for the matrices of hidden layers (Jordan et al. 2024).

    In bf16 results equal `torch.optim.Muon`'s up to the rounding of batched products; CPUs are faster
    in fp32. With DTensors that optimizer computes every product on every process and gathers shards for most
    of them. Here matrices of one shape are batched, and each batch has one owner, which gathers its shards
    once and broadcasts the result. Momentum is sharded like the weights, so checkpoints do not depend on
    owners.
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
        batches = []
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameters in batched(trained):
                batches.append((parameters, group))
        # All directions before the first weight changes, so that processes can divide the work by its size.
        directions = [self._directions(parameters, group["momentum"]) for parameters, group in batches]
        for (parameters, group), made in zip(batches, orthogonalise(directions, self.dtype), strict=True):
            rows, columns = parameters[0].shape
            rate = group["lr"]
            weights = [to_local(parameter) for parameter in parameters]
            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])  # pyright: ignore[reportPrivateImportUsage]
            scale = -rate * math.sqrt(max(1, rows / columns))
            torch._foreach_add_(weights, made.to(weights[0].dtype).unbind(), alpha=scale)  # pyright: ignore[reportPrivateImportUsage]

    def step_bytes(self) -> tuple[int, int]:
        """Return the bytes that a step needs beside weights, gradients and states, for estimates.

        The first are shared by processes as the weights are, the second are whole on each.
        """
        stacks = [stack for group in self.param_groups for stack in batched(group["params"])]
        elements = [sum(matrix.numel() for matrix in stack) for stack in stacks]
        # All directions, and what owners gather of them in the data type of products, unless it is theirs.
        gathered = 0
        for stack, size in zip(stacks, elements, strict=True):
            gathered += size * stack[0].dtype.itemsize
            if stack[0].dtype != self.dtype:
                gathered += size * self.dtype.itemsize
        # Beside them the results so far, and in the iterations of a stack: it, the next one and two squares.
        shared, whole, results = gathered, 0, 0
        for stack, size in zip(stacks, elements, strict=True):
            square = len(stack) * min(stack[0].shape) ** 2
            needed = 2 * (size + square) * self.dtype.itemsize
            if gathered + results + needed > shared + whole:
                shared, whole = gathered + results, needed
            results += size * self.dtype.itemsize
        return shared, whole

    def _directions(self, parameters: Sequence[Tensor], momentum: float) -> Float[Tensor, "k m n"]:
        """Update the momentum buffers of matrices of one shape and return their Nesterov directions."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(gradient)
        averages = [to_local(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        shards = [to_local(gradient) for gradient in gradients]
        torch._foreach_lerp_(averages, shards, 1 - momentum)  # pyright: ignore[reportPrivateImportUsage]
        return stack_shards(torch._foreach_lerp(shards, averages, momentum), gradients[0])  # pyright: ignore[reportPrivateImportUsage]


def batched(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield matrices of one shape together, at most `BATCH_ELEMENTS` or one matrix.

    Batches do not depend on the number of processes, so neither do the kernels and the bits of the result.
    """
    by_shape: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        by_shape.setdefault((parameter.shape, parameter.dtype), []).append(parameter)
    for alike in by_shape.values():
        most = max(1, BATCH_ELEMENTS // alike[0].numel())
        yield from (alike[first : first + most] for first in range(0, len(alike), most))


def stack_shards(shards: Sequence[Tensor], like: Tensor) -> Float[Tensor, "k m n"]:
    """Stack this process's shards of matrices that are distributed like `like`."""
    stacked = torch.stack(list(shards))
    if not isinstance(like, DTensor):
        return stacked
    placements = [Shard(each.dim + 1) if isinstance(each, Shard) else each for each in like.placements]
    rows, columns = like.shape
    shape, stride = torch.Size((len(shards), rows, columns)), (rows * columns, columns, 1)
    return DTensor.from_local(
        stacked, like.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )


def orthogonalise(stacks: Sequence[Float[Tensor, "_ _ _"]], dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield this process's shard of every stack of orthogonalised matrices, in order and in `dtype`.

    Owners are chosen so that the work of all processes is balanced.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shares = planner.assign([math.prod(stack.shape) * min(stack.shape[1:]) for stack in stacks], size)
    owners = {}
    for owner, share in enumerate(shares):
        for index in share:
            owners[index] = owner
    owned: dict[int, Tensor] = {}
    for index, stack in enumerate(stacks):
        # Gathering is collective, so every process takes part, also for stacks that it does not own.
        gathered = full_tensor(stack.to(dtype))
        if owners[index] == rank:
            owned[index] = gathered
    owned = {index: orthogonal(stack) for index, stack in owned.items()}
    for index, stack in enumerate(stacks):
        made = owned.pop(index, None)
        if made is None:
            made = torch.empty(stack.shape, dtype=dtype, device=stack.device)
        if size > 1:
            dist.broadcast(made, src=owners[index])
        yield shard(made, stack)


def orthogonal(stack: Float[Tensor, "k m n"]) -> Float[Tensor, "k m n"]:
    """Approximate `U V^T` of every matrix's singular value decomposition by Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    # The product with the transpose is as small as the shorter side.
    tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if tall else stack
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPSILON)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).contiguous()


def shard(made: Tensor, like: Tensor) -> Tensor:
    """Return this process's shard of a replicated stack, distributed like another."""
    if not isinstance(like, DTensor):
        return made
    return to_local(distribute_tensor(made, like.device_mesh, like.placements, src_data_rank=None))
