"""Solvers: the steps of one chunk from noise to data."""

import hashlib
import math
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

    @property
    def adds_noise(self) -> bool:
        """Whether steps add noise of their own."""
        ...

    def timestep(self, step: int) -> float:
        """Return the timestep that the generator is given at a step."""
        ...

    def step(
        self, step: int, prediction: Float[Tensor, "b t c h w"], latents: Float[Tensor, "b t c h w"]
    ) -> Float[Tensor, "b t c h w"]:
        """Return the latents after a step, given the generator's prediction at its timestep."""
        ...


@dataclass
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

    @property
    def adds_noise(self) -> bool:
        """Whether steps add noise of their own."""
        return False

    def timestep(self, step: int) -> float:
        """Return the sigma at which a step begins."""
        return float(self.sigmas[step])

    def step(
        self, step: int, prediction: Float[Tensor, "b t c h w"], latents: Float[Tensor, "b t c h w"]
    ) -> Float[Tensor, "b t c h w"]:
        """Move all frames from this step's sigma to the next one's."""
        # A number: copying a tensor to a GPU would make the host wait for it.
        return latents + float(self.sigmas[step + 1] - self.sigmas[step]) * prediction


@dataclass
class AncestralSolver(EulerSolver):
    """Steps that replace a part of the noise by fresh noise, which fades out errors of the steps before.

    Every row draws its own, seeded by its initial latents, so that its result does not depend on the rest of
    the batch.

    Source: Song et al. 2020 (arXiv:2010.02502), eq. 12 and 16 with eta = 1, for x = (1 - sigma) data + sigma
    noise; Karras et al. 2022 (arXiv:2206.00364), sec. 4, for why it helps.
    """

    _generators: list[torch.Generator] | None = field(default=None, init=False)

    @property
    def adds_noise(self) -> bool:
        """Whether steps add noise of their own."""
        return True

    def step(
        self, step: int, prediction: Float[Tensor, "b t c h w"], latents: Float[Tensor, "b t c h w"]
    ) -> Float[Tensor, "b t c h w"]:
        """Move all frames from this step's sigma to the next one's."""
        if self._generators is None:
            self._generators = row_generators(latents)
        sigma, following = float(self.sigmas[step]), float(self.sigmas[step + 1])
        data, noise = latents - sigma * prediction, latents + (1 - sigma) * prediction
        if not following:
            return data
        ratio = (1 - sigma) * following / ((1 - following) * sigma)
        fresh = following * math.sqrt(1 - ratio**2)
        rows = [torch.randn(latents.shape[1:], generator=each) for each in self._generators]
        kept = math.sqrt(following**2 - fresh**2)
        return (1 - following) * data + kept * noise + fresh * torch.stack(rows).to(latents)


def row_generators(x: Tensor) -> list[torch.Generator]:
    """Return a random generator for every row, seeded by the values of that row."""
    made = []
    for row in x.detach().cpu().float().contiguous():
        digest = hashlib.blake2b(row.numpy().tobytes(), digest_size=7).digest()
        made.append(torch.Generator().manual_seed(int.from_bytes(digest, "little")))
    return made
