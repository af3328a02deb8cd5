"""Vision adapters: an observation becomes backbone tokens, and per-cell features where it is on a grid."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.config import VisionConfig
from worldmodel.models.codec.autoencoder import residual_blocks
from worldmodel.models.layers.norm import RMSNorm


@dataclass(frozen=True)
class Observation:
    """What is seen: latents of the codec, and pixels in [-1, 1] for an encoder that looks at those."""

    latents: Float[Tensor, "b t c h w"]
    frames: Float[Tensor, "b f 3 H W"] | None = None

    @classmethod
    def stack(cls, observations: "list[Observation]") -> "Observation":
        """Put observations of one shape into a batch."""
        frames = [each.frames for each in observations if each.frames is not None]
        latents = torch.cat([each.latents for each in observations])
        return cls(latents, torch.cat(frames) if frames else None)

    def unstack(self) -> "list[Observation]":
        """Take a batch apart into observations of a batch of one."""
        frames = [None] * len(self.latents) if self.frames is None else self.frames.split(1)
        return [Observation(*row) for row in zip(self.latents.split(1), frames, strict=True)]

    @property
    def shape(self) -> tuple[int, int]:
        """Latent frames and frames: observations for which both agree can be stacked."""
        return self.latents.shape[1], 0 if self.frames is None else self.frames.shape[1]


@dataclass(frozen=True)
class Vision:
    """An observation as the backbone sees it."""

    tokens: Float[Tensor, "b n d"]
    """What enters the sequence, frame after frame."""
    cells: Float[Tensor, "b t m d"] | None = None
    """One feature per latent cell; the query of a cell carries its feature."""


class VisionAdapter(nn.Module, ABC):
    """Turns an observation into tokens of the backbone's width."""

    needs_frames: bool
    """Whether it looks at pixels; else at latents."""
    round_tokens: int
    """Tokens of what is seen at the start of a round."""

    @abstractmethod
    def forward(self, observation: Observation) -> Vision:
        """Return the tokens of an observation."""

    def select_frames(self, frames: Float[Tensor, "b t 3 h w"]) -> Float[Tensor, "b f 3 h w"] | None:
        """Return the frames of a clip that the adapter encodes; None where it encodes latents."""
        return None


class LatentVision(VisionAdapter):
    """3x3 convolutions over the latent grid, so that a cell knows its surroundings, then a projection.

    `merge` x `merge` cells share a token. The backbone stays a plain causal language model; space is the
    adapters' business.
    """

    needs_frames = False

    def __init__(
        self,
        config: VisionConfig,
        latent_channels: int,
        grid: tuple[int, int],
        width: int,
        context_latents: int = 1,
    ) -> None:
        super().__init__()
        self.config = config
        frame_tokens = math.prod(grid) // config.merge**2
        self.round_tokens = context_latents * frame_tokens
        self.stem = nn.Conv2d(latent_channels, config.width, 3, padding=1)
        self.blocks = residual_blocks(config.width, config.num_blocks)
        self.project = nn.Conv2d(config.width, width, 1)
        self.cell_norm = RMSNorm(width)
        self.merge = nn.Linear(config.merge**2 * width, width, bias=False)
        self.token_norm = RMSNorm(width)
        self.token_position = nn.Parameter(torch.randn(frame_tokens, width) * 0.3 * width**-0.5)
        self.frame_position = nn.Parameter(torch.randn(config.max_frames, 1, width) * 0.3 * width**-0.5)
        with torch.no_grad():
            self.merge.weight.copy_(torch.eye(width).repeat(1, config.merge**2) / config.merge)
            for norm in (self.cell_norm, self.token_norm):
                norm.weight.fill_(2 * width**-0.5)  # twice the scale of word embeddings

    def forward(self, observation: Observation) -> Vision:
        """Return tokens `[b, t * (h / merge) * (w / merge), d]` and cells `[b, t, h * w, d]`."""
        latents = observation.latents
        batch, frames = latents.shape[:2]
        x = rearrange(latents, "b t c h w -> (b t) c h w").contiguous(memory_format=torch.channels_last)
        x = self.project(self.blocks(self.stem(x)))
        cells = self.cell_norm(rearrange(x, "(b t) d h w -> b t h w d", b=batch))
        side = self.config.merge
        patches = rearrange(cells, "b t (h p) (w q) d -> b t (h w) (p q d)", p=side, q=side)
        tokens = self.token_norm(self.merge(patches)) + self.token_position + self.frame_position[-frames:]
        return Vision(rearrange(tokens, "b t n d -> b (t n) d"), rearrange(cells, "b t h w d -> b t (h w) d"))
