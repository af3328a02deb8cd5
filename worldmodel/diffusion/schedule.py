"""Noise levels. `sigma` runs from 1 (noise) to 0 (data): x_sigma = (1 - sigma) x_0 + sigma noise."""

import torch
from jaxtyping import Float
from torch import Tensor


def shifted(place: Float[Tensor, "*shape"], shift: float = 3.0) -> Float[Tensor, "*shape"]:
    """Return the sigmas at positions from 1 (noise) to 0 (data), denser near 1 for `shift` > 1.

    Source: Esser et al. 2024 (arXiv:2403.03206), eq. 23.
    """
    return shift * place / (1 + (shift - 1) * place)


def sampling_sigmas(num_inference_steps: int, shift: float = 3.0) -> Float[Tensor, " n"]:
    """Return `num_inference_steps + 1` sigmas from 1 to 0, evenly spaced on the schedule."""
    return shifted(torch.linspace(1, 0, num_inference_steps + 1, dtype=torch.float64), shift).float()


def training_sigmas(
    normal: Float[Tensor, "b t"], uniform: Float[Tensor, "b 2"], independent: float = 0.25, pure: float = 0.4
) -> Float[Tensor, "b t"]:
    """Make a noise level per frame from standard normal and uniform draws.

    A share `pure` of the clips starts from pure noise (few-step sampling spends its steps there); a share
    `independent` has another level in every frame, as in diffusion forcing (arXiv:2407.01392); the rest
    follows the logit-normal law of arXiv:2403.03206, sec. 3.1, shifted towards noise.
    """
    sigma = torch.sigmoid(0.8 + 1.2 * normal)
    whole, start = uniform[:, :1] >= independent, uniform[:, 1:] < pure
    sigma = torch.where(whole, sigma[:, :1], sigma)
    return torch.where(start, torch.ones_like(sigma), sigma)
