"""Ulysses: before attention every rank trades its tokens of all heads for all tokens of some heads.

Attention itself is then that of one process, whatever the mask, and all ranks do the same work. Query heads
are divided as evenly as they go; each rank receives the key heads that its queries read, so a key head whose
queries live on several ranks is sent to each of them. That covers any number of key heads: more or fewer than
ranks, divisible or not.

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
"""Name of the messages in `collectives.sent`."""


@dataclass(frozen=True)
class Heads:
    """Which heads each rank computes."""

    query: tuple[range, ...]
    """Query heads of each rank."""
    key: tuple[range, ...]
    """Key heads of each rank: those its queries read."""
    shared: int
    """Query heads that read one key head."""

    def readers(self, rank: int) -> list[int] | None:
        """Return, for every query head of `rank`, which of the rank's key heads it reads.

        None where that is the usual grouping: equal numbers of neighbouring queries for every key head.
        """
        read = [head // self.shared - self.key[rank].start for head in self.query[rank]]
        queries, keys = len(self.query[rank]), len(self.key[rank])
        usual = queries % keys == 0 and read == [head // (queries // keys) for head in range(queries)]
        return None if usual else read


def divide_heads(query_heads: int, key_heads: int, ranks: int) -> Heads:
    """Divide heads over ranks: query heads differ by one at most, the first ranks have more.

    Raises:
        ConfigError: there are fewer query heads than ranks.
    """
    if query_heads < ranks:
        raise ConfigError(
            f"mesh.sp is {ranks}, but attention has {query_heads} heads to divide; use mesh.sp up to "
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
    """From this rank's tokens of all heads to all tokens of this rank's heads, in one message.

    Args:
        parts: tensors `[b, k, n, d]` of `n = tokens[rank]` tokens: queries, keys, values.
        heads: for each part, the heads that each rank receives; a head may go to several.
        tokens: how many tokens each rank holds; together they are the `m` of the results.
        group: the ranks.
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
    received = _trade(pieces, shapes, group)
    return [torch.cat([of[part] for of in received], dim=2) for part in range(len(parts))]


@torch.compiler.disable()
def gather_heads_scatter_seq(
    x: Float[Tensor, "b _ m d"], heads: Sequence[range], tokens: Sequence[int], group: ProcessGroup
) -> Float[Tensor, "b k n d"]:
    """From all tokens of this rank's heads back to this rank's tokens of all heads.

    `heads` are disjoint here, in order; `tokens` as in `gather_seq_scatter_heads`.
    """
    rank = group.rank()
    pieces = [[piece] for piece in x.split(list(tokens), dim=2)]
    shapes = [[(x.shape[0], len(of), tokens[rank], x.shape[3])] for of in heads]
    return torch.cat([piece for (piece,) in _trade(pieces, shapes, group)], dim=1)


def _trade(
    pieces: list[list[Tensor]], shapes: list[list[tuple[int, ...]]], group: ProcessGroup
) -> list[list[Tensor]]:
    """Send `pieces[r]` to every rank r; return what came from each, in the given shapes."""
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
    """Count the numbers that `rank` sends forward and backward, a sequence and layer.

    To every other rank r go queries, keys and values of its own tokens, `n d (q_r + 2 g_r)`, and results of
    its own heads, `n_r d q`; the gradients of both go the other way. Where everything divides, either
    direction is (2 k + 2 g) d (S / P) (P - 1) / P for S tokens on P ranks.
    """
    forward = backward = 0
    query, key = [[len(part) for part in of] for of in (heads.query, heads.key)]
    for other in set(range(len(tokens))) - {rank}:
        forward += tokens[rank] * (query[other] + 2 * key[other]) + tokens[other] * query[rank]
        backward += tokens[other] * (query[rank] + 2 * key[rank]) + tokens[rank] * query[other]
    return forward * head_width, backward * head_width
