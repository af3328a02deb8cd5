"""Causal Swin-DPM: a chunk is begun while the chunk before it is still noisy, half a schedule ahead of it.

    steps of chunk i    context it attends to
    first half          chunk i - 1 with its own context, at each step of that chunk's second half
    second half         the context frames: the last of chunk i - 1, with a little noise added

A window of two chunks slides over the video: the front chunk leaves at noise 0 and fresh noise joins at the
back. No chunk copies an exact frame of an earlier one together with its errors, and the transition is made
while both sides can still change. A chunk never attends to a later one (nor to its action), so the two halves
of a window need not be computed together: the front chunk leaves a `ChunkTrace`, and the next one follows it
once its own action is known. The numbers are those of the joint window. (The back chunk could also be begun
early under a guess of its action, for half the latency. Measured on the shipped model, it then no longer
followed its actions, whatever had been guessed.)

Source: PAN, Causal Swin-DPM (arXiv:2511.09057). Keeping a noise level per frame of a finished chunk is
Diffusion Forcing (arXiv:2407.01392).
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from worldmodel.diffusion.loss import add_noise
from worldmodel.errors import ConfigError

CONTEXT_SIGMA = 0.055
"""Noise added to the context frames, as in PAN."""

C = TypeVar("C")
"""The generator's condition."""


@dataclass(frozen=True)
class ChunkTrace(Generic[C]):
    """The latents of a chunk at every step of its second half, to which the next chunk attends."""

    context: Float[Tensor, "b s c h w"]
    """The context frames that it attended to."""
    conditions: tuple[C, ...]
    """Its condition, and with guidance the unconditional one."""
    latents: tuple[Float[Tensor, "b t c h w"], ...]
    """The chunk at the beginning of each step."""
    timesteps: tuple[float, ...]

    def fits(self, num_steps: int, num_conditions: int) -> bool:
        """Return whether a chunk of other settings can follow (after a restored snapshot it may not)."""
        return (len(self.timesteps), len(self.conditions)) == (num_steps / 2, num_conditions)


def half(num_inference_steps: int) -> int:
    """Return the step at which a chunk comes to the front of the window.

    Raises:
        ConfigError: the number of steps is odd.
    """
    if num_inference_steps < 2 or num_inference_steps % 2:
        raise ConfigError(
            f"num_inference_steps is {num_inference_steps}; sampler: swin needs an even number, 2 or more."
        )
    return num_inference_steps // 2


def renoise(
    context: Float[Tensor, "b s c h w"],
    noise: Float[Tensor, "b s c h w"],
    sigma: float = CONTEXT_SIGMA,
) -> Float[Tensor, "b s c h w"]:
    """Add a little noise to context frames, which hides their small errors."""
    return add_noise(context, noise, context.new_full(context.shape[:2], sigma))


def window_places(
    uniform: Float[Tensor, "b r"],
) -> tuple[Float[Tensor, "b r"], Bool[Tensor, "b r"]]:
    """Draw positions on the schedule for the chunks of consecutive rounds, in training, as sampling has them.

    Rounds form windows of two: the front one anywhere in the second half of the schedule, the back one half a
    schedule above it. The first round of a world follows no chunk and passes the whole schedule: where it is
    still in the first half, the next one waits, and windows begin with that one. So every round occurs once,
    with equal probability at every position.

    Args:
        uniform: draws from [0, 1).

    Returns:
        Positions (1: pure noise, towards 0: done), and which rounds continue the noisy chunk before them.

    Source: PAN (arXiv:2511.09057), Causal Swin-DPM.
    """
    rounds = torch.arange(uniform.shape[1], device=uniform.device)
    upper = (rounds + (uniform[:, :1] < 0.5)) % 2 == 1
    lower = 0.5 - uniform % 0.5
    ahead = torch.cat([lower[:, :1], lower[:, :-1]], dim=1)
    return torch.where(upper, ahead + 0.5, lower), upper & (rounds > 0)
