"""Solvers from noise to data."""

from collections.abc import Callable
from itertools import pairwise

from jaxtyping import Float
from torch import Tensor

Velocity = Callable[[Tensor, Tensor], Tensor]
"""Maps latents `[b, t, c, h, w]` and sigma `[b, t]` to the velocity noise - data."""


def expand(sigma: Float[Tensor, "b t"]) -> Float[Tensor, "b t 1 1 1"]:
    """Give per-frame noise levels the axes of latents."""
    return sigma[:, :, None, None, None]


def euler_step(
    velocity: Velocity,
    latents: Float[Tensor, "b t c h w"],
    sigma: Float[Tensor, "b t"],
    next_sigma: Float[Tensor, "b t"],
) -> Float[Tensor, "b t c h w"]:
    """Move every frame from its noise level to its next one along the velocity."""
    return latents + expand(next_sigma - sigma) * velocity(latents, sigma)


def sample(
    velocity: Velocity, noise: Float[Tensor, "b t c h w"], sigmas: Float[Tensor, " n"]
) -> Float[Tensor, "b t c h w"]:
    """Denoise one chunk with the Euler solver, all frames at the same level.

    Source: Lipman et al. 2023 (arXiv:2210.02747), eq. 1.
    """
    latents = noise
    levels = sigmas.to(noise)[:, None, None].expand(-1, *noise.shape[:2])
    for sigma, next_sigma in pairwise(levels):
        latents = euler_step(velocity, latents, sigma, next_sigma)
    return latents
