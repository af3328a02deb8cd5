"""Switches that make inference cheaper."""

from functools import partial

from worldmodel.config.imports import import_object
from worldmodel.errors import ConfigError
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
        cache_threshold: Experiment: relative change of the generator's prediction below which a denoising
            step reuses the last one that was computed (step caching), 0.1 for example; 0 computes every step.
        quantization: int8 or fp8 weights of the linear layers of backbone and generator.
        compile: Whether to compile the generator's transformer blocks.

    Raises:
        ConfigError: the threshold is below 0, or the quantization is not available.
    """
    if cache_threshold is not None:
        if not cache_threshold >= 0:
            raise ConfigError(f"cache_threshold is {cache_threshold}; use 0 or more, 0 for no caching.")
        step_cache = import_object("worldmodel.experiments.step_cache:StepCache")
        model.make_step_cache = partial(step_cache, cache_threshold) if cache_threshold else None
    if quantization is not None:
        quantizing.quantize([model.backbone.model, model.generator], quantization)
    if compile:
        model.generator.compile_layers()
