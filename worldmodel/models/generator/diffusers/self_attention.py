"""Self-attention of the transformers of diffusers through `models.layers.attention`.

It is used where their own cannot do what a pass needs: chunks in blocks (a frame attends to frames of its own
and of earlier chunks), continuation from the keys and values of earlier frames, and sequences that processes
share. Other passes run the transformer's own attention.

Source: PAN (arXiv:2511.09057) for blocks: a chunk must not depend on later actions.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from worldmodel.models.layers.attention import KeyValue, attend_cached
from worldmodel.parallel.layout import Layout


@dataclass
class TokenAttention:
    """Inputs and outputs of the self-attention of one pass."""

    layout: Layout
    """Mask of the tokens, and their division over processes."""
    past: tuple[KeyValue, ...] = ()
    """Keys and values of earlier tokens, one pair per transformer block."""
    present: list[KeyValue] | None = None
    """A list is filled with the keys and values of the tokens of this pass, one pair per block."""


class Rotary(tuple[Tensor, ...]):
    """A rotary table (cosines, sines) with the attention's inputs attached.

    The table reaches every self-attention as an argument, also where activations are recomputed.
    """

    attention: TokenAttention

    @classmethod
    def of(cls, table: Iterable[Tensor], attention: TokenAttention) -> "Rotary":
        """Return the table of this process's tokens with the inputs of their attention."""
        marked = cls(table)
        marked.attention = attention
        return marked


class Processor(ABC):
    """Attention processor: ours where the rotary table carries inputs, else the transformer's own."""

    def __init__(self, own: Any, index: int) -> None:
        self.own, self.index = own, index

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        if not isinstance(image_rotary_emb, Rotary):
            return self.own(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        return self.run(attn, hidden_states, encoder_hidden_states, image_rotary_emb)

    def run(self, attn: Any, x: Tensor, text: Tensor | None, rotary: Rotary) -> Any:
        """Return the output for a pass of ours; `text` is None where only the video attends to itself."""
        return self.attend(attn, self.project(attn, x, rotary), rotary)

    @abstractmethod
    def project(self, attn: Any, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values `[b, k, n, d]` of tokens, with norms and rotary positions."""

    def attend(self, attn: Any, parts: tuple[Tensor, Tensor, Tensor], rotary: Rotary) -> Tensor:
        """Return the output of the attention, projected."""
        attention, (query, key, value) = rotary.attention, parts
        # Under autocast norms return fp32, and flex attention accepts one dtype only.
        query, key = query.to(value.dtype), key.to(value.dtype)
        past = attention.past[self.index] if attention.past else None
        out, present = attend_cached(query, key, value, attention.layout, past)
        if attention.present:  # None by the time that activations are recomputed
            attention.present[self.index] = present
        return attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2, 3)))


def install(blocks: Iterable[Any], processor: type[Processor]) -> None:
    """Put `processor` in front of the own processor of every block's self-attention."""
    for index, block in enumerate(blocks):
        block.attn1.set_processor(processor(block.attn1.processor, index))


@contextmanager
def forward_hooks(*hooks: tuple[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Call a hook after the forward of each module, within the block."""
    with ExitStack() as stack:
        for module, hook in hooks:
            stack.callback(module.register_forward_hook(hook).remove)
        yield


def rotate_pairs(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn neighbouring pairs of the last axis by angles of which each pair has one."""
    first, second = x[..., 0::2], x[..., 1::2]
    turned = [first * cosines - second * sines, first * sines + second * cosines]
    return torch.stack(turned, dim=-1).flatten(-2).type_as(x)
