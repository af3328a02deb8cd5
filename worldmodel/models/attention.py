"""The one attention function; the generator and every transformers backbone call it."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "worldmodel"
"""Name under which transformers models find this attention (`attn_implementation`)."""


def attend(
    query: Float[Tensor, "b k n d"],
    key: Float[Tensor, "b g m d"],
    value: Float[Tensor, "b g m d"],
    mask: Bool[Tensor, "n m"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "b k n d"]:
    """Scaled dot-product attention; `mask` is True where a query may look.

    `g` key heads may serve `k` query heads, `k / g` neighbours each (Ainslie et al. 2023, arXiv:2305.13245).
    """
    batch, heads, length, width = query.shape
    shared = heads // key.shape[1]
    if shared > 1:  # queries of one key head become one long query: nothing is copied
        query = query.reshape(batch, key.shape[1], shared * length, width)
        mask = mask if mask is None else mask.repeat(shared, 1)
    if query.device.type == "cpu" and query.dtype == torch.bfloat16:
        out = _attend_plainly(query, key, value, mask, scale or width**-0.5)
    else:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, length, width)


def _attend_plainly(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attend by plain products: the fused CPU kernel computes bf16 in fp32 and is slower with gradients."""
    bias = query.new_zeros(1, 1)
    if mask is not None:
        bias = query.new_zeros(mask.shape).masked_fill(~mask, float("-inf"))
    query, key_t = query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)
    scores = torch.baddbmm(bias, query, key_t, alpha=scale)
    return (scores.softmax(dim=-1, dtype=query.dtype) @ value.flatten(0, 1)).unflatten(0, value.shape[:2])


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Bool[Tensor, "n m"] | None:
    """Return who sees whom when the queries are the last positions of the keys; None if everyone does."""
    if num_queries == 1:
        return None
    positions = torch.arange(num_keys, device=device)
    return positions[None, :] <= positions[num_keys - num_queries :, None]


def _backbone_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    query, key = query.to(value.dtype), key.to(value.dtype)  # norms and rotary may have left autocast's dtype
    mask = causal_mask(query.shape[2], key.shape[2], query.device)
    return attend(query, key, value, mask, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _backbone_attention)
# Sequences here are never padded in front, so causality follows from the two lengths alone.
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
