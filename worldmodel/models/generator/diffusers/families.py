"""The families of diffusers generators by the class of their transformer, and their loading."""

from pathlib import Path
from typing import Any

from worldmodel.config import WorldModelConfig
from worldmodel.errors import ConfigError, ModelError
from worldmodel.models.codec.autoencoder import VideoCodec
from worldmodel.models.conditioning import CELL_CHANNELS
from worldmodel.models.generator.diffusers import clip_encoder
from worldmodel.models.generator.diffusers.base import Clip, DiffusersGenerator, image_width
from worldmodel.models.generator.diffusers.cogvideox import CogVideoXGenerator
from worldmodel.models.generator.diffusers.ltx import LTXGenerator
from worldmodel.models.generator.diffusers.wan import WanGenerator
from worldmodel.models.loading import pipeline_folder, pretrained
from worldmodel.models.loading.pretrained import dtype_of

FAMILIES: dict[Any, type[DiffusersGenerator]] = {
    family.transformer_class: family for family in (WanGenerator, LTXGenerator, CogVideoXGenerator)
}


def build_generator(
    config: WorldModelConfig, folder: Path | None = None, codec: VideoCodec | None = None
) -> DiffusersGenerator:
    """Load the generator from `folder` or `generator.pretrained`, or build `generator.architecture`.

    Raises:
        ConfigError: the architecture cannot be built, or does not support a setting.
        ModelError: a folder cannot be read, or holds another model.
    """
    chosen = config.generator
    assert chosen is not None
    streamed, clip, dtype = config.condition_adapter.kind == "stream", Clip.of(config), dtype_of(chosen.dtype)
    channels = config.codec.latent_channels + CELL_CHANNELS if config.has_state else 0
    if folder is None and not chosen.pretrained:
        arguments = dict(chosen.architecture)
        described, text_described = (arguments.pop(f"{kind}_encoder", None) for kind in ("image", "text"))
        try:
            family = _family(arguments.pop("_class_name", None), "generator.architecture")
            transformer = family.transformer_class(**arguments)
            image = None if described is None else clip_encoder.describe(described, clip.image_size)
        except (ModelError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"generator.architecture cannot be built: {error}") from None
        if config.condition_adapter.text and text_described is None:
            raise ConfigError(
                "condition_adapter.text needs a text encoder; describe one in "
                "generator.architecture.text_encoder, set generator.pretrained to a pipeline folder, or "
                "condition_adapter.text to false."
            )
        pipeline_folder.convert(transformer, dtype)
        scheduler = family.read_scheduler(chosen.scheduler)
        made = family(transformer, scheduler, clip, streamed, None, codec, image, channels)
        made.text_architecture = text_described
        if config.condition_adapter.text:
            made.add_text_encoder()
        return made
    source = pipeline_folder.Source.of(folder or str(chosen.pretrained))
    weights = source.transformer
    family = _family(pretrained.read_json(weights).get("_class_name"), str(weights))
    transformer = pipeline_folder.load_model(weights, [family.transformer_class], dtype)
    scheduler = family.read_scheduler(chosen.scheduler, source.scheduler)
    text = pipeline_folder.load_text_encoder(source) if config.condition_adapter.text else None
    image = clip_encoder.load(source, clip.image_size) if image_width(transformer) else None
    made = family(transformer, scheduler, clip, streamed, text, codec, image, channels)
    made.source = source
    made.network.load_added(weights)
    made.add_second(source)
    return made


def _family(name: Any, source: str) -> type[DiffusersGenerator]:
    return FAMILIES[pipeline_folder.allowed_class(name, FAMILIES, source)]
