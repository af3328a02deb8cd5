"""Chunk-causal self-attention for Wan: a frame attends to frames of its own and of earlier chunks.

Either all chunks pass the transformer together, in blocks, or later ones continue from the keys and values of
earlier ones; the numbers are the same.

Source: PAN (arXiv:2511.09057): a chunk must not depend on later actions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from worldmodel.models.layers.attention import attend
from worldmodel.models.layers.spatial import KeyValue
from worldmodel.parallel.layout import Layout


@dataclass
class CausalAttention:
    """Inputs and outputs of the self-attention of one pass."""

    blocks: Int[Tensor, " t"] | None = None
    """Frames attend to frames whose number is not above their own."""
    past: tuple[KeyValue, ...] = ()
    """Keys and values of earlier frames, one pair per transformer block."""
    present: list[KeyValue] | None = None
    """An empty list is filled with the keys and values of the frames of this pass."""


class _Rotary(tuple):
    """Wan's rotary table (cosines, sines) with the attention's inputs attached.

    The table reaches every self-attention as an argument, also where activations are recomputed.
    """

    attention: CausalAttention
    layout: Layout | None


@contextmanager
def causal_attention(transformer: nn.Module, attention: CausalAttention | None) -> Iterator[None]:
    """Run the transformer's self-attention through `models.layers.attention` inside; None changes nothing."""
    if attention is None:
        yield
        return

    def mark(rope: nn.Module, inputs: tuple[Tensor], table: tuple[Tensor, Tensor]) -> _Rotary:
        x, tokens = inputs[0], table[0].shape[1]
        cells = tokens // x.shape[2]
        if attention.past:  # frames are numbered from the first cached one
            earlier = attention.past[0][0].shape[2] // cells
            whole = rope.forward(x.new_empty(1, 1, earlier + x.shape[2], *x.shape[3:]))
            table = (whole[0][:, -tokens:], whole[1][:, -tokens:])
        marked = _Rotary(table)
        marked.attention = attention
        marked.layout = None if attention.blocks is None else Layout.frames(attention.blocks, cells)
        return marked

    blocks: Any = transformer.blocks
    for index, block in enumerate(blocks):
        if not isinstance(block.attn1.processor, _Processor):
            block.attn1.set_processor(_Processor(block.attn1.processor, index))
    if attention.present is not None:
        attention.present[:] = [(torch.empty(0), torch.empty(0))] * len(blocks)
    rope: Any = transformer.rope
    hook = rope.register_forward_hook(mark)
    try:
        yield
    finally:
        hook.remove()


class _Processor:
    """Attention processor: ours where the rotary table carries inputs, else the transformer's own."""

    def __init__(self, own: Any, index: int) -> None:
        self.own, self.index = own, index

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        if not isinstance(rotary_emb, _Rotary):
            return self.own(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        attention = rotary_emb.attention
        query, key = (
            _rotate(norm(linear(hidden_states)).unflatten(2, (attn.heads, -1)), rotary_emb).transpose(1, 2)
            for norm, linear in ((attn.norm_q, attn.to_q), (attn.norm_k, attn.to_k))
        )
        value = attn.to_v(hidden_states).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        if attention.present:  # None by the time that activations are recomputed
            attention.present[self.index] = (key, value)
        if attention.past:
            earlier = attention.past[self.index]
            key, value = torch.cat([earlier[0], key], dim=2), torch.cat([earlier[1], value], dim=2)
        out = attend(query, key, value, rotary_emb.layout).transpose(1, 2).flatten(2, 3).type_as(query)
        return attn.to_out[1](attn.to_out[0](out))


def _rotate(x: Tensor, rotary: tuple[Tensor, ...]) -> Tensor:
    """Turn neighbouring pairs of the last axis of `[b n k d]` by the table's angles."""
    cos, sin = rotary[0][..., 0::2], rotary[1][..., 1::2]
    first, second = x[..., 0::2], x[..., 1::2]
    return (
        torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2).type_as(x)
    )
