"""The block mask of flex attention, computed from labels and positions of tokens.

`create_block_mask` of torch evaluates every pair of tokens, which needs the dense mask in memory.
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Int
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

SIZE = 128
"""Tokens per block of flex attention's kernels."""


def block_mask(queries: Int[Tensor, "2 b n"], keys: Int[Tensor, "2 b m"]) -> "BlockMask":
    """Return the mask in which query q attends to key k if labels are equal and `position <= reach`.

    Args:
        queries: label and reach of every query.
        keys: label and position of every key.
    """
    from torch.nn.attention.flex_attention import BlockMask

    lengths = (queries.shape[2], keys.shape[2])
    queries, keys = _padded(queries), _padded(keys)
    keys[1, :, lengths[1] :] = torch.iinfo(keys.dtype).max  # beyond the reach of all queries
    # Flex attention skips blocks that are in neither list, and evaluates the rule only in partial ones.
    some, full = touched(queries, keys)
    partial = some & ~full
    many = int(queries.shape[1] > 1)  # one row may serve the whole batch
    return BlockMask.from_kv_blocks(
        *_block_lists(partial),
        *_block_lists(full),
        SIZE,
        lambda b, h, q, k: (
            (queries[0, b * many, q] == keys[0, b * many, k])
            & (keys[1, b * many, k] <= queries[1, b * many, q])
        ),
        lengths,
    )


def touched(
    queries: Int[Tensor, "2 b n"], keys: Int[Tensor, "2 b m"]
) -> tuple[Bool[Tensor, "b i j"], Bool[Tensor, "b i j"]]:
    """Return which pairs of blocks may contain visible pairs, and which contain only visible pairs.

    The first is a superset if documents of different blocks interleave.
    """
    stride = keys[1].max().long() + 1
    # Unique over documents: position and reach in the concatenation of all documents.
    reach = queries[0].long() * stride + queries[1]
    position = keys[0].long() * stride + keys[1]

    # Intervals of labels and positions per block of 128, `[b, i]` for queries and `[b, j]` for keys.
    low_query, high_query = _range(queries[0])
    low_key, high_key = _range(keys[0])
    low_reach, high_reach = _range(reach)
    low_position, high_position = _range(position)

    # Blocks whose intervals miss each other have no visible pair.
    same = (low_query[..., None] <= high_key[:, None]) & (low_key[:, None] <= high_query[..., None])
    some = same & (low_position[:, None] <= high_reach[..., None])

    # Both blocks lie in one and the same document, and even the lowest reach covers the highest position.
    one_document = (low_query == high_query)[..., None] & (low_key == high_key)[:, None]
    one_document &= low_query[..., None] == low_key[:, None]
    return some, one_document & (high_position[:, None] <= low_reach[..., None])


def _range(x: Int[Tensor, "b n"]) -> tuple[Int[Tensor, "b i"], Int[Tensor, "b i"]]:
    """Return the lowest and highest values of every block."""
    return x.unflatten(1, (-1, SIZE)).amin(dim=2), x.unflatten(1, (-1, SIZE)).amax(dim=2)


def _padded(tokens: Int[Tensor, "2 b n"]) -> Int[Tensor, "2 b m"]:
    """Pad to whole blocks by repeating the last token."""
    missing = -tokens.shape[2] % SIZE
    return torch.cat([tokens, tokens[:, :, -1:].expand(-1, -1, missing)], dim=2)


def _block_lists(pairs: Bool[Tensor, "b i j"]) -> tuple[Int[Tensor, "b 1 i"], Int[Tensor, "b 1 i j"]]:
    """Return the number of key blocks of every query block, and their indices, padded with the others."""
    count = pairs.sum(dim=2, dtype=torch.int32)
    # A stable sort of the complement moves the wanted blocks to the front and keeps their order.
    which = (~pairs).to(torch.int8).argsort(dim=2, stable=True).to(torch.int32)
    return count[:, None], which[:, None]
