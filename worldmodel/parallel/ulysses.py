"""Ulysses: every rank exchanges its tokens of all heads for all tokens of some heads before attention.

Attention is then computed as in one process, with any mask, and with equal work on all ranks. Query heads are
divided as evenly as possible. Each rank receives the key heads of its query heads, so a key head is sent to
every rank that has one of its queries; the number of key heads need not be divisible by the number of ranks.

Source: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv:2309.14509).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from worldmodel.errors import ConfigError
from worldmodel.parallel import collectives

NAME = "ulysses"
"""Name of the collective in `collectives.sent`."""


@dataclass(frozen=True)
class Heads:
    """The heads that each rank computes."""

    query: tuple[range, ...]
    """Query heads of each rank."""
    key: tuple[range, ...]
    """Key heads of each rank: those of its query heads."""
    shared: int
    """Query heads per key head."""

    def readers(self, rank: int) -> list[int] | None:
        """Return, for every query head of `rank`, the index of its key head among those of the rank.

        None if equal numbers of neighbouring query heads share each key head, as in grouped-query attention.
        """
        index = [head // self.shared - self.key[rank].start for head in self.query[rank]]
        queries, keys = len(self.query[rank]), len(self.key[rank])
        grouped = queries % keys == 0 and index == [head // (queries // keys) for head in range(queries)]
        return None if grouped else index


def divide_heads(query_heads: int, key_heads: int, ranks: int) -> Heads:
    """Divide heads over ranks; numbers of query heads differ by at most one, larger ones first.

    Raises:
        ConfigError: there are fewer query heads than ranks.
    """
    if query_heads < ranks:
        raise ConfigError(
            f"mesh.sp is {ranks}, but attention has only {query_heads} heads; use mesh.sp up to "
            f"{query_heads} and mesh.cp for the rest."
        )
    shared = query_heads // key_heads
    counts = [query_heads // ranks + (rank < query_heads % ranks) for rank in range(ranks)]
    query = [range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]
    key = [range(part.start // shared, (part.stop - 1) // shared + 1) for part in query]
    return Heads(tuple(query), tuple(key), shared)


@torch.compiler.disable()
def gather_seq_scatter_heads(
    parts: Sequence[Float[Tensor, "b _ n _"]],
    heads: Sequence[Sequence[range]],
    tokens: Sequence[int],
    group: ProcessGroup,
) -> list[Float[Tensor, "b _ m _"]]:
    """Exchange this rank's tokens of all heads for all tokens of this rank's heads, in one collective.

    Args:
        parts: tensors `[b, k, n, d]` of `n = tokens[rank]` tokens: queries, keys, values.
        heads: for each part, the heads that each rank receives; several ranks may receive the same head.
        tokens: number of tokens of each rank; their sum is `m` in the results.
        group: process group of the ranks.
    """
    rank, ranks = group.rank(), range(len(tokens))
    pieces = [
        [part[:, of[to].start : of[to].stop] for part, of in zip(parts, heads, strict=True)] for to in ranks
    ]
    shapes = [
        [
            (part.shape[0], len(of[rank]), tokens[source], part.shape[3])
            for part, of in zip(parts, heads, strict=True)
        ]
        for source in ranks
    ]
    received = _exchange(pieces, shapes, group)
    return [torch.cat([of[part] for of in received], dim=2) for part in range(len(parts))]


@torch.compiler.disable()
def gather_heads_scatter_seq(
    x: Float[Tensor, "b _ m d"], heads: Sequence[range], tokens: Sequence[int], group: ProcessGroup
) -> Float[Tensor, "b k n d"]:
    """Exchange all tokens of this rank's heads for this rank's tokens of all heads.

    `heads` must be disjoint and in order; `tokens` as in `gather_seq_scatter_heads`.
    """
    rank = group.rank()
    pieces = [[piece] for piece in x.split(list(tokens), dim=2)]
    shapes = [[(x.shape[0], len(of), tokens[rank], x.shape[3])] for of in heads]
    return torch.cat([piece for (piece,) in _exchange(pieces, shapes, group)], dim=1)


def _exchange(
    pieces: list[list[Tensor]], shapes: list[list[tuple[int, ...]]], group: ProcessGroup
) -> list[list[Tensor]]:
    """Send `pieces[r]` to every rank r; return the pieces received from each, in the given shapes."""
    flat = torch.cat([piece.flatten() for to in pieces for piece in to])
    counts = [[prod(shape) for shape in source] for source in shapes]
    out = collectives.all_to_all(
        flat,
        [sum(piece.numel() for piece in to) for to in pieces],
        [sum(source) for source in counts],
        group,
        NAME,
    )
    cut = iter(out.split([count for source in counts for count in source]))
    return [[next(cut).view(shape) for shape in source] for source in shapes]


def volume(heads: Heads, head_width: int, tokens: Sequence[int], rank: int) -> tuple[int, int]:
    """Return how many elements `rank` sends forward and backward, per sequence and layer.

    Every other rank r receives queries, keys and values of this rank's tokens, `n d (q_r + 2 g_r)`, and
    results of its heads, `n_r d q`; gradients are sent in the opposite direction. If all numbers are
    divisible, each direction sends (2 k + 2 g) d (S / P) (P - 1) / P for S tokens on P ranks.
    """
    forward = backward = 0
    query, key = [[len(part) for part in of] for of in (heads.query, heads.key)]
    for other in set(range(len(tokens))) - {rank}:
        forward += tokens[rank] * (query[other] + 2 * key[other]) + tokens[other] * query[rank]
        backward += tokens[other] * (query[rank] + 2 * key[rank]) + tokens[rank] * query[other]
    return forward * head_width, backward * head_width
