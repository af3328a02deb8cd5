"""The codec: the interface of video autoencoders, and a small one.

It encodes every group of `temporal_factor` frames independently, so clips can be streamed, and an image is a
clip whose frame is repeated.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.config import CodecConfig
from worldmodel.models.layers.norm import upcast


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a residual connection; initialised to the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d h w"]:
        return x + self.conv2(F.silu(self.conv1(F.silu(x))))


def residual_blocks(width: int, count: int) -> nn.Sequential:
    """Return `count` residual blocks of one width."""
    return nn.Sequential(*(ResidualBlock(width) for _ in range(count)))


def in_weight_precision(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of a codec ignore autocast: errors of latents are errors of every later part."""

    @functools.wraps(method)
    def call(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.amp.is_autocast_available(x.device.type):
            return method(self, x, *args, **kwargs)
        with torch.autocast(x.device.type, enabled=False):
            return method(self, x, *args, **kwargs)

    return call


class VideoCodec(nn.Module, ABC):
    """Maps pixels in [-1, 1] to latents of unit variance per channel, and back.

    A causal codec encodes the first frame of a clip as an image, so later frames must be encoded together
    with those before them. Other codecs encode every group of `temporal_factor` frames independently.
    """

    latent_channels: int
    temporal_factor: int
    """Frames per latent frame (after the first one, if the codec is causal)."""
    spatial_factor: int
    """Pixels per side of a latent cell."""
    causal: bool

    @abstractmethod
    def encode(
        self, frames: Float[Tensor, "b t 3 h w"], before: Float[Tensor, "b u 3 h w"] | None = None
    ) -> Float[Tensor, "b t2 c h2 w2"]:
        """Encode frames; `before` are the frames that precede them."""

    @abstractmethod
    def decode(
        self, latents: Float[Tensor, "b t2 c h2 w2"], context: Float[Tensor, "b s c h2 w2"] | None = None
    ) -> Float[Tensor, "b t 3 h w"]:
        """Decode latents that follow the latents of `context`; values can be slightly outside [-1, 1]."""

    def frames_before(self, count: int) -> int:
        """Return how many frames the first `count` latent frames of a clip cover."""
        return 1 + (count - 1) * self.temporal_factor if self.causal else count * self.temporal_factor

    def context(
        self,
        latents: Float[Tensor, "b t2 c h2 w2"],
        frames: Float[Tensor, "b t 3 h w"] | None,
        count: int,
        before: Float[Tensor, "b s c h2 w2"] | None = None,
    ) -> Float[Tensor, "b s c h2 w2"]:
        """Return the newest `count` latent frames of a clip, which the next round continues.

        `before` is the context that the clip itself continued, for rounds that are shorter than a context.

        A causal codec encodes the newest frames again, since it encodes the first frame of a clip as an
        image. A clip that is too short repeats its first frame.
        """
        if self.causal:
            assert frames is not None, "a causal codec encodes pixels again"
            return self.encode(newest(frames, self.frames_before(count)))
        return newest(latents if before is None else torch.cat([before, latents], dim=1), count)


def newest(frames: Float[Tensor, "b t c h w"], count: int) -> Float[Tensor, "b u c h w"]:
    """Return the last `count` frames; a clip that is too short repeats its first frame."""
    missing = max(0, count - frames.shape[1])
    return torch.cat([frames[:, :1].expand(-1, missing, -1, -1, -1), frames[:, -count:]], dim=1)


class Codec(VideoCodec):
    """A convolutional video autoencoder: patches of half a latent cell, then two of them along each side."""

    causal = False
    latent_mean: Tensor
    latent_std: Tensor

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.config = config
        self.latent_channels, self.temporal_factor = config.latent_channels, config.temporal_factor
        self.spatial_factor = config.spatial_factor
        self.patch = self.spatial_factor // 2  # side of what is folded into channels before any convolution
        fine, coarse = config.widths
        pixels = 3 * config.temporal_factor * self.patch**2
        z = config.latent_channels
        self.encoder = nn.Sequential(
            nn.Conv2d(pixels, fine, 3, padding=1),
            residual_blocks(fine, config.num_blocks - 1),
            nn.PixelUnshuffle(2),
            nn.Conv2d(4 * fine, coarse, 1),
            residual_blocks(coarse, config.num_blocks - 1),
            nn.Conv2d(coarse, 2 * z, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(z, coarse, 3, padding=1),
            residual_blocks(coarse, config.num_blocks),
            nn.Conv2d(coarse, 4 * fine, 1),
            nn.PixelShuffle(2),
            residual_blocks(fine, config.num_blocks),
            nn.Conv2d(fine, pixels, 3, padding=1),
        )
        self.register_buffer("latent_mean", torch.zeros(z, 1, 1))
        self.register_buffer("latent_std", torch.ones(z, 1, 1))

    @in_weight_precision
    def posterior(
        self, frames: Float[Tensor, "b t 3 h w"]
    ) -> tuple[Float[Tensor, "b t2 c h2 w2"], Float[Tensor, "b t2 c h2 w2"]]:
        """Return the mean and the log-variance of the unstandardised latents.

        A clip whose length is not a multiple of the temporal factor repeats its last frame.
        """
        group = self.config.temporal_factor
        missing = -frames.shape[1] % group
        if missing:
            frames = torch.cat([frames, frames[:, -1:].expand(-1, missing, -1, -1, -1)], dim=1)
        x = rearrange(
            frames, "b (t g) c (h p) (w q) -> (b t) (g c p q) h w", g=group, p=self.patch, q=self.patch
        )
        x = self.encoder(x.contiguous(memory_format=torch.channels_last))
        mean, log_variance = upcast(rearrange(x, "(b t) c h w -> b t c h w", b=frames.shape[0])).chunk(
            2, dim=2
        )
        return mean, log_variance.clamp(-10, 4)

    def encode(
        self, frames: Float[Tensor, "b t 3 h w"], before: Float[Tensor, "b u 3 h w"] | None = None
    ) -> Float[Tensor, "b t2 c h2 w2"]:
        """Encode pixels in [-1, 1] to standardised latents (the mean of the posterior)."""
        mean, _ = self.posterior(frames)
        return (mean - self.latent_mean) / self.latent_std

    def decode(
        self, latents: Float[Tensor, "b t2 c h2 w2"], context: Float[Tensor, "b s c h2 w2"] | None = None
    ) -> Float[Tensor, "b t 3 h w"]:
        """Decode standardised latents to pixels; values can be slightly outside [-1, 1]."""
        return self.reconstruct(latents * self.latent_std + self.latent_mean)

    @in_weight_precision
    def reconstruct(self, latents: Float[Tensor, "b t2 c h2 w2"]) -> Float[Tensor, "b t 3 h w"]:
        """Decode unstandardised latents (a posterior's mean or sample)."""
        x = rearrange(latents, "b t c h w -> (b t) c h w").contiguous(memory_format=torch.channels_last)
        x = upcast(self.decoder(x))
        group = self.config.temporal_factor
        return rearrange(
            x,
            "(b t) (g c p q) h w -> b (t g) c (h p) (w q)",
            b=latents.shape[0],
            g=group,
            c=3,
            p=self.patch,
            q=self.patch,
        )

    @torch.no_grad()
    def set_scale(self, mean: Float[Tensor, " c"], std: Float[Tensor, " c"]) -> None:
        """Set the per-channel mean and standard deviation of unstandardised latents."""
        self.latent_mean.copy_(mean[:, None, None])
        self.latent_std.copy_(std[:, None, None])
