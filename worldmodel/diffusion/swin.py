"""Causal Swin-DPM: a chunk begins while the chunk before it is still noisy, half a schedule ahead of it.

    steps of chunk i    what it sees
    upper half          chunk i - 1, behind its own condition frame, at each step of that chunk's lower half
    lower half          the condition frame: the last of chunk i - 1, a little noisy again

A window of two chunks slides on: the front one leaves at noise 0, and fresh noise joins behind. Nothing that
an earlier chunk left exactly is there to be copied with its errors, and the join is made while both sides can
still give way. A chunk never sees a later one (nor its action), so the two halves of a window need not be
computed together: the front chunk leaves a `Trail`, and the next one follows it once its own action is
known. The numbers are those of the joint window. (The back chunk could also be begun early under a guess of
its action, for half the wait. What the guess drew then counts as evidence: the shipped model, whatever was
guessed, no longer followed its actions.)

Source: PAN, Causal Swin-DPM (arXiv:2511.09057). What is remembered of a chunk that has left is Diffusion
Forcing's noise level per frame (arXiv:2407.01392).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from worldmodel.diffusion.loss import add_noise
from worldmodel.diffusion.sampler import Solver
from worldmodel.errors import ConfigError

CONDITION_SIGMA = 0.055
"""Noise of the condition frame, as in PAN."""

C = TypeVar("C")
"""What a generator is conditioned on; nothing here looks into it."""
Taken = TypeVar("Taken", contravariant=True)


@runtime_checkable
class Chunkwise(Protocol[Taken]):
    """A generator of chunks that can also go on from a chunk which is still noisy."""

    def start(self, context: Tensor, condition: Taken) -> Any:
        """Return what is kept of context frames, which end where the chunk begins."""
        ...

    def lead(self, context: Tensor, latents: Tensor, level: Tensor, condition: Taken) -> tuple[Tensor, Any]:
        """Predict a chunk behind context frames, and return what is kept of both, which end there too."""
        ...

    def __call__(self, latents: Tensor, level: Tensor, condition: Taken, past: Any) -> Tensor:
        """Predict at a noise level per frame."""
        ...


@dataclass(frozen=True)
class Trail(Generic[C]):
    """What a chunk leaves for the next one: how it looked at every step of the lower half, and under what."""

    context: Float[Tensor, "b s c h w"]
    """The frames it went on from, as it saw them."""
    conditions: tuple[C, ...]
    latents: tuple[Float[Tensor, "b t c h w"], ...]
    """The chunk at the beginning of each step."""
    levels: tuple[float, ...]


def middle(num_inference_steps: int) -> int:
    """Return the step at which a chunk comes to the front of the window.

    Raises:
        ConfigError: the steps have no half.
    """
    if num_inference_steps < 2 or num_inference_steps % 2:
        raise ConfigError(
            f"num_inference_steps is {num_inference_steps}; sampler: swin needs an even number, 2 or more."
        )
    return num_inference_steps // 2


def renoise(
    context: Float[Tensor, "b s c h w"],
    noise: Float[Tensor, "b s c h w"],
    sigma: float = CONDITION_SIGMA,
) -> Float[Tensor, "b s c h w"]:
    """Make the condition frame: what a chunk goes on from, with a little noise over its small errors."""
    return add_noise(context, noise, context.new_full(context.shape[:2], sigma))


def advance(
    generator: Chunkwise[C],
    solver: Solver,
    conditions: Sequence[C],
    context: Float[Tensor, "b s c h w"],
    noise: Float[Tensor, "b t c h w"],
    guidance_scale: float = 1.0,
    trail: Trail[C] | None = None,
) -> tuple[Float[Tensor, "b t c h w"], Trail[C]]:
    """Generate the next chunk from noise, behind the trail of the one before; return it with its own trail.

    Args:
        generator: the generator.
        solver: solver of this chunk.
        conditions: what is conditioned on; with guidance the empty condition comes second.
        context: the condition frame, already noisy.
        noise: where the chunk starts.
        guidance_scale: extrapolates away from the second condition's prediction, if there is one.
        trail: what the chunk before left, made with as many steps; None for the first chunk of a world, which
            sees the condition frame all the way. A trail of other settings (of a restored snapshot) is none.

    Raises:
        ConfigError: the solver's steps have no half.
    """
    half, latents, seen, levels = middle(solver.num_steps), noise, [], []
    if trail is not None and (len(trail.levels), len(trail.conditions)) != (half, len(conditions)):
        trail = None
    starts = [generator.start(context, each) for each in conditions]
    for step in range(solver.num_steps):
        pasts = starts
        if step >= half:
            seen.append(latents)
            levels.append(solver.level(step))
        elif trail is not None:
            past_level = noise.new_full(trail.latents[step].shape[:2], trail.levels[step])
            pasts = [
                generator.lead(trail.context, trail.latents[step], past_level, each)[1]
                for each in trail.conditions
            ]
        level = noise.new_full(noise.shape[:2], solver.level(step))
        full, *empty = (
            generator(latents, level, each, past) for each, past in zip(conditions, pasts, strict=True)
        )
        prediction = empty[0] + guidance_scale * (full - empty[0]) if empty else full
        latents = solver.step(step, prediction, latents)
    return latents, Trail(context, tuple(conditions), tuple(seen), tuple(levels))


def window_places(
    uniform: Float[Tensor, "b r"],
) -> tuple[Float[Tensor, "b r"], Bool[Tensor, "b r"]]:
    """Place the chunks of consecutive rounds on the schedule, in training, as `advance` meets them.

    Rounds are in windows of two: the front one anywhere in the lower half, the back one half a schedule above
    it. The first round, which begins a world, has nobody ahead, and goes the whole way: where it is still in
    the upper half, the next one waits, and windows begin with that. So every round is met once, as often at
    one place as at another.

    Args:
        uniform: draws from [0, 1).

    Returns:
        Places (1: where a chunk begins, towards 0: where it is done), and which rounds go on from the noisy
        chunk of the round before.

    Source: PAN (arXiv:2511.09057), Causal Swin-DPM.
    """
    rounds = torch.arange(uniform.shape[1], device=uniform.device)
    upper = (rounds + (uniform[:, :1] < 0.5)) % 2 == 1
    lower = 0.5 - uniform % 0.5
    ahead = torch.cat([lower[:, :1], lower[:, :-1]], dim=1)
    return torch.where(upper, ahead + 0.5, lower), upper & (rounds > 0)
