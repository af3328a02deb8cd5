"""Vision adapters: observations to backbone tokens, and to per-cell features if they are on a grid."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.config import VisionConfig, WorldModelConfig
from worldmodel.models.codec.autoencoder import residual_blocks
from worldmodel.models.layers.norm import RMSNorm
from worldmodel.models.layers.spatial import resample_rows
from worldmodel.parallel.mesh import SequenceGroup


@dataclass(frozen=True)
class Observation:
    """Latents of the codec, and pixels in [-1, 1] for vision encoders that need them."""

    latents: Float[Tensor, "b t c h w"]
    frames: Float[Tensor, "b f 3 H W"] | None = None
    before: tuple[Float[Tensor, "_ d"], ...] = ()
    """Embeddings of the rounds before it, per row, for texts that are about these, too; empty without."""

    @classmethod
    def stack(cls, observations: "list[Observation]") -> "Observation":
        """Concatenate observations of equal shape into a batch."""
        frames = [each.frames for each in observations if each.frames is not None]
        latents = torch.cat([each.latents for each in observations])
        return cls(latents, torch.cat(frames) if frames else None)

    def unstack(self) -> "list[Observation]":
        """Split into observations with a batch of one."""
        frames = [None] * len(self.latents) if self.frames is None else self.frames.split(1)
        before = [(row,) for row in self.before] or [()] * len(self.latents)
        return [Observation(*row) for row in zip(self.latents.split(1), frames, before, strict=True)]

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of latent frames and of frames; observations can be stacked if both agree."""
        return self.latents.shape[1], 0 if self.frames is None else self.frames.shape[1]


@dataclass(frozen=True)
class VisionFeatures:
    """Features of an observation."""

    tokens: Float[Tensor, "b n d"]
    """Tokens of the sequence, frame by frame."""
    cells: Float[Tensor, "b t m d"] | None = None
    """One feature per latent cell."""
    queries: Float[Tensor, "b q d"] | None = None
    """Features of the queries' cells in the newest latent frame, which are added to the queries."""


@dataclass(frozen=True)
class EncodedObservation:
    """An observation as the backbone reads it in a round."""

    tokens: Float[Tensor, "b n d"]
    """Tokens of the sequence, frame by frame."""
    queries: Float[Tensor, "b q d"]
    """Embeddings that end the round, at whose positions the backbone predicts the next state."""
    cells: Float[Tensor, "b t m d"] | None = None
    """One feature per latent cell; the newest frame's are in the queries."""


class VisionAdapter(nn.Module, ABC):
    """Maps an observation to tokens of the backbone's width."""

    needs_frames: bool
    """Whether it encodes pixels; otherwise latents."""
    round_tokens: int
    """Vision tokens per round."""
    sequence: SequenceGroup = SequenceGroup()
    """Processes that have the same observations; each encodes some of the frames."""

    @abstractmethod
    def forward(self, observation: Observation) -> VisionFeatures:
        """Return the tokens of an observation."""

    @abstractmethod
    def resize(self, config: WorldModelConfig) -> None:
        """Take frames of the size of a config."""

    def select_frames(self, frames: Float[Tensor, "b t 3 h w"]) -> Float[Tensor, "b f 3 h w"] | None:
        """Return the frames of a clip that the adapter encodes; None where it encodes latents."""
        return None


class LatentVision(VisionAdapter):
    """3x3 convolutions over the latent grid, which give cells spatial context, and a projection.

    `merge` x `merge` cells share a token, and `query_merge` x `query_merge` cells a query. The backbone
    remains a plain causal language model.
    """

    needs_frames = False

    def __init__(
        self,
        config: VisionConfig,
        latent_channels: int,
        grid: tuple[int, int],
        width: int,
        context_latents: int = 1,
        query_merge: int = 1,
    ) -> None:
        super().__init__()
        self.config = config
        self.grid = (grid[0] // config.merge, grid[1] // config.merge)
        """Rows and columns of tokens to which the learned positions belong."""
        frame_tokens = math.prod(self.grid)
        self.round_tokens = context_latents * frame_tokens
        self.stem = nn.Conv2d(latent_channels, config.width, 3, padding=1)
        self.blocks = residual_blocks(config.width, config.num_blocks)
        self.project = nn.Conv2d(config.width, width, 1)
        self.cell_norm = RMSNorm(width)
        self.merge = _merge(config.merge, width)
        self.query_merge = query_merge
        self.merge_queries = _merge(query_merge, width) if query_merge > 1 else nn.Identity()
        self.token_norm = RMSNorm(width)
        self.token_position = nn.Parameter(torch.randn(frame_tokens, width) * 0.3 * width**-0.5)
        self.frame_position = nn.Parameter(torch.randn(config.max_frames, 1, width) * 0.3 * width**-0.5)
        with torch.no_grad():
            for norm in (self.cell_norm, self.token_norm):
                norm.weight.fill_(2 * width**-0.5)  # twice the scale of word embeddings

    def forward(self, observation: Observation) -> VisionFeatures:
        """Return tokens `[b, t * (h / merge) * (w / merge), d]` and cells `[b, t, h * w, d]`."""
        latents = observation.latents
        batch, frames = latents.shape[:2]
        x = rearrange(latents, "b t c h w -> (b t) c h w").contiguous(memory_format=torch.channels_last)
        x = self.project(self.blocks(self.stem(x)))
        cells = self.cell_norm(rearrange(x, "(b t) d h w -> b t h w d", b=batch))
        tokens = self.token_norm(self.merge(_squares(cells, self.config.merge)))
        grid = latents.shape[3] // self.config.merge, latents.shape[4] // self.config.merge
        position = resample_rows(self.token_position, self.grid, grid)
        tokens = tokens + position + self.frame_position[-frames:]
        return VisionFeatures(
            rearrange(tokens, "b t n d -> b (t n) d"),
            rearrange(cells, "b t h w d -> b t (h w) d"),
            self.merge_queries(_squares(cells[:, -1:], self.query_merge))[:, 0],
        )

    def resize(self, config: WorldModelConfig) -> None:
        self.round_tokens = config.unseen_latents * config.codec.cells // self.config.merge**2


def _squares(cells: Float[Tensor, "b t h w d"], side: int) -> Float[Tensor, "b t n e"]:
    """Concatenate the features of every square of `side` x `side` cells."""
    return rearrange(cells, "b t (h p) (w q) d -> b t (h w) (p q d)", p=side, q=side)


def _merge(side: int, width: int) -> nn.Linear:
    """Return a projection of a square of cells to one feature: at first their sum, of the scale of one."""
    layer = nn.Linear(side**2 * width, width, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(width).repeat(1, side**2) / side)
    return layer
