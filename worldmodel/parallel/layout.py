"""What the tokens of a batch are: who sees whom, and which process holds which piece.

A mask is not a matrix here but a few numbers a token. They survive any order of the tokens and any division
over processes, and become what a kernel wants: a dense mask, a block mask, or lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from worldmodel.errors import ConfigError
from worldmodel.parallel import collectives, flex_mask, planner
from worldmodel.parallel.mask_rules import Kind, Segment
from worldmodel.parallel.mesh import SequenceGroup
from worldmodel.parallel.shards import Shards, evenly

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

NAME = "gather"
"""Name of the messages in `collectives.sent`."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The tokens of a batch, on the CPU; every process of a sequence group has the same.

    A token sees tokens of its own document, by the rule of its kind; padding sees itself, seen by no other.
    One row may serve the whole batch.
    """

    document: Int[Tensor, "b n"]
    """Number of the document in its row."""
    block: Int[Tensor, "b n"]
    """Number of the block, for FRAME: it never falls along a document."""
    kind: Int[Tensor, "b n"]
    """One of `Kind`."""
    position: Int[Tensor, "b n"]
    """Place in the document, from 0; also what rotary positions of text count."""
    shards: Shards | None = None
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False, init=False)

    # ---- makers --------------------------------------------------------------------------------------

    @classmethod
    def rows(cls, rows: Sequence[Sequence[Sequence[Segment]]], length: int = 0) -> "Layout":
        """Lay documents side by side in every row and pad rows behind.

        Args:
            rows: for each row its documents; each is a list of segments `(kind, tokens)`, and every
                segment is a block of its own.
            length: tokens of a row; 0 takes the longest.
        """
        length = max(length, *(sum(size for document in row for _, size in document) for row in rows))
        made = [_row(row, length) for row in rows]
        document, block, kind, position = (
            torch.stack(column).to(torch.int32) for column in zip(*made, strict=True)
        )
        return cls(document, block, kind, position)

    @classmethod
    def causal(cls, length: int) -> "Layout":
        """One document of text, for every row of a batch."""
        return cls.rows([[[(Kind.TEXT, length)]]])

    @classmethod
    def packed(cls, lengths: Sequence[Sequence[int]], length: int = 0) -> "Layout":
        """Documents of text side by side: `lengths` of each row's documents, padded behind (to `length`)."""
        return cls.rows([[[(Kind.TEXT, size)] for size in row] for row in lengths], length)

    @classmethod
    def frames(cls, blocks: Int[Tensor, " t"], cells: int) -> "Layout":
        """One clip of frames of `cells` tokens: a frame sees frames whose block is not above its own."""
        blocks = blocks.cpu().to(torch.int32)
        # Along a document blocks must not fall: frames in any other order keep theirs and change places.
        place = blocks.argsort(stable=True).argsort()
        position = (place[:, None] * cells + torch.arange(cells)).to(torch.int32).view(1, -1)
        block = blocks.repeat_interleave(cells)[None]
        return cls(torch.zeros_like(block), block, torch.full_like(block, Kind.FRAME), position)

    # ---- who sees whom -------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return self.document.shape[1]

    @property
    def queries(self) -> int:
        """Tokens whose queries this process and its sp peers compute."""
        return self.length if self.shards is None else sum(self.shards.sp_sizes)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self.position[self.kind != Kind.PAD].max()) + 1

    @cached_property
    def label(self) -> Int[Tensor, "b n"]:
        """The document, where every padding token is one of its own."""
        own = self.document.max() + 1 + torch.arange(self.length, dtype=torch.int32)
        return torch.where(self.kind == Kind.PAD, own, self.document)

    @cached_property
    def reach(self) -> Int[Tensor, "b n"]:
        """Last position that a token sees: the rule of every kind as one comparison.

        Token q sees token k where `label[q] == label[k]` and `position[k] <= reach[q]`.
        """
        row = torch.arange(self.label.shape[0])[:, None] * (int(self.label.max()) + 1)
        document = row + self.label
        own = self.block - self.block.min()
        block = document * (int(own.max()) + 1) + own
        frame, full = _highest(self.position, block), _highest(self.position, document)
        reach = torch.where(self.kind == Kind.FRAME, frame, self.position)
        return torch.where(self.kind == Kind.FULL, full, reach)

    def visible(self, device: torch.device | str = "cpu") -> Bool[Tensor, "b n m"]:
        """Return who sees whom as a matrix: True where query n sees key m.

        With shards, rows are the queries that this process and its sp peers compute, and columns all keys in
        the order in which they are gathered.
        """
        key = ("visible", str(device))
        if key not in self._cache:
            self._cache[key] = self._matrix(device)
        return self._cache[key]

    # Masks are made once a batch, outside compiled graphs; compiled layers find them in the cache.
    @torch.compiler.disable()
    def _matrix(self, device: torch.device | str) -> Bool[Tensor, "b n m"]:
        queries, keys = self.tokens
        label, reach, position = (x.to(device) for x in (self.label, self.reach, self.position))
        same = label[:, queries, None] == label[:, None, keys]
        return same & (position[:, None, keys] <= reach[:, queries, None])

    def block_mask(self, device: torch.device | str) -> "BlockMask":
        """Return `visible` as flex attention reads it, made from numbers a block and never as a matrix."""
        key = ("block_mask", str(device))
        if key not in self._cache:
            self._cache[key] = self._blocks(device)
        return self._cache[key]

    @torch.compiler.disable()
    def _blocks(self, device: torch.device | str) -> "BlockMask":
        queries, keys = self.tokens
        of_queries = torch.stack([self.label[:, queries], self.reach[:, queries]])
        of_keys = torch.stack([self.label[:, keys], self.position[:, keys]])
        return flex_mask.block_mask(of_queries.to(device), of_keys.to(device))

    def cu_seqlens(self) -> Int[Tensor, " documents"] | None:
        """Return where documents start in the flattened batch, and its end, as flash attention reads it.

        None where the mask is not causal text in whole documents, in order: a padding token is a document.
        """
        if "cu_seqlens" not in self._cache:
            self._cache["cu_seqlens"] = self._documents()
        return self._cache["cu_seqlens"]

    @torch.compiler.disable()
    def _documents(self) -> Int[Tensor, " documents"] | None:
        shared = self.shards is not None and (self.shards.order is not None or self.shards.group.cp > 1)
        text = (self.kind == Kind.TEXT) | (self.kind == Kind.PAD)
        step, follows = self.label.diff() != 0, self.position.diff() == 1
        runs, labels = int(step.sum()) + len(step), sum(row.unique().numel() for row in self.label)
        if shared or not text.all() or not (step | follows).all() or runs != labels:
            return None
        first = torch.ones_like(self.label[:, :1], dtype=torch.bool)
        starts = torch.cat([first, step], dim=1).flatten().nonzero().flatten()
        return torch.cat([starts, starts.new_tensor([self.label.numel()])]).to(torch.int32)

    def area(self) -> Int[Tensor, "b n"]:
        """Count the keys that every token sees."""
        label = torch.arange(self.label.shape[0])[:, None] * (int(self.label.max()) + 1) + self.label
        stride = int(self.position.max()) + 2  # a place after the last: the start of the next document's
        keys = (label * stride + self.position).flatten().sort().values
        last = torch.searchsorted(keys, label * stride + self.reach, right=True)
        return last - torch.searchsorted(keys, label * stride)

    # ---- pieces --------------------------------------------------------------------------------------

    @property
    def tokens(self) -> tuple[Any, Any]:
        """Indices of the queries that are computed here, and of the keys in their order."""
        if self.shards is None:
            return slice(None), slice(None)
        if self.shards.order is None:
            return self.shards.row, slice(None)
        return self.shards.order[self.shards.row], self.shards.order

    def shard(self, group: SequenceGroup, unit: int = 1, balance: bool = False) -> "Layout":
        """Divide the sequence over the processes of `group`; the layout itself stays whole.

        Args:
            group: the processes; with one alone this is the layout as it is.
            unit: tokens that stay together, for example those of a latent frame.
            balance: give every cp rank chunks from all over the sequence with equal shares of the mask; with
                plain pieces some ranks wait for others. Ulysses alone needs none of this.

        Raises:
            ConfigError: there are fewer units than processes.
        """
        if group.size == 1:
            return self
        assert self.length % unit == 0, f"{self.length} tokens are not whole units of {unit}"
        units = self.length // unit
        if units < group.size:
            raise ConfigError(
                f"A sequence of {units} {'frames' if unit > 1 else 'tokens'} cannot be shared by mesh.cp "
                f"{group.cp} x mesh.sp {group.sp} processes; lower these keys, or make sequences longer "
                "(more rounds, a larger chunk_frames)."
            )
        order = None
        rows = [count * unit for count in evenly(units, group.cp)]
        if balance and group.cp > 1:
            pieces = self._balanced(group, unit)
            order, rows = torch.cat(pieces), [len(piece) for piece in pieces]
        sizes = [count * unit for row in rows for count in evenly(row // unit, group.sp)]
        return replace(self, shards=Shards(group, tuple(sizes), order))

    def _balanced(self, group: SequenceGroup, unit: int) -> list[Int[Tensor, " m"]]:
        """Choose every cp rank's tokens: chunks of whole units, of which all ranks get equally many."""
        units = self.length // unit
        # Blocks of 128 are what kernels skip; shorter sequences are cut finer so that there is a choice.
        size = max(1, min(-(-128 // unit), units // (4 * group.size))) * unit
        chunks = torch.arange(self.length).split(size)
        areas = [int(part.sum()) for part in self.area().sum(dim=0).split(size)]
        return [
            torch.cat([chunks[index] for index in rank]) for rank in planner.chunks_by_area(areas, group.cp)
        ]

    def take(self, x: Shaped[Tensor, "..."], dim: int = 1) -> Shaped[Tensor, "..."]:
        """Return this process's piece of a tensor that all have whole."""
        if self.shards is None:
            return x
        if self.shards.order is None:
            piece = self.shards.mine
            return x.narrow(dim, piece.start, piece.stop - piece.start)
        return x.index_select(dim, self.shards.order[self.shards.mine].to(x.device))

    def gather(self, x: Shaped[Tensor, "..."], dim: int = 1) -> Shaped[Tensor, "..."]:
        """Put the pieces of all processes together: the inverse of `take`.

        The gradient is that of the sum of all processes' losses (see `traffic`).
        """
        if self.shards is None:
            return x
        group = self.shards.group.group
        assert group is not None, "a sequence is shared by processes of a group"
        whole = collectives.all_gather(x, self.shards.sizes, dim, group, NAME)
        inverse = self.shards.inverse
        return whole if inverse is None else whole.index_select(dim, inverse.to(x.device))


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put sequences into as few rows of `capacity` tokens as first-fit decreasing finds.

    Returns the numbers of the sequences in each row; the same for the same lengths, everywhere.

    Raises:
        ConfigError: a sequence is longer than a row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        if length > capacity:
            raise ConfigError(
                f"A sequence of {length} tokens does not fit into rows of {capacity}; use longer rows."
            )
        row = next((row for row, left in enumerate(room) if left >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(index)
        room[row] -= length
    return rows


def _row(documents: Sequence[Sequence[Segment]], length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return document, block, kind and position of the tokens of one row."""
    segments = [
        (number, block, kind, size)
        for number, document in enumerate(documents)
        for block, (kind, size) in enumerate(document)
    ]
    padding = length - sum(size for *_, size in segments)
    segments.append((len(documents), 0, Kind.PAD, padding))
    *columns, sizes = (torch.tensor(column) for column in zip(*segments, strict=True))
    document, block, kind = (column.repeat_interleave(sizes) for column in columns)
    totals = [*(sum(size for _, size in document) for document in documents), padding]
    position = torch.cat([torch.arange(total) for total in totals])
    return document, block, kind, position


def _highest(position: Int[Tensor, "b n"], group: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """Return for every token the highest position among the tokens of its group."""
    names, index = group.flatten().unique(return_inverse=True)
    highest = position.new_zeros(len(names)).scatter_reduce(0, index, position.flatten(), "amax")
    return highest[index].view_as(position)
