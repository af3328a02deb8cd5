"""Which process holds which tokens of a shared sequence."""

from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Int
from torch import Tensor

from worldmodel.parallel.mesh import SequenceGroup


@dataclass(frozen=True, eq=False)
class Shards:
    """Which tokens every process of a sequence group holds: a contiguous piece of the sequence in `order`."""

    group: SequenceGroup
    sizes: tuple[int, ...]
    """Tokens of each process."""
    order: Int[Tensor, " n"] | None = None
    """Token numbers in the order in which processes hold them; None: as they are."""

    @property
    def mine(self) -> slice:
        """This process's piece of the ordered sequence."""
        start = sum(self.sizes[: self.group.rank])
        return slice(start, start + self.sizes[self.group.rank])

    @property
    def row(self) -> slice:
        """The piece of this process and its sp peers, whose queries they compute together."""
        first = self.group.cp_rank * self.group.sp
        start = sum(self.sizes[:first])
        return slice(start, start + sum(self.sp_sizes))

    @property
    def sp_sizes(self) -> tuple[int, ...]:
        """Tokens of each sp rank beside this one."""
        first = self.group.cp_rank * self.group.sp
        return self.sizes[first : first + self.group.sp]

    @property
    def cp_sizes(self) -> tuple[int, ...]:
        """Tokens of each cp rank, all its sp ranks together."""
        sp = self.group.sp
        return tuple(sum(self.sizes[first : first + sp]) for first in range(0, len(self.sizes), sp))

    @cached_property
    def inverse(self) -> Int[Tensor, " n"] | None:
        """Places of the tokens in `order`."""
        return None if self.order is None else self.order.argsort()


def evenly(total: int, parts: int) -> list[int]:
    """Divide into whole numbers that differ by one at most."""
    return [total // parts + (part < total % parts) for part in range(parts)]
