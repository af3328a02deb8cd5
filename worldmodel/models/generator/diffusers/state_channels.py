"""State channels: the predicted state enters a pretrained transformer on its own cells.

A second patch embedding, which begins as zeros, reads the forecast and the features of the state's cells. Its
output is added to that of the transformer's own, so at first nothing changes, and the modules, weight names
and LoRA of the transformer stay those of diffusers.

A place of their own makes the difference: states that only enter by cross-attention have to teach every block
where they belong.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.models.loading import deferred

Add = Callable[[Tensor, Float[Tensor, "b n d"]], Tensor]
"""Adds tokens, in the order frame, row, column, to what a transformer's patch embedding returns."""


class StateChannels(nn.Module):
    """A linear layer over patches of the state, without a bias."""

    def __init__(self, embedding: nn.Module, channels: int, patch: tuple[int, int, int], width: int) -> None:
        """Build a layer of zeros.

        Args:
            embedding: Patch embedding of the transformer, whose output is added to.
            channels: Channels of a latent cell of the state.
            patch: Latent frames, rows and columns of a patch.
            width: Width of the transformer.
        """
        super().__init__()
        self._embedding = (embedding,)  # a tuple, so that it is not registered: the transformer owns it
        self.patch = patch
        self.project = nn.Linear(channels * patch[0] * patch[1] * patch[2], width, bias=False)
        nn.init.zeros_(self.project.weight)

    @contextmanager
    def given(self, state: Float[Tensor, "b t c h w"], add: Add) -> Iterator[None]:
        """Add a state to the patches of the transformer's calls within the block."""
        frames, rows, columns = self.patch
        patches = rearrange(
            state,
            "b (t f) c (h p) (w q) -> b (t h w) (f p q c)",
            f=frames,
            p=rows,
            q=columns,
        )
        tokens = self.project(patches.to(self.project.weight.dtype))

        def join(embedding: nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
            return add(embedded, tokens.to(embedded.dtype))

        (embedding,) = self._embedding
        # Before other hooks, which may divide the tokens over processes.
        handle = embedding.register_forward_hook(join, prepend=True)
        try:
            yield
        finally:
            handle.remove()

    def defer(self, transformer: nn.Module) -> None:
        """Make the zeros when the weights of the transformer are loaded, if those are deferred."""
        if deferred.attached(transformer) is not None:
            self.project.to(device="meta")
            deferred.attach(self, {"project.weight": deferred.Zeros()})


def as_channels(
    frames: int, forecast: Float[Tensor, "b t c h w"], cells: Float[Tensor, "b m d"]
) -> Float[Tensor, "b n k h w"]:
    """Return what the layer reads of a clip: zeros for context frames, then forecast and features.

    `cells` has the features of all frames of each latent cell, in row-major order.
    """
    shared = rearrange(cells, "b (h w) (t k) -> b t k h w", h=forecast.shape[3], t=forecast.shape[1])
    state = torch.cat([forecast, shared.to(forecast)], dim=2)
    context = state.new_zeros(len(state), frames - state.shape[1], *state.shape[2:])
    return torch.cat([context, state], dim=1)
