"""Builds the parts of a world model from its config: our own, or parts of transformers and diffusers."""

from pathlib import Path

from worldmodel.config import WorldModelConfig
from worldmodel.errors import ConfigError
from worldmodel.models.codec.autoencoder import Codec, VideoCodec
from worldmodel.models.conditioning import (
    ConditionAdapter,
    GridAdapter,
    NoAdapter,
    PromptAdapter,
    StreamAdapter,
    TextAdapter,
)
from worldmodel.models.generator.base import VideoGenerator
from worldmodel.models.generator.dit import DiT
from worldmodel.models.generator.none import NoGenerator
from worldmodel.models.state import StateHead
from worldmodel.models.vision.adapter import LatentVision, VisionAdapter


def codec(config: WorldModelConfig, folder: Path | None) -> VideoCodec:
    """Build the codec; one of diffusers is read from the model folder, if there is one.

    Raises:
        ConfigError: the config's factors or channels differ from the autoencoder's.
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
            config.vision,
            config.codec.latent_channels,
            config.codec.grid,
            width,
            config.unseen_latents,
            config.query_merge,
        )
    from worldmodel.models.vision.encoders import EncoderVision

    return EncoderVision.from_config(
        config.vision, width, folder and folder / "vision", config.codec.image_size
    )


def generator(config: WorldModelConfig, codec: VideoCodec, folder: Path | None) -> VideoGenerator:
    """Build the generator; one of diffusers is read from the model folder, if there is one.

    `codec` is for generators that encode pixels of their context.

    Raises:
        ConfigError: it is causal or the sampler is swin, and the generator has no noise level per frame.
    """
    if config.generator is None:
        return NoGenerator()
    if config.generator.is_ours:
        residual = config.condition_adapter.forecast == "residual"
        return DiT(config.generator, config.codec.latent_channels, config.codec.grid, residual)
    from worldmodel.models.generator.diffusers.families import build_generator

    made = build_generator(config, folder and folder / "generator", codec)
    made.causal = config.generator.causal
    settings = {"generator.causal: true": made.causal, "sampler: swin": config.sampler == "swin"}
    for setting in [name for name, used in settings.items() if used and not made.chunkwise]:
        raise ConfigError(
            f"{setting} needs a generator with a noise level per frame, which this one is not; leave it out, "
            "or use our own generator or a Wan text-to-video or TI2V model with one transformer."
        )
    return made


def condition_adapter(
    config: WorldModelConfig, width: int, generator: VideoGenerator, state: StateHead | None
) -> ConditionAdapter:
    """Build the adapter from states of the given width to the generator's condition."""
    adapter, tokens = config.condition_adapter, generator.token_width
    if config.generator is None:
        return NoAdapter(config.chunk_latents)
    if adapter.kind == "prompt":
        return PromptAdapter(adapter, width, tokens, state)
    if adapter.kind == "text":
        return TextAdapter(width, tokens, config.action.text.max_tokens + 1, config.codec.cells)
    if adapter.kind == "stream":
        return StreamAdapter(width, tokens, config, state)
    assert state is not None, "checked by the config"
    return GridAdapter(width, tokens, config.num_queries, state)
