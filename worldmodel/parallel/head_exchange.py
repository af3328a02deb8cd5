"""The exchanges of Ulysses: tokens of all heads for all tokens of some heads, and back, in groups of heads.

Every group is an all-to-all of its own. While a rank attends with one group, tensors of the next groups
arrive and the results of earlier ones are sent. Autograd runs the same steps in reverse: while the gradients
of one group are computed, the gradients of neighbouring groups are in transit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from worldmodel.parallel import collectives
from worldmodel.parallel.ulysses import NAME, Heads

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Returns the results of a group of heads, given its index, queries, keys and values."""


def exchange_heads(
    attend: Attend,
    parts: Sequence[Float[Tensor, "b _ n d"]],
    groups: Sequence[Heads],
    tokens: Sequence[int],
    group: ProcessGroup,
) -> Float[Tensor, "b k n d"]:
    """Attend to the tokens of all ranks, each rank with its heads.

    Args:
        attend: attention over all tokens, called for one group of heads after the other.
        parts: queries, keys and values of this rank's tokens and all heads.
        groups: the groups of heads.
        tokens: number of tokens of each rank.
        group: process group of the ranks.
    """
    inputs, results = [(of.query, of.key, of.key) for of in groups], [(of.query,) for of in groups]
    # All groups are sent before the first is attended to: the network then works through them while this rank
    # computes. Waiting happens group by group, in the same order.
    place = tokens, group, parts[0].shape[0], parts[0].shape[3]
    arriving, sent = _start(_AllHeads(inputs, *place), parts), []
    for index, flat in enumerate(arriving):
        out = attend(index, *_finish(_OwnHeads([inputs[index]], *place), [flat]))
        sent += _start(_OwnHeads([results[index]], *place), [out])
    # Gradients are sent in this order: the backward pass begins with the last group's.
    (out,) = _finish(_AllHeads(results[::-1], *place), sent[::-1])
    return out


@dataclass(frozen=True)
class _Side(ABC):
    """Tensors on one side of the exchange, from which they are sent to the other."""

    heads: Sequence[Sequence[Sequence[range]]]
    """By group and by tensor: the heads of every rank."""
    tokens: Sequence[int]
    group: ProcessGroup
    batch: int
    width: int

    @property
    @abstractmethod
    def shapes(self) -> list[tuple[int, int]]:
        """Numbers of heads and of tokens of every tensor."""

    @property
    def sums(self) -> bool:
        """Whether several ranks send the same head."""
        return False

    @abstractmethod
    def pieces(self, tensors: Sequence[Tensor], index: int) -> list[list[Tensor]]:
        """Return views of what each rank is sent from here, or sends to here, of a group."""

    @abstractmethod
    def received(self, index: int) -> list[int]:
        """Return how many rows of `width` the other side of this rank receives of a group, by sender."""

    def start(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Start to send the tensors of this side; return what the other side will have received, by group."""
        started = []
        for index in range(len(self.heads)):
            pieces = self.pieces(tensors, index)
            send = [sum(piece.numel() for piece in of) for of in pieces]
            receive = [rows * self.batch * self.width for rows in self.received(index)]
            # One flat buffer in the order of ranks: an all-to-all takes contiguous pieces, while heads and
            # tokens of `[b, k, n, d]` are not contiguous.
            flat = tensors[0].new_empty(sum(send))
            for values, piece in _pairs(flat, pieces):
                values.copy_(piece)
            started.append(collectives.start_all_to_all(flat, send, receive, self.group, NAME))
        return tuple(started)

    def finish(self, started: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Wait for the tensors of this side."""
        # A key head that several ranks have read gets the sum of their gradients; in all other cases each
        # element arrives exactly once.
        make, write = (torch.zeros, Tensor.add_) if self.sums else (torch.empty, Tensor.copy_)
        like = {"dtype": started[0].dtype, "device": started[0].device}
        tensors = tuple(make(self.batch, heads, tokens, self.width, **like) for heads, tokens in self.shapes)
        for index, flat in enumerate(started):
            for values, piece in _pairs(collectives.wait(flat), self.pieces(tensors, index)):
                write(piece, values)
        return tensors


class _AllHeads(_Side):
    """This rank's tokens of all heads, `[b, k, n, d]`, in one or more groups."""

    @property
    def shapes(self) -> list[tuple[int, int]]:
        tokens = self.tokens[self.group.rank()]
        return [
            (max(of.stop for each in part for of in each), tokens) for part in zip(*self.heads, strict=True)
        ]

    @property
    def sums(self) -> bool:
        sent = [sum(len(of) for each in part for of in each) for part in zip(*self.heads, strict=True)]
        # More heads sent than there are: at least one goes to several ranks.
        return sent != [heads for heads, _ in self.shapes]

    def pieces(self, tensors: Sequence[Tensor], index: int) -> list[list[Tensor]]:
        return [
            [part[:, of.start : of.stop] for part, of in zip(tensors, each, strict=True)]
            for each in zip(*self.heads[index], strict=True)
        ]

    def received(self, index: int) -> list[int]:
        rank = self.group.rank()
        return [sum(len(of[rank]) for of in self.heads[index]) * tokens for tokens in self.tokens]


class _OwnHeads(_Side):
    """All tokens of this rank's heads, `[b, k, m, d]`, of one group."""

    @property
    def shapes(self) -> list[tuple[int, int]]:
        rank, (heads,) = self.group.rank(), self.heads
        return [(len(of[rank]), sum(self.tokens)) for of in heads]

    def pieces(self, tensors: Sequence[Tensor], index: int) -> list[list[Tensor]]:
        return [list(each) for each in zip(*(x.split(list(self.tokens), 2) for x in tensors), strict=True)]

    def received(self, index: int) -> list[int]:
        tokens = self.tokens[self.group.rank()]
        return [sum(map(len, each)) * tokens for each in zip(*self.heads[index], strict=True)]


def _pairs(flat: Tensor, pieces: Sequence[Sequence[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the elements of every piece, in its shape, and the piece."""
    every = [piece for of in pieces for piece in of]
    counts = [piece.numel() for piece in every]
    # The buffer may be longer than what it holds: `start_all_to_all` pads it to the length of what it sent.
    for values, piece in zip(flat[: sum(counts)].split(counts), every, strict=True):
        yield values.view(piece.shape), piece


# Two functions instead of one, so that autograd, too, separates starting from waiting: the backward pass of
# `_Finish` sends gradients, and that of `_Start`, which runs later, waits for them.
class _Start(torch.autograd.Function):
    """Starts to send tensors; in the backward pass, waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, side: _Side, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.side = side
        return side.start(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *started: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *ctx.side.finish(started)


class _Finish(torch.autograd.Function):
    """Waits for tensors; in the backward pass, starts to send their gradients."""

    @staticmethod
    def forward(ctx: Any, side: _Side, *started: Tensor) -> tuple[Tensor, ...]:
        ctx.side = side
        return side.finish(started)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *ctx.side.start(gradients)


@torch.compiler.disable()
def _start(side: _Side, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return _Start.apply(side, *tensors)  # type: ignore[return-value]


@torch.compiler.disable()
def _finish(side: _Side, started: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return _Finish.apply(side, *started)  # type: ignore[return-value]
