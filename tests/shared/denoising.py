"""Denoising of a single chunk, for tests of generators."""

from torch import Tensor

from worldmodel.diffusion.sampler import Chunk
from worldmodel.models.conditioning import Condition
from worldmodel.models.world_model import WorldModel


def denoise(
    model: WorldModel,
    condition: Condition,
    context: Tensor,
    noise: Tensor,
    num_inference_steps: int,
    guidance_scale: float = 1.0,
) -> Tensor:
    """Generate a chunk's latents from noise."""
    conditions = (condition,) if guidance_scale == 1 else (condition, model.null_condition(context))
    solver = model.generator.solver(num_inference_steps)
    return model.denoise([Chunk(noise, solver, conditions, context, guidance_scale)])[0]
