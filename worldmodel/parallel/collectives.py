"""Collectives: all-to-all and all-gather with gradients, all-reduce without, and counts of sent bytes.

Gradients are of the *sum* of all ranks' losses, so the adjoint of a gather is a sum. If all ranks
compute the same loss from gathered tensors, FSDP's mean over ranks cancels it.

Sizes are never exchanged: every rank computes them from the layout.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch._C._distributed_c10d import _register_work, _resolve_process_group
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName

sent: Counter[str] = Counter()
"""Bytes that this process has sent to others, forward and backward, by the name of the collective."""


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Yield a counter of the bytes sent within the block, complete at its end."""
    before, inside = sent.copy(), Counter[str]()
    yield inside
    inside.update(sent - before)


# Operators, so that recomputed layers can keep their outputs instead of exchanging again.


@torch.library.custom_op("worldmodel::all_to_all", mutates_args=())
def _exchange(input: Tensor, send: list[int], receive: list[int], group_name: str, name: str) -> Tensor:
    group = _resolve_process_group(GroupName(group_name))
    flat = input.contiguous()  # gloo ignores strides and permutes silently
    sent[name] += (flat.numel() - send[dist.get_rank(group)]) * flat.element_size()
    # At least as long as what is sent: autograd wants gradients of the shape of the output, and the reverse
    # exchange puts as many elements there as were sent.
    out = flat.new_empty(max(len(flat), sum(receive)))
    work = dist.all_to_all_single(out[: sum(receive)], flat, receive, send, group=group, async_op=True)
    assert work is not None, "this process is in the group"
    _register_work(out, work)  # for `wait`, which does nothing where a recomputed layer has kept the output
    return out


@_exchange.register_fake
def _(input: Tensor, send: list[int], receive: list[int], group_name: str, name: str) -> Tensor:
    return input.new_empty(max(len(input), sum(receive)))


@torch.library.custom_op("worldmodel::all_gather", mutates_args=())
def _gather(input: Tensor, ranks: int, group_name: str, name: str) -> Tensor:
    sent[name] += (ranks - 1) * input.numel() * input.element_size()
    out = input.new_empty(ranks * input.shape[0], *input.shape[1:])
    dist.all_gather_single(out, input, group=_resolve_process_group(GroupName(group_name)))
    return out


@_gather.register_fake
def _(input: Tensor, ranks: int, group_name: str, name: str) -> Tensor:
    return input.new_empty(ranks * input.shape[0], *input.shape[1:])


@torch.library.custom_op("worldmodel::all_reduce", mutates_args=())
def _sum(input: Tensor, name: str) -> Tensor:
    out, ranks = input.clone(memory_format=torch.contiguous_format), dist.get_world_size()
    # A ring sends each element twice (reduce-scatter, then all-gather), but for the process's own share.
    sent[name] += 2 * (ranks - 1) * out.numel() * out.element_size() // ranks
    dist.all_reduce(out)
    return out


@_sum.register_fake
def _(input: Tensor, name: str) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def start_all_to_all(
    flat: Float[Tensor, " n"], send: list[int], receive: list[int], group: ProcessGroup, name: str
) -> Float[Tensor, " m"]:
    """Send `send[r]` elements of `flat` to every rank r, in order; return the received ones by sender.

    They arrive while this process computes: `wait` for them before they are read. It has no gradient, but the
    result is never shorter than `flat`: it has the shape of the gradients that are sent in return.
    """
    return _exchange(flat, send, receive, group.group_name, name)


def wait(flat: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
    """Wait until the elements that `start_all_to_all` returned have arrived."""
    return torch.ops._c10d_functional.wait_tensor(flat)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, send: list[int], receive: list[int], group: ProcessGroup, name: str
    ) -> Tensor:
        ctx.plan = (receive, send, group, name)  # in the opposite direction
        return wait(start_all_to_all(flat, send, receive, group, name))[: sum(receive)]

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        receive, send, group, name = ctx.plan
        found = wait(start_all_to_all(gradients[0], receive, send, group, name))
        return found[: sum(send)], None, None, None, None


@torch.compiler.disable()
def all_to_all(
    flat: Float[Tensor, " n"], send: list[int], receive: list[int], group: ProcessGroup, name: str
) -> Float[Tensor, " m"]:
    """Send `send[r]` elements of `flat` to every rank r, in order; return the received ones by sender.

    The adjoint is the reverse all-to-all.
    """
    return _AllToAll.apply(flat, send, receive, group, name)  # type: ignore[return-value]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], group: ProcessGroup, name: str) -> Tensor:
        ctx.plan = (sizes, group, name)
        # Pieces are padded to the largest and cut afterwards: `all_gather_single` takes equal sizes only.
        largest, ranks = max(sizes), len(sizes)
        out = _gather(_padded(x, largest), ranks, group.group_name, name)
        if ranks * largest == sum(sizes):
            return out
        return torch.cat([piece[:size] for piece, size in zip(out.split(largest), sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None, None, None]:
        sizes, group, name = ctx.plan
        largest, ranks, rank = max(sizes), len(sizes), dist.get_rank(group)
        # Sums over ranks in bf16 would lose precision.
        precise = torch.promote_types(gradients[0].dtype, torch.float32)
        pieces = torch.cat([_padded(piece, largest) for piece in gradients[0].to(precise).split(sizes)])
        out = pieces.new_empty(largest, *pieces.shape[1:])
        sent[name] += (ranks - 1) * out.numel() * out.element_size()
        dist.reduce_scatter_single(out, pieces, group=group)
        return out[: sizes[rank]].to(gradients[0].dtype), None, None, None


def _padded(x: Tensor, length: int) -> Tensor:
    """Return `x` contiguous and padded to `length`: gloo does not support uneven sizes."""
    if x.shape[0] == length:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(length - x.shape[0], *x.shape[1:])])


@torch.compiler.disable()
def all_gather(
    x: Float[Tensor, "..."], sizes: Sequence[int], dim: int, group: ProcessGroup, name: str
) -> Float[Tensor, "..."]:
    """Concatenate every rank's piece of `sizes[rank]` along `dim`; the adjoint is a reduce-scatter (sum).

    Both directions send `(P - 1) x max(sizes)` rows; gradients are summed in fp32 or better.
    """
    whole = _AllGather.apply(x.movedim(dim, 0), list(sizes), group, name)
    return whole.movedim(0, dim)  # type: ignore[union-attr]


def all_reduce(x: Float[Tensor, "..."], name: str) -> Float[Tensor, "..."]:
    """Return the sum over all processes of the default group, the same on each; it has no gradient.

    Every process sends `2 (P - 1) / P` of its elements, as in a ring.
    """
    return _sum(x, name)
