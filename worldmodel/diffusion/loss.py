"""The flow-matching loss."""

from jaxtyping import Float
from torch import Tensor


def expand(sigma: Float[Tensor, "b t"]) -> Float[Tensor, "b t 1 1 1"]:
    """Broadcast noise levels per frame over the axes of latents."""
    return sigma[:, :, None, None, None]


def add_noise(
    clean: Float[Tensor, "b t c h w"], noise: Float[Tensor, "b t c h w"], sigma: Float[Tensor, "b t"]
) -> Float[Tensor, "b t c h w"]:
    """Mix data and noise along the straight path.

    Source: Lipman et al. 2023 (arXiv:2210.02747), with sigma = 1 - t.
    """
    level = expand(sigma)
    return (1 - level) * clean + level * noise


def velocity_error(
    velocity: Float[Tensor, "b t c h w"],
    noisy: Float[Tensor, "b t c h w"],
    clean: Float[Tensor, "b t c h w"],
    sigma: Float[Tensor, "b t"],
    max_weight: float = 4.0,
) -> Float[Tensor, "b t h w"]:
    """Squared velocity error of every cell, averaged over channels, its weight 1/sigma^2 truncated.

    The error of the implied clean latents times min(1/sigma^2, max_weight) equals the squared velocity
    error wherever sigma >= max_weight^-0.5, and does not blow up below.
    """
    level = expand(sigma)
    implied = noisy - level * velocity
    weight = (1 / sigma.clamp(min=1e-4) ** 2).clamp(max=max_weight)
    return weight[:, :, None, None] * (implied - clean).pow(2).mean(dim=2)
