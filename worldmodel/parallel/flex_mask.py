"""The mask of flex attention, straight from what tokens are.

Building it by asking the mask for every pair would need the matrix that it is there to avoid.
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Int
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

SIZE = 128
"""Tokens of a block, as flex attention's kernels skip them."""


def block_mask(queries: Int[Tensor, "2 b n"], keys: Int[Tensor, "2 b m"]) -> "BlockMask":
    """Return the mask under which query q sees key k where labels are equal and `position <= reach`.

    Args:
        queries: label and reach of every query.
        keys: label and position of every key.
    """
    from torch.nn.attention.flex_attention import BlockMask

    lengths = (queries.shape[2], keys.shape[2])
    queries, keys = _filled(queries), _filled(keys)
    keys[1, :, lengths[1] :] = torch.iinfo(keys.dtype).max  # nobody reaches that far
    some, full = touched(queries, keys)
    partial = some & ~full
    many = int(queries.shape[1] > 1)  # one row may serve all
    return BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(full),
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
    """Return which pairs of blocks may hold a visible pair, and which hold nothing else.

    The first may name a pair too many, where documents of different blocks interleave, and never one too few.
    """
    stride = keys[1].max().long() + 1
    reach, place = (label.long() * stride + last for label, last in (queries, keys))  # documents in a row
    low_q, high_q, low_k, high_k = (*_range(queries[0]), *_range(keys[0]))
    low_reach, high_reach, low_place, high_place = (*_range(reach), *_range(place))
    some = (low_q[..., None] <= high_k[:, None]) & (low_k[:, None] <= high_q[..., None])
    some &= low_place[:, None] <= high_reach[..., None]
    one = (low_q == high_q)[..., None] & (low_k == high_k)[:, None] & (low_q[..., None] == low_k[:, None])
    return some, one & (high_place[:, None] <= low_reach[..., None])


def _range(x: Int[Tensor, "b n"]) -> tuple[Int[Tensor, "b i"], Int[Tensor, "b i"]]:
    """Return lowest and highest values in every block."""
    return x.unflatten(1, (-1, SIZE)).amin(dim=2), x.unflatten(1, (-1, SIZE)).amax(dim=2)


def _filled(tokens: Int[Tensor, "2 b n"]) -> Int[Tensor, "2 b m"]:
    """Repeat the last token up to whole blocks."""
    missing = -tokens.shape[2] % SIZE
    return torch.cat([tokens, tokens[:, :, -1:].expand(-1, -1, missing)], dim=2)


def _listed(pairs: Bool[Tensor, "b i j"]) -> tuple[Int[Tensor, "b 1 i"], Int[Tensor, "b 1 i j"]]:
    """Return how many key blocks every query block has, and which come first."""
    count = pairs.sum(dim=2, dtype=torch.int32)
    which = (~pairs).to(torch.int8).argsort(dim=2, stable=True).to(torch.int32)
    return count[:, None], which[:, None]
