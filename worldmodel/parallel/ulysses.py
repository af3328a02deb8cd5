"""Ulysses: every rank exchanges its tokens of all heads for all tokens of some heads before attention.

Attention is then computed as in one process, with any mask, and with equal work on all ranks. Query heads are
divided as evenly as possible. Each rank receives the key heads of its query heads, so a key head is sent to
every rank that has one of its queries; the number of key heads need not be divisible by the number of ranks.

Large tensors are exchanged in groups of heads (`head_exchange`), while a rank attends with other groups.

Source: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv:2309.14509).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from jaxtyping import Float
from torch import Tensor

from worldmodel.errors import ConfigError
from worldmodel.parallel.shards import evenly

NAME = "ulysses"
"""Name of the collective in `collectives.sent`."""
MAX_GROUPS = 4
"""Largest number of groups of heads: the first to arrive and the last to be sent overlap with nothing."""
MIN_GROUP_BYTES = 4 << 20
"""Smallest size of a group's queries, keys and values on a rank: small messages cost more than they hide."""


@dataclass(frozen=True)
class Heads:
    """The heads that each rank computes."""

    query: tuple[range, ...]
    """Query heads of each rank."""
    key: tuple[range, ...]
    """Key heads of each rank, which its query heads read."""
    shared: int
    """Query heads per key head."""

    def readers(self, rank: int) -> list[int] | None:
        """Return, for every query head of `rank`, the index of its key head among the rank's.

        None if equal numbers of neighbouring query heads share each key head, as in grouped-query attention.
        """
        # Kernels share key heads by position (query head i reads key head i // (queries / keys)). An uneven
        # division of heads breaks that, and the caller repeats key heads by this index instead.
        index = [head // self.shared - self.key[rank].start for head in self.query[rank]]
        queries, keys = len(self.query[rank]), len(self.key[rank])
        grouped = queries % keys == 0 and index == [head // (queries // keys) for head in range(queries)]
        return None if grouped else index

    def split(self, groups: int) -> "list[Heads]":
        """Divide the heads of each rank into groups of neighbouring key heads, with their query heads."""
        cut = [_cut(keys, groups) for keys in self.key]
        divided = []
        for group in range(groups):
            key = tuple(parts[group] for parts in cut)
            query = []
            for own, keys in zip(self.query, key, strict=True):
                # A key head at the edge of a rank may have queries on two ranks: each takes its own.
                first = max(own.start, keys.start * self.shared)
                query.append(range(first, min(own.stop, keys.stop * self.shared)))
            divided.append(Heads(tuple(query), key, self.shared))
        return divided


def _cut(heads: range, parts: int) -> list[range]:
    counts = evenly(len(heads), parts)
    return [heads[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]


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
    # Dividing query heads balances the work. Key heads follow: one whose queries lie on two ranks goes to
    # both, a few more bytes instead of idle ranks.
    counts = [query_heads // ranks + (rank < query_heads % ranks) for rank in range(ranks)]
    query = [range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]
    key = [range(part.start // shared, (part.stop - 1) // shared + 1) for part in query]
    return Heads(tuple(query), tuple(key), shared)


def head_groups(heads: Heads, query: Float[Tensor, "b k n d"], tokens: Sequence[int]) -> list[Heads]:
    """Divide the heads into the groups that are exchanged one after another; the same on every rank.

    Args:
        heads: heads of each rank.
        query: queries of this rank's tokens, which all ranks have in the same dtype.
        tokens: number of tokens of each rank.
    """
    batch, count, _, width = query.shape
    # Sizes come from numbers that all ranks know: ranks that formed different groups would wait for exchanges
    # that others never start. A group has at least one key head on every rank.
    elements = batch * sum(tokens) * width * (count + 2 * count // heads.shared) // len(tokens)
    fewest = min(map(len, heads.key))
    return heads.split(max(1, min(MAX_GROUPS, fewest, elements * query.element_size() // MIN_GROUP_BYTES)))
