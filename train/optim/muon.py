"""Muon for sharded weights: each batch of matrices is orthogonalised by one process."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from worldmodel.train.distributed import to_local

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
EPSILON = 1e-7
BATCH_ELEMENTS = 2**22
"""Elements of matrices that are orthogonalised together: small ones are limited by kernel launches."""

T = TypeVar("T")
Batch = tuple[list[Tensor], dict[str, Any]]
"""Matrices of one shape, and the settings of their group."""


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for the matrices of hidden layers (Jordan et al. 2024).

    In bf16 results equal `torch.optim.Muon`'s up to the rounding of batched products; CPUs are faster
    in fp32. With DTensors that optimizer computes every product on every process and gathers shards for most
    of them. Here matrices of one shape are batched, and each batch has one owner, to which the others send
    their shards, and which sends the shards of the result back. As many batches as there are processes are
    under way together, so the memory of a step does not grow with the number of layers. Momentum is sharded
    like the weights, so checkpoints do not depend on owners.
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
        batches: list[Batch] = []
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            batches += [(parameters, group) for parameters in batched(trained)]
        if not batches:
            return
        sharing = Sharing.of(batches[0][0][0])
        # The largest first: batches that processes compute at the same time are then about equally large.
        batches.sort(key=lambda batch: -_work(batch[0]))
        for together in _pieces(batches, sharing.shards * sharing.replicas):
            for parameters, group in together:
                self._update_momentum(parameters, group["momentum"])
            by_replica = list(_pieces(together, sharing.shards))
            made = None
            if sharing.replica < len(by_replica):
                made = self._orthogonalised(by_replica[sharing.replica], sharing)
            for replica, shared in enumerate(by_replica):
                _apply(shared, sharing.spread(made, replica, self._empty(shared)))

    def _update_momentum(self, parameters: Sequence[Tensor], momentum: float) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(gradient)
        averages = [to_local(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        shards = [to_local(gradient) for gradient in gradients]
        torch._foreach_lerp_(averages, shards, 1 - momentum)  # pyright: ignore[reportPrivateImportUsage]

    def _orthogonalised(self, batches: Sequence[Batch], sharing: "Sharing") -> Float[Tensor, " e"]:
        """Return this process's shards of the directions of batches, of which each shard owns one."""
        stacks = [self._directions(parameters, group["momentum"]) for parameters, group in batches]
        if sharing.shards == 1:
            return orthogonal(stacks.pop()).flatten()
        return sharing.orthogonalise(stacks, [len(parameters[0]) for parameters, _ in batches])

    def _directions(self, parameters: Sequence[Tensor], momentum: float) -> Float[Tensor, "k m n"]:
        """Return this process's shards of Nesterov directions of matrices of one shape."""
        averages = [to_local(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        shards = [to_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        directions = torch._foreach_lerp(shards, averages, momentum)  # pyright: ignore[reportPrivateImportUsage]
        return torch.stack([direction.to(self.dtype) for direction in directions])

    def _empty(self, batches: Sequence[Batch]) -> Float[Tensor, " e"]:
        """Return room for this process's shards of batches, which takes no memory until it is written."""
        local = [to_local(parameter) for parameters, _ in batches for parameter in parameters]
        return torch.empty(sum(each.numel() for each in local), dtype=self.dtype, device=local[0].device)


def _apply(batches: Sequence[Batch], directions: Float[Tensor, " e"]) -> None:
    """Change weights along directions, of which this process's shards are given one after the other."""
    weights = [[to_local(parameter) for parameter in parameters] for parameters, _ in batches]
    pieces = directions.split([sum(each.numel() for each in stack) for stack in weights])
    for (parameters, group), stack, piece in zip(batches, weights, pieces, strict=True):
        rows, columns = parameters[0].shape
        scale = -group["lr"] * math.sqrt(max(1, rows / columns))
        made = piece.view(len(stack), *stack[0].shape).to(stack[0].dtype)
        torch._foreach_mul_(stack, 1 - group["lr"] * group["weight_decay"])  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_add_(stack, made.unbind(), alpha=scale)  # pyright: ignore[reportPrivateImportUsage]


def batched(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield matrices of one shape together, at most `BATCH_ELEMENTS` or one matrix.

    Batches do not depend on the number of processes, so neither do the kernels and the bits of the result.
    """
    by_shape: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        by_shape.setdefault((parameter.shape, parameter.dtype), []).append(parameter)
    for alike in by_shape.values():
        yield from _pieces(alike, max(1, BATCH_ELEMENTS // alike[0].numel()))


@dataclass(frozen=True)
class Sharing:
    """How processes share matrices: `shards` of them hold each copy, and there are `replicas` copies."""

    shards: int = 1
    shard: int = 0
    """This process's part of a copy."""
    replicas: int = 1
    replica: int = 0
    """The copy that this process has a part of."""
    shard_group: dist.ProcessGroup | None = None
    """The processes that hold a copy together."""
    replica_group: dist.ProcessGroup | None = None
    """The processes that have the same part of each copy."""

    @classmethod
    def of(cls, like: Tensor) -> "Sharing":
        """Return how a matrix is shared, as FSDP does it: by rows."""
        if not isinstance(like, DTensor):
            return cls()
        mesh, placements = like.device_mesh, like.placements
        assert placements[-1] == Shard(0) and all(each.is_replicate() for each in placements[:-1])
        place = mesh.get_coordinate()
        assert place is not None and mesh.ndim <= 2
        if mesh.ndim == 1:
            return cls(mesh.size(), place[0], shard_group=mesh.get_group())
        return cls(mesh.size(1), place[1], mesh.size(0), place[0], mesh.get_group(1), mesh.get_group(0))

    def rows(self, count: int) -> list[int]:
        """Return the rows of a matrix that each shard has; the last ones may have fewer, or none."""
        most = -(-count // self.shards)
        return [min(most, max(0, count - shard * most)) for shard in range(self.shards)]

    def orthogonalise(self, stacks: list[Float[Tensor, "_ _ _"]], rows: Sequence[int]) -> Tensor:
        """Return this process's shards of the orthogonalised stacks, one after the other.

        Args:
            stacks: Its shards of the stack that the first process of its copy owns, the second, and so on;
                the list is emptied.
            rows: Of whole matrices.
        """
        sizes = [stack.numel() for stack in stacks] + [0] * (self.shards - len(stacks))
        owned, (count, _, columns) = self.shard < len(stacks), stacks[min(self.shard, len(stacks) - 1)].shape
        heights = self.rows(rows[self.shard]) if owned else [0] * self.shards
        received = [count * height * columns for height in heights]
        mine = torch.cat([stack.flatten() for stack in stacks])
        stacks.clear()
        pieces = mine.new_empty(sum(received))
        dist.all_to_all_single(pieces, mine, received, sizes, group=self.shard_group)
        if owned:
            parts = zip(pieces.split(received), heights, strict=True)
            whole = torch.cat([piece.view(count, height, columns) for piece, height in parts], dim=1)
            made = orthogonal(whole).split(heights, dim=1)
            pieces = torch.cat([part.flatten() for part in made])
        dist.all_to_all_single(mine, pieces, sizes, received, group=self.shard_group)
        return mine

    def spread(self, made: Tensor | None, replica: int, empty: Tensor) -> Tensor:
        """Return what the processes of a copy have made, to those of all others; `empty` is room for it."""
        mine = made if replica == self.replica else empty
        assert mine is not None
        if self.replicas > 1:
            dist.broadcast(mine, group=self.replica_group, group_src=replica)
        return mine


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


def _work(parameters: Sequence[Tensor]) -> int:
    """Return a number in proportion to the products that matrices of one shape need."""
    return len(parameters) * parameters[0].numel() * min(parameters[0].shape)


def _pieces(items: Sequence[T], size: int) -> Iterator[list[T]]:
    """Yield `size` items at a time."""
    yield from (list(items[first : first + size]) for first in range(0, len(items), size))
