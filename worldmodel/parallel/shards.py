"""The partition of a shared sequence over processes."""

from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Int
from torch import Tensor

from worldmodel.parallel.mesh import SequenceGroup


@dataclass(frozen=True, eq=False)
class Shards:
    """The tokens of every process of a sequence group: contiguous pieces of the sequence in `order`."""

    group: SequenceGroup
    sizes: tuple[int, ...]
    """Tokens of each process."""
    order: Int[Tensor, " n"] | None = None
    """Permutation of the tokens before they are divided; None is the identity."""

    @property
    def mine(self) -> slice:
        """This process's piece of the ordered sequence."""
        start = sum(self.sizes[: self.group.rank])
        return slice(start, start + self.sizes[self.group.rank])

    @property
    def row(self) -> slice:
        """The piece of all sp ranks with this cp rank, which compute its queries together."""
        first = self.group.cp_rank * self.group.sp
        start = sum(self.sizes[:first])
        return slice(start, start + sum(self.sp_sizes))

    @property
    def sp_sizes(self) -> tuple[int, ...]:
        """Tokens of each sp rank with this cp rank."""
        first = self.group.cp_rank * self.group.sp
        return self.sizes[first : first + self.group.sp]

    @property
    def cp_sizes(self) -> tuple[int, ...]:
        """Tokens of each cp rank, summed over its sp ranks."""
        sp = self.group.sp
        return tuple(sum(self.sizes[first : first + sp]) for first in range(0, len(self.sizes), sp))

    @cached_property
    def inverse(self) -> Int[Tensor, " n"] | None:
        """The inverse of `order`."""
        return None if self.order is None else self.order.argsort()


def evenly(total: int, parts: int) -> list[int]:
    """Divide into integers that differ by at most one."""
    return [total // parts + (part < total % parts) for part in range(parts)]
