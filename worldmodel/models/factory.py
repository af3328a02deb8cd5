"""Which class each part of a world model is: ours, or one around a model of transformers or diffusers."""

from pathlib import Path

from worldmodel.config import WorldModelConfig
from worldmodel.errors import ConfigError
from worldmodel.models.codec.autoencoder import Codec, VideoCodec
from worldmodel.models.conditioning import ForecastAdapter, GeneratorAdapter, PromptAdapter, StreamAdapter
from worldmodel.models.generator.base import VideoGenerator
from worldmodel.models.generator.dit import DiT
from worldmodel.models.vision.adapter import LatentVision, VisionAdapter


def codec(config: WorldModelConfig, folder: Path | None) -> VideoCodec:
    """Build the codec; one of diffusers is read from the model folder, if there is one.

    Raises:
        ConfigError: the config's factors or channels are not those of the autoencoder.
    """
    if config.codec.is_ours:
        return Codec(config.codec)
    from worldmodel.models.codec.diffusers import DiffusersCodec

    made = DiffusersCodec.from_config(config.codec, folder and folder / "codec")
    for name in ("latent_channels", "temporal_factor", "spatial_factor"):
        if getattr(made, name) != getattr(config.codec, name):
            raise ConfigError(
                f"codec.{name} is {getattr(config.codec, name)}; this autoencoder has {getattr(made, name)}."
            )
    return made


def vision(config: WorldModelConfig, width: int, folder: Path | None) -> VisionAdapter:
    """Build the vision adapter, with its encoder if the config names one."""
    if config.vision.sees_latents:
        return LatentVision(
            config.vision, config.codec.latent_channels, config.codec.grid, width, config.context_latents
        )
    from worldmodel.models.vision.encoders import EncoderVision

    return EncoderVision.from_config(
        config.vision, width, folder and folder / "vision", config.codec.image_size
    )


def generator(config: WorldModelConfig, codec: VideoCodec, folder: Path | None) -> VideoGenerator:
    """Build the generator; one of diffusers is read from the model folder, if there is one.

    `codec` is for generators that look at pixels of their context.

    Raises:
        ConfigError: the sampler is swin, and the generator cannot go on from a chunk that is still noisy.
    """
    if config.generator.is_ours:
        return DiT(config.generator, config.codec.latent_channels, config.codec.grid)
    from worldmodel.models.generator.diffusers.base import DiffusersGenerator

    made = DiffusersGenerator.from_config(config, folder and folder / "generator", codec)
    if config.sampler == "swin" and not made.chunkwise:
        raise ConfigError(
            "sampler: swin shows two chunks at two noise levels, which this generator cannot tell apart; "
            "use our own, a Wan model of one transformer that takes as many channels as it gives "
            "(text-to-video or TI2V), or sampler: chunk."
        )
    return made


def adapter(config: WorldModelConfig, width: int, generator: VideoGenerator) -> GeneratorAdapter:
    """Build the adapter that brings states of the given width to the generator."""
    kind, tokens = config.condition.kind, generator.token_width
    if kind == "prompt":
        return PromptAdapter(config.condition, width, tokens)
    if kind == "stream":
        return StreamAdapter(width, tokens, config.num_queries)
    return ForecastAdapter(
        config.condition, width, config.codec.latent_channels, config.chunk_latents, config.codec.grid, tokens
    )
