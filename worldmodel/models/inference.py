"""Switches that make inference cheaper."""

from dataclasses import replace

from worldmodel.models import quantization as quantizing
from worldmodel.models.world_model import WorldModel


def optimize(
    model: WorldModel,
    cache_threshold: float | None = None,
    quantization: str | None = None,
    compile: bool = False,
) -> None:
    """Prepare a loaded model for cheaper inference, in place; what is None or False changes nothing.

    Args:
        model: The model, with its adapters.
        cache_threshold: Replaces the one of the config (step caching).
        quantization: int8 or fp8 weights of the linear layers of backbone and generator.
        compile: Whether to compile the generator's transformer blocks.

    Raises:
        ConfigError: the threshold is below 0, or the quantization is not available.
    """
    if cache_threshold is not None:
        model.config = replace(model.config, cache_threshold=cache_threshold)
    if quantization is not None:
        quantizing.quantize([model.backbone.model, model.generator], quantization)
    if compile:
        model.generator.compile_layers()
