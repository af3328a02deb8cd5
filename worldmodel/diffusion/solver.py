"""Solvers: the steps of one chunk from noise to data."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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
