"""The state stream: a cross-attention to predicted states, added to every block of a pretrained transformer.

Its output layers are initialised to zero, so at first it changes nothing. The modules, weight names and files
of the transformer stay the same; the weights of the stream are in a file of their own.

Source: PAN (arXiv:2511.09057), sec. 3.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.models.loading import deferred


class Branch(nn.Module):
    """One block's attention to the states."""

    def __init__(self, attention: nn.Module, width: int) -> None:
        super().__init__()
        self.attention = attention
        self.out = nn.Linear(width, width)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Float[Tensor, "b n d"], states: Float[Tensor, "b m d"]) -> Float[Tensor, "b n d"]:
        return self.out(self.attention(x, encoder_hidden_states=states))


class StateStream(nn.Module):
    """The cross-attentions of all blocks of a transformer to the states."""

    def __init__(self, branches: Sequence[Branch]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def run(self, transformer: nn.Module, states: Float[Tensor, "b m d"], **inputs: Any) -> Tensor:
        """Call the transformer with states for its blocks."""
        raise NotImplementedError

    def defer(self, transformer: nn.Module) -> None:
        """Defer loading the weights that are copies of a transformer's, if those are deferred."""


class CopiedStream(StateStream):
    """Branches that start as copies of each block's own cross-attention to the text.

    States are appended to the embedded text and pass through the blocks in the same tensor, so that a block
    that is recomputed (activation checkpointing) gets them again.
    """

    def __init__(self, attentions: Sequence[nn.Module], text_embedder: nn.Module, width: int) -> None:
        """Add a branch to each of `attentions`; states are appended to the output of `text_embedder`."""
        super().__init__([Branch(_copied(each), width) for each in attentions])
        self.requires_grad_(True)
        self.num_states = 0
        self._states: Tensor | None = None
        for attention, branch in zip(attentions, self.branches, strict=True):
            assert isinstance(branch, Branch)
            attention.set_processor(_BesideText(attention.processor, branch, self))  # type: ignore[operator]
        text_embedder.register_forward_hook(self._join)

    def run(self, transformer: nn.Module, states: Float[Tensor, "b m d"], **inputs: Any) -> Tensor:
        """Call the transformer with states for its blocks."""
        self.num_states = states.shape[1]
        with self._given(states):
            return transformer(**inputs, return_dict=False)[0]

    def defer(self, transformer: nn.Module) -> None:
        slices, found = deferred.attached(transformer), dict[str, Any]()
        if slices is None:
            return
        branches = list(self.branches)
        for name, attention in transformer.named_modules():
            processor = getattr(attention, "processor", None)
            if isinstance(processor, _BesideText) and processor.stream is self:
                branch, prefix = processor.branch, f"branches.{branches.index(processor.branch)}"
                for weight, _ in branch.attention.named_parameters():
                    found[f"{prefix}.attention.{weight}"] = slices[f"{name}.{weight}"]
                branch.out.to(device="meta")
                found |= {f"{prefix}.out.{weight}": deferred.Zeros() for weight in ("weight", "bias")}
        deferred.attach(self, found, deferred.attached_files(transformer))

    @contextmanager
    def _given(self, states: Tensor) -> Iterator[None]:
        self._states = states
        try:
            yield
        finally:
            self._states = None

    def _join(self, module: nn.Module, inputs: Any, text: Tensor) -> Tensor:
        assert self._states is not None, "a transformer with a stream is called by StateStream.run"
        return torch.cat([text, self._states.to(text)], dim=1)


class _BesideText:
    """Attention processor: the block's own over the text, plus the branch over the states."""

    def __init__(self, own: Any, branch: Branch, stream: CopiedStream) -> None:
        self.own, self.branch, self.stream = own, branch, stream

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary: Any = None,
    ) -> Tensor:
        count = self.stream.num_states
        text, states = encoder_hidden_states[:, :-count].contiguous(), encoder_hidden_states[:, -count:]
        return self.own(attn, hidden_states, text, attention_mask, rotary) + self.branch(
            hidden_states, states
        )


class FreshStream(StateStream):
    """Branches with new weights, for blocks in which text and video share one attention.

    A branch has the same input as the attention of its block, and its output passes the same gate.
    """

    def __init__(self, attentions: Sequence[Attention], width: int) -> None:
        """Add a branch to each of `attentions`."""
        super().__init__([Branch(_cross_attention(each, width), width) for each in attentions])
        for attention, branch in zip(attentions, self.branches, strict=True):
            attention.set_processor(_BesideJoint(attention.processor, branch))  # type: ignore[arg-type]

    def run(self, transformer: nn.Module, states: Float[Tensor, "b m d"], **inputs: Any) -> Tensor:
        """Call the transformer with states for its blocks."""
        return transformer(**inputs, attention_kwargs={"states": states}, return_dict=False)[0]


class _BesideJoint:
    """Attention processor: the block's own over text and video, plus the branch, for the video only."""

    def __init__(self, own: Any, branch: nn.Module) -> None:
        self.own, self.branch = own, branch

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
        states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert states is not None, "a transformer with a stream is called by StateStream.run"
        video, text = self.own(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        return video + self.branch(hidden_states, states), text


def _copied(attention: nn.Module) -> nn.Module:
    """Copy a cross-attention to the text, without the image projections that some of Wan's have."""
    made = copy.deepcopy(attention)
    for name in ("add_k_proj", "add_v_proj", "norm_added_k"):
        if getattr(made, name, None) is not None:
            setattr(made, name, None)
    return made


def _cross_attention(attention: Attention, width: int) -> Attention:
    """Return a new cross-attention to states, with as many heads as `attention`."""
    return Attention(
        query_dim=width,
        cross_attention_dim=width,
        heads=attention.heads,
        dim_head=width // attention.heads,
        bias=attention.to_q.bias is not None,
        qk_norm="layer_norm" if attention.norm_q is not None else None,
        eps=1e-6,
    )
