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
    reach, position = (label.long() * stride + last for label, last in (queries, keys))
    low_q, high_q, low_k, high_k = (*_range(queries[0]), *_range(keys[0]))
    low_reach, high_reach, low_position, high_position = (*_range(reach), *_range(position))
    some = (low_q[..., None] <= high_k[:, None]) & (low_k[:, None] <= high_q[..., None])
    some &= low_position[:, None] <= high_reach[..., None]
    one = (low_q == high_q)[..., None] & (low_k == high_k)[:, None] & (low_q[..., None] == low_k[:, None])
    return some, one & (high_position[:, None] <= low_reach[..., None])


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
    which = (~pairs).to(torch.int8).argsort(dim=2, stable=True).to(torch.int32)
    return count[:, None], which[:, None]
