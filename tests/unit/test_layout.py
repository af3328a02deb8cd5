"""Layouts: masks in all formats, areas, and shards."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from worldmodel.errors import ConfigError
from worldmodel.parallel import flex_mask
from worldmodel.parallel.layout import Layout, pack
from worldmodel.parallel.mask_rules import Kind, mask_area
from worldmodel.parallel.mesh import SequenceGroup

segments = st.tuples(st.sampled_from([Kind.TEXT, Kind.FRAME, Kind.FULL, Kind.PAD]), st.integers(1, 9))
rows = st.lists(
    st.lists(st.lists(segments, min_size=1, max_size=4), min_size=1, max_size=3), min_size=1, max_size=3
)
extra = st.integers(0, 5)


def made(rows: list, extra: int) -> Layout:
    longest = max(sum(size for document in row for _, size in document) for row in rows)
    return Layout.rows(rows, longest + extra)


def rule(layout: Layout) -> Tensor:
    """The dense mask, pair by pair, from the description of the kinds."""
    b, n = layout.document.shape
    seen = torch.zeros(b, n, n, dtype=torch.bool)
    for row in range(b):
        tokens = list(
            zip(
                *(x[row].tolist() for x in (layout.document, layout.block, layout.kind, layout.position)),
                strict=True,
            )
        )
        for q, (document, block, kind, position) in enumerate(tokens):
            for k, (other, their_block, their_kind, their_position) in enumerate(tokens):
                allowed = {
                    Kind.PAD: False,
                    Kind.TEXT: their_position <= position,
                    Kind.FRAME: their_block <= block,
                    Kind.FULL: True,
                }[Kind(kind)]
                seen[row, q, k] = q == k or (document == other and their_kind != Kind.PAD and allowed)
    return seen


def of_size(cp: int, sp: int) -> list[SequenceGroup]:
    return [SequenceGroup(cp, sp, rank // sp, rank % sp) for rank in range(cp * sp)]


@given(rows, extra)
def test_mask_follows_the_rule_of_each_kind(rows: list, extra: int) -> None:
    layout = made(rows, extra)
    assert torch.equal(layout.visible(), rule(layout))


@given(rows, extra)
def test_area_counts_the_visible_pairs(rows: list, extra: int) -> None:
    layout = made(rows, extra)
    assert torch.equal(layout.area(), layout.visible().sum(dim=2))
    padding = layout.document.numel() - sum(size for row in rows for document in row for _, size in document)
    assert layout.area().sum() == padding + sum(mask_area(document) for row in rows for document in row)


@given(st.lists(st.integers(-2, 3), min_size=1, max_size=6), st.integers(1, 4))
def test_frames_attend_to_blocks_up_to_their_own(numbers: list[int], cells: int) -> None:
    number = torch.tensor(numbers).repeat_interleave(cells)
    layout = Layout.frames(torch.tensor(numbers), cells)
    assert torch.equal(layout.visible()[0], number[None] <= number[:, None])


def test_packed_documents_are_causal_and_independent() -> None:
    layout = Layout.packed([[2, 3], [4]])
    assert layout.position.tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]]
    assert layout.longest == 4
    first = torch.block_diag(torch.ones(2, 2).tril(), torch.ones(3, 3).tril()).bool()
    second = torch.block_diag(torch.ones(4, 4).tril(), torch.ones(1, 1)).bool()
    assert torch.equal(layout.visible(), torch.stack([first, second]))
    assert torch.equal(Layout.causal(6).visible()[0], torch.ones(6, 6).tril().bool())


def test_mask_is_cached() -> None:
    layout = Layout.causal(5)
    assert layout.visible() is layout.visible()


# Lengths, as flash attention reads them


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3), extra)
def test_cu_seqlens_equal_the_mask(lengths: list[list[int]], extra: int) -> None:
    layout = Layout.packed(lengths, max(map(sum, lengths)) + extra)
    starts = layout.cu_seqlens()
    assert starts is not None
    parts = [torch.ones(size, size).tril() for size in starts.diff().tolist()]
    assert torch.equal(torch.block_diag(*parts).bool(), torch.block_diag(*layout.visible().int()).bool())


def test_only_causal_documents_in_order_have_cu_seqlens() -> None:
    assert Layout.frames(torch.tensor([0, 1]), 3).cu_seqlens() is None
    assert Layout.rows([[[(Kind.TEXT, 3), (Kind.FULL, 2)]]]).cu_seqlens() is None
    causal = Layout.causal(8)
    assert causal.shard(SequenceGroup(sp=2)).cu_seqlens() is not None
    assert causal.shard(SequenceGroup(cp=2)).cu_seqlens() is None
    halves = Layout(
        *(x[:, [0, 2, 1, 3]] for x in (causal.document, causal.block, causal.kind, causal.position))
    )
    assert halves.cu_seqlens() is None


# Blocks, as flex attention reads them

LONG = [
    [[(Kind.TEXT, 200), (Kind.FRAME, 90), (Kind.FRAME, 90)], [(Kind.FULL, 130)], [(Kind.TEXT, 300)]],
    [[(Kind.TEXT, 500)], [(Kind.FRAME, 64)] * 4],
]


@pytest.mark.parametrize("group", [SequenceGroup(), SequenceGroup(cp=2, cp_rank=1)], ids=["whole", "shard"])
def test_block_mask_equals_the_dense_mask(group: SequenceGroup) -> None:
    layout = Layout.rows(LONG).shard(group, balance=True)
    visible = layout.visible()
    missing = [-size % flex_mask.SIZE for size in visible.shape[1:]]
    padded = torch.cat([visible, visible[:, -1:].expand(-1, missing[0], -1)], dim=1)
    padded = torch.nn.functional.pad(padded, (0, missing[1]))
    tiles = padded.unflatten(2, (-1, flex_mask.SIZE)).unflatten(1, (-1, flex_mask.SIZE)).transpose(2, 3)
    mask = layout.block_mask("cpu")
    found = mask.to_dense()[:, 0].bool()
    assert not (tiles.flatten(3).any(dim=3) & ~found).any()
    full = torch.zeros_like(found)
    for row, counts in enumerate(mask.full_kv_num_blocks[:, 0].tolist()):
        for block, count in enumerate(counts):
            full[row, block, mask.full_kv_indices[row, 0, block, :count]] = True
    assert full.any()
    assert tiles.flatten(3).all(dim=3)[full].all()
    b, q, k = (torch.tensor(x) for x in (1, 3, 5))
    asked = [mask.mask_mod(torch.tensor(row), b, q, k) for row in range(2)]
    assert [bool(x) for x in asked] == visible[:, 3, 5].tolist()


def test_block_mask_of_packed_documents_is_sparse() -> None:
    layout = Layout.packed([[300, 77, 512, 135]])
    tiles = layout.visible().unflatten(2, (-1, 128)).unflatten(1, (-1, 128)).transpose(2, 3).flatten(3)
    assert torch.equal(layout.block_mask("cpu").to_dense()[:, 0].bool(), tiles.any(dim=3))


# Pieces


@given(st.integers(1, 4), st.integers(1, 3), st.integers(12, 200), st.booleans(), st.integers(0, 199))
def test_shards_hold_every_token_once(cp: int, sp: int, n: int, balance: bool, seed: int) -> None:
    cut = seed % n
    whole = Layout.rows([[[(Kind.TEXT, cut + 1)], [(Kind.FULL, n - cut)]]], n)
    whole = Layout(*(x[:, :n] for x in (whole.document, whole.block, whole.kind, whole.position)))
    x = torch.arange(n)[None]
    pieces = [whole.shard(group, balance).take(x)[0] for group in of_size(cp, sp)]
    assert sorted(torch.cat(pieces).tolist()) == list(range(n))
    for cp_rank in range(cp):  # Ulysses: the same for all
        counts = [len(piece) for piece in pieces[cp_rank * sp : (cp_rank + 1) * sp]]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("grid", [(4, 8), (5, 7), (8, 8), (30, 52)])
@pytest.mark.parametrize("sizes", [(1, 8), (8, 1), (2, 4)])
def test_frames_are_divided_by_tokens(grid: tuple[int, int], sizes: tuple[int, int]) -> None:
    """11 latent frames on 8 processes: whole frames would leave some with one and others with two."""
    blocks = torch.tensor([0] + [1] * 10)
    layout = Layout.frames(blocks, grid[0] * grid[1]).shard(SequenceGroup(*sizes), balance=True)
    assert layout.shards is not None
    assert layout.length / (8 * max(layout.shards.sizes)) >= 0.97


def test_balanced_shards_have_equal_areas() -> None:
    whole = Layout.rows([[[(Kind.FULL, 3000)], [(Kind.TEXT, 4000)], *[[(Kind.TEXT, 150)]] * 40]])
    shares = {}
    for balance in (False, True):
        layouts = [whole.shard(group, balance=balance) for group in of_size(8, 1)]
        areas = torch.stack([layout.take(whole.area()).sum() for layout in layouts]).double()
        shares[balance] = (areas.max() / areas.mean()).item()
        assert len({int(layout.take(whole.area()).shape[1]) // 128 for layout in layouts}) <= 2
    assert shares[False] > 2
    assert shares[True] < 1.03


def test_mask_of_a_shard_is_its_rows_of_the_whole() -> None:
    whole = Layout.rows(LONG)
    for group in of_size(2, 2):
        layout = whole.shard(group, balance=True)
        queries, keys = layout.tokens
        assert torch.equal(layout.visible(), whole.visible()[:, queries][:, :, keys])
        assert layout.queries == layout.visible().shape[1]


def test_shard_for_one_process_is_the_layout() -> None:
    layout = Layout.causal(4)
    assert layout.shard(SequenceGroup()) is layout
    x = torch.randn(1, 4, 2)
    assert layout.take(x) is x
    assert layout.gather(x) is x


def test_more_processes_than_tokens() -> None:
    with pytest.raises(ConfigError, match=r"3 tokens.*mesh\.cp 2 x mesh\.sp 2"):
        Layout.causal(3).shard(SequenceGroup(2, 2))


# Packing


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(50, 90))
def test_pack_puts_every_sequence_into_one_row(lengths: list[int], capacity: int) -> None:
    rows = pack(lengths, capacity)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in row) for row in rows]
    assert all(load <= capacity for load in loads)
    assert sum(2 * load <= capacity for load in loads) <= 1  # two such rows would have been one
    assert rows == pack(lengths, capacity)


def test_pack_sequence_longer_than_a_row() -> None:
    with pytest.raises(ConfigError, match=r"51 tokens.*50"):
        pack([3, 51], 50)


@given(st.integers(8, 60), st.integers(1, 50), st.sampled_from([(1, 3), (2, 1), (2, 2), (1, 8)]))
def test_a_divided_sequence_splits_into_two(length: int, count: int, sizes: tuple[int, int]) -> None:
    """Every process keeps its tokens: those of the first half, then those of the second."""
    count = min(count, length)
    whole = Layout.unmasked(length)
    assert whole.visible().all()
    tokens = torch.arange(length)
    for group in of_size(*sizes):
        layout = whole.shard(group)
        first, rest = layout.split(count)
        assert (first.length, rest.length) == (count, length - count)
        parts = first.take(tokens[:count], 0), rest.take(tokens[count:], 0)
        assert torch.equal(torch.cat(parts), layout.take(tokens, 0))


@pytest.mark.parametrize(
    ("frames", "cells", "cp", "sp", "balance", "most"),
    [
        (21, 1560, 1, 8, False, 21),  # pan on 8 processes: 195 tokens of 4095
        (4, 15, 1, 1, False, 4),
        (4, 15, 2, 2, False, 1),
        (3, 7, 1, 2, False, 11),  # no common length
        (8, 96, 2, 2, True, 24),
    ],
)
def test_pieces_are_parts_of_frames(
    frames: int, cells: int, cp: int, sp: int, balance: bool, most: int
) -> None:
    for rank in range(cp * sp):
        group = SequenceGroup(sp=sp, sp_rank=rank % sp, cp=cp, cp_rank=rank // sp)
        layout = Layout.frames(torch.arange(frames), cells) if balance else Layout.unmasked(frames * cells)
        layout = layout.shard(group, balance)
        found = layout.pieces(cells)
        tokens = layout.take(torch.arange(frames * cells), 0)
        assert len(found) <= most
        assert torch.equal(found.repeat_interleave(len(tokens) // len(found)), tokens // cells)
