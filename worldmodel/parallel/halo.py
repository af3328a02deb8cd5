"""Halo exchange: convolutions over frames whose cells are divided over processes.

Every process receives the cells next to its own from the processes that have them, and convolves both. The
result equals one process's; the bytes grow with the edge of its piece, not with the piece.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from worldmodel.parallel import collectives
from worldmodel.parallel.shards import Shards

NAME = "halo"
"""Name of the collective in `collectives.sent`."""


@dataclass(frozen=True, eq=False)
class Halo:
    """The cells that processes exchange before a 3x3 convolution over each frame.

    Cells are convolved in a canvas of whole rows, in which an empty row separates rows that are not
    neighbours.
    """

    shards: Shards
    send: Int[Tensor, " s"]
    """Own cells that each process receives, in the order of processes."""
    counts: tuple[tuple[int, ...], tuple[int, ...]]
    """Cells sent to each process, and received from each."""
    place: Int[Tensor, " m"]
    """Positions in the canvas of own and then of received cells."""
    canvas: tuple[int, int]
    """Rows and columns."""

    @classmethod
    def of(cls, shards: Shards, grid: tuple[int, int], device: torch.device) -> "Halo":
        """Compute the exchange for frames of `grid` rows and columns, whose cells `shards` divide."""
        # Every process computes the pieces of all others from `shards`, so no sizes or indices are exchanged.
        total, (rows, columns) = sum(shards.sizes), grid
        order = torch.arange(total) if shards.order is None else shards.order
        pieces = order.split(shards.sizes)
        own = torch.zeros(len(pieces), total, dtype=torch.bool)
        for rank, piece in enumerate(pieces):
            own[rank, piece] = True
        # `[processes, cells]`: the neighbours of each process's cells that other processes have.
        needed = _neighbours(own, grid) & ~own
        rank = shards.group.rank
        # `local` maps a cell of the clip to its index here; only entries of own cells are set and read.
        mine, local = pieces[rank], torch.empty(total, dtype=torch.long)
        local[mine] = torch.arange(len(mine))
        # Both lists are in the order of cells, so sender and receiver agree without exchanging indices.
        sent = [(needed[other] & own[rank]).nonzero()[:, 0] for other in range(len(pieces))]
        received = [(needed[rank] & own[other]).nonzero()[:, 0] for other in range(len(pieces))]
        cells = torch.cat([mine, *received])
        # The canvas holds only rows with cells of this process or next to them. Rows that are apart in the
        # clip, or in different frames, must not touch in the convolution: an empty row goes between them and
        # acts as the zero padding.
        present, which = (cells // columns).unique(return_inverse=True)
        apart = (present.diff() != 1) | (present[1:] % rows == 0)
        row = torch.cat([torch.zeros(1, dtype=torch.long), (1 + apart.long()).cumsum(0)])
        return cls(
            shards,
            local[torch.cat(sent)].to(device),
            (tuple(map(len, sent)), tuple(map(len, received))),
            (row[which] * columns + cells % columns).to(device),
            (int(row[-1]) + 1, columns),
        )

    def convolve(
        self,
        convolution: Callable[[Float[Tensor, "b d h w"]], Float[Tensor, "b d h w"]],
        x: Float[Tensor, "b n d"],
    ) -> Float[Tensor, "b n d"]:
        """Apply a 3x3 convolution with zero padding to this process's cells of every frame."""
        cells = torch.cat([x, self._exchange(x)], dim=1)
        canvas = x.new_zeros(len(x), prod(self.canvas), x.shape[2]).index_copy(1, self.place, cells)
        # Results at received cells are incomplete (their other neighbours are elsewhere) and are dropped.
        out = convolution(canvas.unflatten(1, self.canvas).permute(0, 3, 1, 2)).flatten(2)
        return out.index_select(2, self.place[: x.shape[1]]).transpose(1, 2)

    @torch.compiler.disable()
    def _exchange(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b m d"]:
        group, each = self.shards.group.group, x.shape[0] * x.shape[2]
        assert group is not None, "shards need the process group of a mesh"
        send, receive = ([count * each for count in counts] for counts in self.counts)
        pieces = x.transpose(0, 1).index_select(0, self.send)
        flat = collectives.all_to_all(pieces.flatten(), send, receive, group, NAME)
        return flat.view(-1, x.shape[0], x.shape[2]).transpose(0, 1)


def _neighbours(cells: Bool[Tensor, "p n"], grid: tuple[int, int]) -> Bool[Tensor, "p n"]:
    """Return the cells of the same frames within one row and column of given ones."""
    frames = cells.view(len(cells), -1, *grid).float()
    return F.max_pool2d(frames, 3, stride=1, padding=1).bool().flatten(1)
