"""The vision adapter: latents of an observation become backbone tokens and per-cell features."""

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.config import VisionConfig
from worldmodel.models.codec import residual_blocks
from worldmodel.models.norm import RMSNorm


@dataclass(frozen=True)
class Vision:
    """An observation as the backbone sees it."""

    tokens: Float[Tensor, "b n d"]
    """What enters the sequence: `merge` x `merge` cells a token, frame after frame."""
    cells: Float[Tensor, "b t m d"]
    """One feature per latent cell; the query of a cell carries its feature."""


class VisionAdapter(nn.Module):
    """3x3 convolutions over the latent grid, so that a cell knows its surroundings, then a projection.

    The backbone stays a plain causal language model; space is the adapters' business.
    """

    def __init__(self, config: VisionConfig, latent_channels: int, grid: int, width: int) -> None:
        super().__init__()
        self.config, self.grid = config, grid
        self.stem = nn.Conv2d(latent_channels, config.width, 3, padding=1)
        self.blocks = residual_blocks(config.width, config.num_blocks)
        self.project = nn.Conv2d(config.width, width, 1)
        self.cell_norm = RMSNorm(width)
        self.merge = nn.Linear(config.merge**2 * width, width, bias=False)
        self.token_norm = RMSNorm(width)
        self.token_position = nn.Parameter(
            torch.randn((grid // config.merge) ** 2, width) * 0.3 * width**-0.5
        )
        self.frame_position = nn.Parameter(torch.randn(config.max_frames, 1, width) * 0.3 * width**-0.5)
        with torch.no_grad():
            self.merge.weight.copy_(torch.eye(width).repeat(1, config.merge**2) / config.merge)
            for norm in (self.cell_norm, self.token_norm):
                norm.weight.fill_(2 * width**-0.5)  # twice the scale of word embeddings

    def forward(self, latents: Float[Tensor, "b t c h w"]) -> Vision:
        """Return tokens `[b, t * (h / merge) * (w / merge), d]` and cells `[b, t, h * w, d]`."""
        batch, frames = latents.shape[:2]
        x = rearrange(latents, "b t c h w -> (b t) c h w").contiguous(memory_format=torch.channels_last)
        x = self.project(self.blocks(self.stem(x)))
        cells = self.cell_norm(rearrange(x, "(b t) d h w -> b t h w d", b=batch))
        side = self.config.merge
        patches = rearrange(cells, "b t (h p) (w q) d -> b t (h w) (p q d)", p=side, q=side)
        tokens = self.token_norm(self.merge(patches)) + self.token_position + self.frame_position[-frames:]
        return Vision(rearrange(tokens, "b t n d -> b (t n) d"), rearrange(cells, "b t h w d -> b t (h w) d"))
