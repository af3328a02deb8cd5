"""Tensor parallelism of the blocks of diffusers' transformers."""

from typing import Any

from diffusers.models.attention import FeedForward
from torch import nn

from worldmodel.parallel.tensor_parallel import DividedRMSNorm, Part, keep_inputs, keep_outputs


def divide_block(block: nn.Module, part: Part) -> None:
    """Keep the heads of every attention of a block and the hidden channels of its feed-forward, in place.

    Raises:
        ConfigError: heads or channels cannot be divided evenly.
    """
    for child in block.children():
        if isinstance(child, FeedForward):
            _divide_feed_forward(child, part)
        elif hasattr(child, "to_q"):
            divide_attention(child, part)


def divide_attention(attention: Any, part: Part) -> None:
    """Keep the heads of a part, in place.

    Raises:
        ConfigError: the heads cannot be divided evenly.
    """
    width, heads = attention.to_out[0].weight.shape[1], attention.heads
    attention.heads = part.share(heads, "attention heads")
    for name in ("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj"):
        if getattr(attention, name, None) is not None:
            keep_outputs(getattr(attention, name), part)
    for name in ("norm_q", "norm_k", "norm_added_k"):
        norm = getattr(attention, name, None)
        if isinstance(norm, nn.RMSNorm) and norm.normalized_shape == (width,):  # others are head by head
            setattr(attention, name, DividedRMSNorm(norm, part))
    keep_inputs(attention.to_out[0], part)


def _divide_feed_forward(feed_forward: Any, part: Part) -> None:
    first, last = feed_forward.net[0].proj, feed_forward.net[2]
    hidden = last.weight.shape[1]
    keep_outputs(first, part, groups=first.weight.shape[0] // hidden)  # two where one half is a gate
    keep_inputs(last, part)
