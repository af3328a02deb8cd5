"""The generator adapter: predicted states become what the generator is conditioned on."""

from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.config import ConditionConfig
from worldmodel.models.codec import residual_blocks
from worldmodel.models.norm import RMSNorm


@dataclass(frozen=True)
class Condition:
    """What the generator knows about the clip it makes."""

    tokens: Float[Tensor, "b n d"]
    """Attended to."""
    pooled: Float[Tensor, "b d"]
    """Modulates every layer."""
    cells: Float[Tensor, "b n d"]
    """Added to the latent cell of the same place."""
    forecast: Float[Tensor, "b t c h w"]
    """The next observation's latents as regressed from the states: where denoising starts from."""


class GeneratorAdapter(nn.Module):
    """Reads the states on their grid: a convolutional head forecasts latents, a projection makes tokens.

    The forecast is a residual to the last seen frame. It is trained first, with no generator in the loop
    ("state alignment"); the generator then only adds what a regression cannot say.
    """

    def __init__(
        self,
        config: ConditionConfig,
        state_width: int,
        latent_channels: int,
        chunk_latents: int,
        grid: int,
        width: int,
    ) -> None:
        super().__init__()
        self.grid, self.chunk_latents = grid, chunk_latents
        self.norm = RMSNorm(state_width)
        self.from_state = nn.Linear(state_width, config.width)
        self.from_context = nn.Conv2d(latent_channels, config.width, 3, padding=1)
        self.blocks = residual_blocks(config.width, config.num_blocks)
        self.to_latents = nn.Conv2d(config.width, chunk_latents * latent_channels, 1)
        self.to_tokens = nn.Linear(state_width, width)
        self.to_cells = nn.Linear(config.width, width)
        self.to_pooled = nn.Linear(state_width, width)
        self.null_token = nn.Parameter(torch.randn(1, width) * 0.02)
        nn.init.zeros_(self.to_latents.weight)

    def forward(self, states: Float[Tensor, "b n s"], context: Float[Tensor, "b c h w"]) -> Condition:
        """Turn states (one per latent cell) and the last seen latent frame into a condition."""
        states = self.norm(states)
        grid = rearrange(self.from_state(states), "b (h w) d -> b d h w", h=self.grid)
        features = self.blocks(
            (grid + self.from_context(context)).contiguous(memory_format=torch.channels_last)
        )
        change = rearrange(self.to_latents(features), "b (t c) h w -> b t c h w", t=self.chunk_latents)
        return Condition(
            tokens=self.to_tokens(states),
            pooled=self.to_pooled(states.mean(dim=1)),
            cells=self.to_cells(rearrange(features, "b d h w -> b (h w) d")),
            forecast=context[:, None] + change.float(),
        )

    def null(self, context: Float[Tensor, "b c h w"]) -> Condition:
        """Return the condition that says nothing: the forecast repeats the last seen frame."""
        batch = context.shape[0]
        tokens = self.null_token.expand(batch, self.grid**2, -1)
        return Condition(
            tokens=tokens,
            pooled=torch.zeros_like(tokens[:, 0]),
            cells=torch.zeros_like(tokens),
            forecast=repeat(context, "b c h w -> b t c h w", t=self.chunk_latents),
        )


def choose(keep: Tensor, first: Condition, second: Condition) -> Condition:
    """Take each sample's condition from `first` where `keep` is True, else from `second`."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(keep.view(-1, *[1] * (a.dim() - 1)), a, b.to(a.dtype))

    return Condition(
        tokens=pick(first.tokens, second.tokens),
        pooled=pick(first.pooled, second.pooled),
        cells=pick(first.cells, second.cells),
        forecast=pick(first.forecast, second.forecast),
    )
