"""Video autoencoders of diffusers as codecs."""

from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import AutoencoderKLCogVideoX
from diffusers.models.autoencoders.autoencoder_kl_ltx import AutoencoderKLLTXVideo
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from worldmodel.config import CodecConfig
from worldmodel.errors import ConfigError, ModelError
from worldmodel.models.codec.autoencoder import VideoCodec, in_weight_precision, newest
from worldmodel.models.loading import pipeline_folder
from worldmodel.models.loading.pretrained import dtype_of

Autoencoder = AutoencoderKLWan | AutoencoderKLLTXVideo | AutoencoderKLCogVideoX
CLASSES = (AutoencoderKLWan, AutoencoderKLLTXVideo, AutoencoderKLCogVideoX)


class DiffusersCodec(VideoCodec):
    """A causal autoencoder of diffusers: 1 + k n frames are 1 + n latent frames, the first of one image.

    Latents are the mode of the posterior, scaled as in the pipeline of the autoencoder.
    """

    causal = True
    mean: Tensor
    scale: Tensor

    def __init__(self, vae: Autoencoder) -> None:
        super().__init__()
        self.vae = vae
        config: Any = vae.config
        if isinstance(vae, AutoencoderKLWan):
            self.latent_channels = config.z_dim
            self.temporal_factor, self.spatial_factor = (
                config.scale_factor_temporal,
                config.scale_factor_spatial,
            )
            mean, scale = torch.tensor(config.latents_mean), 1 / torch.tensor(config.latents_std)
        elif isinstance(vae, AutoencoderKLLTXVideo):
            self.latent_channels = config.latent_channels
            self.temporal_factor = vae.temporal_compression_ratio
            self.spatial_factor = vae.spatial_compression_ratio
            mean, scale = vae.latents_mean.clone(), config.scaling_factor / vae.latents_std
        else:
            self.latent_channels = config.latent_channels
            self.temporal_factor = int(config.temporal_compression_ratio)
            self.spatial_factor = 2 ** (len(config.block_out_channels) - 1)
            mean, scale = (
                torch.zeros(self.latent_channels),
                torch.full((self.latent_channels,), config.scaling_factor),
            )
        if mean.shape != (self.latent_channels,) or scale.shape != (self.latent_channels,):
            raise ModelError(
                f"The autoencoder has {self.latent_channels} latent channels, but means for {len(mean)} and "
                f"standard deviations for {len(scale)}; correct its config.json."
            )
        # Not saved with the weights: they come from the config or the buffers of the autoencoder.
        self.register_buffer("mean", mean[:, None, None], persistent=False)
        self.register_buffer("scale", scale[:, None, None], persistent=False)

    @classmethod
    def from_config(cls, config: CodecConfig, folder: Path | None = None) -> "DiffusersCodec":
        """Load `folder` or `config.pretrained`, or build `config.architecture` with random weights.

        Raises:
            ConfigError: the architecture is not an autoencoder in `CLASSES`, or has invalid arguments.
            ModelError: the folder cannot be read, or holds another model.
        """
        dtype = dtype_of(config.dtype)
        if folder is not None or config.pretrained:
            codec = cls.from_pretrained(folder or str(config.pretrained))
        else:
            arguments = dict(config.architecture)
            try:
                vae_class = pipeline_folder.allowed_class(
                    arguments.pop("_class_name", None), CLASSES, "codec.architecture"
                )
                codec = cls(vae_class(**arguments))
            except (ModelError, RuntimeError, TypeError, ValueError) as error:
                raise ConfigError(f"codec.architecture cannot be built: {error}") from None
        # Only now, so that the means and standard deviations of latents keep their precision.
        pipeline_folder.convert(codec.vae, dtype)
        return codec

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "DiffusersCodec":
        """Load the folder of an autoencoder or of a pipeline.

        Raises:
            ModelError: the folder cannot be read, or holds another model.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ModelError(f"There is no codec folder {str(folder)!r}; pass a folder written by diffusers.")
        if (folder / pipeline_folder.INDEX).is_file():
            pipeline_folder.pipeline_index(folder)
            folder = folder / "vae"
        vae = pipeline_folder.load_model(folder, CLASSES)
        assert isinstance(vae, Autoencoder)
        return cls(vae)

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the autoencoder in the format of diffusers."""
        pipeline_folder.save_model(self.vae, Path(folder), dtype)

    def encode(
        self, frames: Float[Tensor, "b t 3 h w"], before: Float[Tensor, "b u 3 h w"] | None = None
    ) -> Float[Tensor, "b t2 c h2 w2"]:
        """Encode frames as a clip of their own, or as a continuation of `before`.

        A clip is padded to 1 + k n frames by repeating its first frame, a continuation to k n frames by
        repeating its last.
        """
        group = self.temporal_factor
        if before is None:
            groups = -(-(frames.shape[1] - 1) // group)
            return self._encode(newest(frames, 1 + group * groups))
        groups = -(-frames.shape[1] // group)
        missing = group * groups - frames.shape[1]
        after = frames[:, -1:].expand(-1, missing, -1, -1, -1)
        start = newest(before, 1 + group * -(-(before.shape[1] - 1) // group))
        return self._encode(torch.cat([start, frames, after], dim=1))[:, -groups:]

    @in_weight_precision
    def decode(
        self, latents: Float[Tensor, "b t2 c h2 w2"], context: Float[Tensor, "b s c h2 w2"] | None = None
    ) -> Float[Tensor, "b t 3 h w"]:
        """Decode latents that follow `context`, k frames each; without context the first is one frame."""
        count = latents.shape[1] * self.temporal_factor
        if context is None:
            count -= self.temporal_factor - 1
        else:
            latents = torch.cat([context, latents], dim=1)
        if isinstance(self.vae, AutoencoderKLCogVideoX) and latents.shape[1] % 2 == 0:
            # The decoder upsamples time correctly for odd lengths only.
            latents = torch.cat([latents[:, :1], latents], dim=1)
        config: Any = self.vae.config
        z = rearrange(latents / self.scale + self.mean, "b t c h w -> b c t h w").to(self.vae.dtype)
        if isinstance(self.vae, AutoencoderKLLTXVideo) and config.timestep_conditioning:
            # The decoder also denoises; timestep 0, the default of its pipeline, marks clean latents.
            decoded = self.vae.decode(z, z.new_zeros(len(z)), return_dict=False)[0]
        else:
            decoded = self.vae.decode(z, return_dict=False)[0]
        return rearrange(decoded, "b c t h w -> b t c h w")[:, -count:].to(latents.dtype)

    @in_weight_precision
    def _encode(self, clip: Float[Tensor, "b t 3 h w"]) -> Float[Tensor, "b t2 c h2 w2"]:
        x = rearrange(clip, "b t c h w -> b c t h w").to(self.vae.dtype)
        z = self.vae.encode(x, return_dict=False)[0].mode()
        return (rearrange(z, "b c t h w -> b t c h w").to(clip.dtype) - self.mean) * self.scale
