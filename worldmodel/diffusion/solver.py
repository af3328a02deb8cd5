"""Solvers: the steps of one chunk from noise to data."""

import hashlib
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from worldmodel.diffusion.schedule import sampling_sigmas


@runtime_checkable
class Solver(Protocol):
    """The steps of one chunk; it may depend on earlier steps, so every chunk has its own."""

    @property
    def num_steps(self) -> int:
        """Steps from noise to data."""
        ...

    def timestep(self, step: int) -> float:
        """Return the timestep that the generator is given at a step."""
        ...

    def step(
        self, step: int, prediction: Float[Tensor, "b t c h w"], latents: Float[Tensor, "b t c h w"]
    ) -> Float[Tensor, "b t c h w"]:
        """Return the latents after a step, given the generator's prediction at its timestep."""
        ...


@dataclass(frozen=True)
class EulerSolver:
    """Euler's method for the flow-matching velocity (noise - data), all frames at the same sigma.

    Source: Lipman et al. 2023 (arXiv:2210.02747), eq. 1.
    """

    sigmas: Float[Tensor, " n"]

    @classmethod
    def of(cls, num_inference_steps: int) -> "EulerSolver":
        """Return the solver with that many steps on the shifted schedule."""
        return cls(sampling_sigmas(num_inference_steps))

    @property
    def num_steps(self) -> int:
        """Steps from noise to data."""
        return len(self.sigmas) - 1

    def timestep(self, step: int) -> float:
        """Return the sigma at which a step begins."""
        return float(self.sigmas[step])

    def step(
        self, step: int, prediction: Float[Tensor, "b t c h w"], latents: Float[Tensor, "b t c h w"]
    ) -> Float[Tensor, "b t c h w"]:
        """Move all frames from this step's sigma to the next one's."""
        return latents + (self.sigmas[step + 1] - self.sigmas[step]).to(latents) * prediction


@dataclass(frozen=True)
class StochasticEulerSolver(EulerSolver):
    """Ancestral sampling: every step replaces a part of the noise by new noise.

    Later steps can so mend what earlier ones got wrong. Every row draws from a generator that its initial
    latents seed, so that it does not depend on the rest of the batch.

    Source: Song et al. 2021 (arXiv:2010.02502), eq. 12 and 16 with eta = 1, where the data are scaled by
    1 - sigma.
    """

    generators: list[torch.Generator] = field(default_factory=list)

    def step(
        self, step: int, prediction: Float[Tensor, "b t c h w"], latents: Float[Tensor, "b t c h w"]
    ) -> Float[Tensor, "b t c h w"]:
        """Move all frames from this step's sigma to the next one's, with some new noise."""
        if not self.generators:
            self.generators.extend(row_generators(latents))
        now, after = self.sigmas[step].to(latents), self.sigmas[step + 1].to(latents)
        clean, noise = latents - now * prediction, latents + (1 - now) * prediction
        kept = (1 - now) * after / ((1 - after) * now)
        fresh = torch.stack([torch.randn(latents.shape[1:], generator=each) for each in self.generators])
        return (1 - after) * clean + after * (kept * noise + (1 - kept**2).sqrt() * fresh.to(latents))


def row_generators(x: Tensor) -> list[torch.Generator]:
    """Return a random generator for every row, seeded by the values of that row."""
    made = []
    for row in x.detach().cpu().float().contiguous():
        digest = hashlib.blake2b(row.numpy().tobytes(), digest_size=7).digest()
        made.append(torch.Generator().manual_seed(int.from_bytes(digest, "little")))
    return made
