"""The layout of a batch: attention masks as data, and the partition over processes.

A mask is a few integers per token instead of a matrix. They are independent of the order of tokens and of the
partition, and are converted to the format of each kernel: a dense mask, a block mask, or sequence lengths.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from worldmodel.batch import to_device
from worldmodel.errors import ConfigError
from worldmodel.parallel import collectives, flex_mask, planner
from worldmodel.parallel.halo import Halo
from worldmodel.parallel.mask_rules import Kind, Segment
from worldmodel.parallel.mesh import SequenceGroup
from worldmodel.parallel.shards import Shards, evenly

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

NAME = "gather"
"""Name of the collective in `collectives.sent`."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The tokens of a batch, on the CPU, equal on all processes of a sequence group.

    A token attends to tokens of its document by the rule of its kind; padding attends only to itself. One row
    may serve the whole batch.
    """

    document: Int[Tensor, "b n"]
    """Index of the document in its row."""
    block: Int[Tensor, "b n"]
    """Index of the block, for FRAME; it must not decrease along a document."""
    kind: Int[Tensor, "b n"]
    """One of `Kind`."""
    position: Int[Tensor, "b n"]
    """Position in the document, from 0; also the rotary position of text."""
    shards: Shards | None = None
    masked: bool = True
    """Whether attention needs the mask; not if every token attends to every other (`unmasked`)."""
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False, init=False)

    # ---- constructors --------------------------------------------------------------------------------

    @classmethod
    def rows(cls, rows: Sequence[Sequence[Sequence[Segment]]], length: int = 0) -> "Layout":
        """Pack the documents of every row, and pad rows at the end.

        Args:
            rows: the documents of each row; a document is a list of segments `(kind, tokens)`, and every
                segment is a block.
            length: tokens per row; 0 is the length of the longest.
        """
        # The longest row decides, so that all rows stack; `length` can only add padding.
        length = max(length, *(sum(size for document in row for _, size in document) for row in rows))
        columns = [_row(row, length) for row in rows]
        document, block, kind, position = (
            torch.stack(column).to(torch.int32) for column in zip(*columns, strict=True)
        )
        return cls(document, block, kind, position)

    @classmethod
    def causal(cls, length: int) -> "Layout":
        """Return the layout of one text document, for every row of a batch."""
        return cls.rows([[[(Kind.TEXT, length)]]])

    @classmethod
    def packed(cls, lengths: Sequence[Sequence[int]], length: int = 0) -> "Layout":
        """Pack text documents of the given `lengths` into rows, padded at the end (to `length`)."""
        return cls.rows([[[(Kind.TEXT, size)] for size in row] for row in lengths], length)

    @classmethod
    def frames(cls, blocks: Int[Tensor, " t"], cells: int) -> "Layout":
        """Return the layout of a clip: frames of `cells` tokens attend to blocks up to their own."""
        blocks = blocks.cpu().to(torch.int32)
        # Blocks must not decrease along a document, so positions follow the order of blocks.
        # The second argsort inverts the first: it gives every frame its rank in the order of blocks.
        index = blocks.argsort(stable=True).argsort()
        position = (index[:, None] * cells + torch.arange(cells)).to(torch.int32).view(1, -1)
        block = blocks.repeat_interleave(cells)[None]
        return cls(torch.zeros_like(block), block, torch.full_like(block, Kind.FRAME), position)

    @classmethod
    def unmasked(cls, length: int) -> "Layout":
        """Return the layout of tokens that all attend to each other, for every row of a batch."""
        return replace(cls.rows([[[(Kind.FULL, length)]]]), masked=False)

    # ---- masks ---------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return self.document.shape[1]

    @property
    def queries(self) -> int:
        """Number of queries that this process and its sp peers compute."""
        return self.length if self.shards is None else sum(self.shards.sp_sizes)

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self.position[self.kind != Kind.PAD].max()) + 1

    @cached_property
    def label(self) -> Int[Tensor, "b n"]:
        """Index of the document; every padding token is a document of its own."""
        # A softmax over no keys is NaN, which would spread to all gradients. So padding attends to itself: as
        # a document of one token it does so under the same rule as everything else.
        own = self.document.max() + 1 + torch.arange(self.length, dtype=torch.int32)
        return torch.where(self.kind == Kind.PAD, own, self.document)

    @cached_property
    def reach(self) -> Int[Tensor, "b n"]:
        """Last position that a token attends to, which expresses all rules as one comparison.

        Token q attends to token k if `label[q] == label[k]` and `position[k] <= reach[q]`.
        """
        # `_highest` looks at the flattened batch, so labels are made unique over rows, and blocks over
        # documents.
        row = torch.arange(self.label.shape[0])[:, None] * (int(self.label.max()) + 1)
        document = row + self.label
        own = self.block - self.block.min()
        block = document * (int(own.max()) + 1) + own
        # TEXT reaches its own position, FRAME the last one of its block, FULL the last one of its document.
        frame, full = _highest(self.position, block), _highest(self.position, document)
        reach = torch.where(self.kind == Kind.FRAME, frame, self.position)
        return torch.where(self.kind == Kind.FULL, full, reach)

    def visible(self, device: torch.device | str = "cpu", window: int | None = None) -> Bool[Tensor, "b n m"]:
        """Return the dense mask: True where query n attends to key m.

        With a `window`, a query attends to that many last positions of what it would attend to otherwise.
        With shards, rows are the queries of this process and its sp peers, and columns are all keys in the
        order in which they are gathered.
        """
        key = ("visible", str(device), window)
        if key not in self._cache:
            self._cache[key] = self._matrix(device, window)
        return self._cache[key]

    # Masks are computed once per batch, outside compiled graphs; compiled layers read them from the cache.
    @torch.compiler.disable()
    def _matrix(self, device: torch.device | str, window: int | None) -> Bool[Tensor, "b n m"]:
        queries, keys = self.tokens
        label, reach, position = (
            to_device(x, torch.device(device)) for x in (self.label, self.reach, self.position)
        )
        # One comparison for all kinds of tokens: see `reach`.
        same = label[:, queries, None] == label[:, None, keys]
        mask = same & (position[:, None, keys] <= reach[:, queries, None])
        return mask if window is None else mask & (position[:, None, keys] > reach[:, queries, None] - window)

    def block_mask(self, device: torch.device | str) -> "BlockMask":
        """Return the mask of flex attention, computed without the dense mask."""
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
        """Return the starts of documents in the flattened batch, and its end, for flash attention.

        None unless the mask is causal text in whole documents, in order. A padding token is a document.
        """
        if "cu_seqlens" not in self._cache:
            self._cache["cu_seqlens"] = self._documents()
        return self._cache["cu_seqlens"]

    @torch.compiler.disable()
    def _documents(self) -> Int[Tensor, " documents"] | None:
        # With sp alone a process still has whole sequences (of some heads), so documents stay whole. With cp,
        # or in a balanced order, it has pieces of them, which lengths cannot describe.
        shared = self.shards is not None and (self.shards.order is not None or self.shards.group.cp > 1)
        text = (self.kind == Kind.TEXT) | (self.kind == Kind.PAD)
        step, follows = self.label.diff() != 0, self.position.diff() == 1
        # A document that is interrupted by another one gives more runs of labels than labels.
        runs, labels = int(step.sum()) + len(step), sum(row.unique().numel() for row in self.label)
        if shared or not text.all() or not (step | follows).all() or runs != labels:
            return None
        first = torch.ones_like(self.label[:, :1], dtype=torch.bool)
        starts = torch.cat([first, step], dim=1).flatten().nonzero().flatten()
        return torch.cat([starts, starts.new_tensor([self.label.numel()])]).to(torch.int32)

    def area(self) -> Int[Tensor, "b n"]:
        """Return the number of keys that every token attends to."""
        label = torch.arange(self.label.shape[0])[:, None] * (int(self.label.max()) + 1) + self.label
        # Positions of one document become a stretch of one sorted list, so two binary searches count the keys
        # of a token without looking at pairs: n log n instead of n².
        stride = int(self.position.max()) + 2  # offset of the next document, beyond its last position
        keys = (label * stride + self.position).flatten().sort().values
        last = torch.searchsorted(keys, label * stride + self.reach, right=True)
        return last - torch.searchsorted(keys, label * stride)

    @classmethod
    def items(cls, count: int, group: SequenceGroup) -> "Layout":
        """Divide independent items, such as images; if they are fewer than processes, all have all."""
        layout = cls.unmasked(count)
        return layout.shard(group) if count >= group.size else layout

    # ---- partition -----------------------------------------------------------------------------------

    @property
    def tokens(self) -> tuple[Any, Any]:
        """Indices of the queries that this process computes, and of the keys in gathered order."""
        if self.shards is None:
            return slice(None), slice(None)
        if self.shards.order is None:
            return self.shards.row, slice(None)
        return self.shards.order[self.shards.row], self.shards.order

    @property
    def own(self) -> Int[Tensor, " m"]:
        """Indices of the tokens that this process has."""
        if self.shards is None:
            return torch.arange(self.length)
        order = torch.arange(self.length) if self.shards.order is None else self.shards.order
        return order[self.shards.mine]

    def shard(self, group: SequenceGroup, balance: bool = False) -> "Layout":
        """Return a layout whose sequence is divided over the processes of `group`.

        Args:
            group: the processes; a group of one returns the same layout.
            balance: assign chunks from all over the sequence to every cp rank, such that masks have equal
                areas; otherwise pieces are contiguous and some ranks wait for others. Not needed for sp.

        Raises:
            ConfigError: there are fewer tokens than processes.
        """
        if group.size == 1:
            return self
        if self.length < group.size:
            raise ConfigError(
                f"A sequence of {self.length} tokens cannot be shared by mesh.cp {group.cp} x mesh.sp "
                f"{group.sp} processes; lower these keys, or make sequences longer (more rounds, a larger "
                "chunk_frames)."
            )
        # The order of axes matters: cp cuts the sequence into rows, sp cuts every row. After the exchange of
        # heads, the sp peers of a row have its queries together, and keys come from all rows.
        order, rows = None, evenly(self.length, group.cp)
        if balance and group.cp > 1:
            pieces = self._balanced(group)
            order, rows = torch.cat(pieces), [len(piece) for piece in pieces]
        sizes = [count for row in rows for count in evenly(row, group.sp)]
        return replace(self, shards=Shards(group, tuple(sizes), order))

    def split(self, count: int) -> "tuple[Layout, Layout]":
        """Return the layouts of the first `count` tokens and of the rest of a divided, unmasked sequence.

        Each process has the tokens that it has here; it may have none of one half.
        """
        shards = self.shards
        assert shards is not None and shards.order is None and not self.masked
        # Fill processes from the front: the first `count` tokens lie on the first processes.
        first, left = [], count
        for size in shards.sizes:
            first.append(min(left, size))
            left -= first[-1]
        rest = [size - own for size, own in zip(shards.sizes, first, strict=True)]
        return (
            replace(Layout.unmasked(sum(first)), shards=replace(shards, sizes=tuple(first))),
            replace(Layout.unmasked(sum(rest)), shards=replace(shards, sizes=tuple(rest))),
        )

    def _balanced(self, group: SequenceGroup) -> list[Int[Tensor, " m"]]:
        """Return the tokens of every cp rank, in equally many chunks each."""
        # Causal attention costs a late token more than an early one. Several chunks per rank, early and late
        # ones mixed, even that out.
        count = 4 * group.size
        # Kernels skip blocks of 128 tokens; shorter sequences need smaller chunks for a balance.
        sizes = flex_mask.SIZE if self.length >= flex_mask.SIZE * count else evenly(self.length, count)
        chunks = torch.arange(self.length).split(sizes)
        areas = [int(part.sum()) for part in self.area().sum(dim=0).split(sizes)]
        return [
            torch.cat([chunks[index] for index in rank]) for rank in planner.chunks_by_area(areas, group.cp)
        ]

    def pieces(self, cells: int) -> Int[Tensor, " p"]:
        """Return the frames that this process has tokens of, one for each of equally long pieces.

        The tokens of a piece follow each other in one frame of `cells`; pieces are as long as possible.
        """
        key = ("pieces", cells)
        if key not in self._cache:
            frame = self.own // cells
            ends = frame.diff().nonzero().flatten() + 1
            self._cache[key] = frame[:: math.gcd(len(frame), *ends.tolist())]
        return self._cache[key]

    def halo(self, grid: tuple[int, int], device: torch.device) -> Halo:
        """Return the exchange of neighbouring cells of a clip with frames of `grid` rows and columns."""
        key = ("halo", grid, str(device))
        if key not in self._cache:
            self._cache[key] = self._halo(grid, device)
        return self._cache[key]

    @torch.compiler.disable()
    def _halo(self, grid: tuple[int, int], device: torch.device) -> Halo:
        assert self.shards is not None, "one process has all cells"
        return Halo.of(self.shards, grid, device)

    def sum(self, x: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Return the sum of all processes' values, with the gradient of `gather`."""
        if self.shards is None:
            return x
        group = self.shards.group.group
        assert group is not None, "shards need a process group"
        return collectives.all_gather(x[None], [1] * self.shards.group.size, 0, group, NAME).sum()

    def take(self, x: Shaped[Tensor, "..."], dim: int = 1) -> Shaped[Tensor, "..."]:
        """Return this process's piece of a tensor."""
        if self.shards is None:
            return x
        if self.shards.order is None:
            piece = self.shards.mine
            return x.narrow(dim, piece.start, piece.stop - piece.start)
        return x.index_select(dim, self.shards.order[self.shards.mine].to(x.device))

    def gather(self, x: Shaped[Tensor, "..."], dim: int = 1) -> Shaped[Tensor, "..."]:
        """Concatenate the pieces of all processes: the inverse of `take`.

        The gradient is that of the sum of all processes' losses (see `collectives`).
        """
        if self.shards is None:
            return x
        group = self.shards.group.group
        assert group is not None, "shards need a process group"
        whole = collectives.all_gather(x, self.shards.sizes, dim, group, NAME)
        inverse = self.shards.inverse
        return whole if inverse is None else whole.index_select(dim, inverse.to(x.device))


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack sequences into rows of `capacity` tokens by first-fit decreasing; deterministic.

    Returns the indices of the sequences in each row.

    Raises:
        ConfigError: a sequence is longer than a row.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        if length > capacity:
            raise ConfigError(
                f"A sequence of {length} tokens does not fit into rows of {capacity}; use longer rows."
            )
        row = next((row for row, left in enumerate(free) if left >= length), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(capacity)
        rows[row].append(index)
        free[row] -= length
    return rows


def _row(documents: Sequence[Sequence[Segment]], length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the document, block, kind and position of every token of a row."""
    numbers, blocks, kinds, sizes = [], [], [], []
    positions = []
    for number, segments in enumerate(documents):
        for block, (kind, size) in enumerate(segments):
            numbers.append(number)
            blocks.append(block)
            kinds.append(kind)
            sizes.append(size)
        positions.append(torch.arange(sum(size for _, size in segments)))
    # Padding is one more document, of one segment; it may be empty.
    padding = length - sum(sizes)
    numbers.append(len(documents))
    blocks.append(0)
    kinds.append(Kind.PAD)
    sizes.append(padding)
    positions.append(torch.arange(padding))

    repeats = torch.tensor(sizes)
    document = torch.tensor(numbers).repeat_interleave(repeats, output_size=length)
    block = torch.tensor(blocks).repeat_interleave(repeats, output_size=length)
    kind = torch.tensor(kinds).repeat_interleave(repeats, output_size=length)
    return document, block, kind, torch.cat(positions)


def _highest(position: Int[Tensor, "b n"], group: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """Return, for every token, the highest position in its group."""
    names, index = group.flatten().unique(return_inverse=True)
    highest = position.new_zeros(len(names)).scatter_reduce(0, index, position.flatten(), "amax")
    return highest[index].view_as(position)
