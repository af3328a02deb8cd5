"""Solvers from noise to data."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from worldmodel.diffusion.schedule import sampling_sigmas


def expand(sigma: Float[Tensor, "b t"]) -> Float[Tensor, "b t 1 1 1"]:
    """Give per-frame noise levels the axes of latents."""
    return sigma[:, :, None, None, None]


@runtime_checkable
class Solver(Protocol):
    """The way of one chunk from noise to data; it may remember earlier steps, so every chunk has its own."""

    @property
    def num_steps(self) -> int:
        """Steps from noise to data."""
        ...

    def level(self, step: int) -> float:
        """Return the noise level that the generator is told at a step."""
        ...

    def step(
        self, step: int, prediction: Float[Tensor, "b t c h w"], latents: Float[Tensor, "b t c h w"]
    ) -> Float[Tensor, "b t c h w"]:
        """Return the latents after a step, given what the generator predicted at its level."""
        ...


@dataclass(frozen=True)
class EulerSolver:
    """Follows the velocity (noise - data) along straight pieces, all frames at the same level.

    Source: Lipman et al. 2023 (arXiv:2210.02747), eq. 1.
    """

    sigmas: Float[Tensor, " n"]

    @classmethod
    def of(cls, num_inference_steps: int) -> "EulerSolver":
        """Return the solver of so many steps on the shifted schedule."""
        return cls(sampling_sigmas(num_inference_steps))

    @property
    def num_steps(self) -> int:
        """Steps from noise to data."""
        return len(self.sigmas) - 1

    def level(self, step: int) -> float:
        """Return the sigma at which a step begins."""
        return float(self.sigmas[step])

    def step(
        self, step: int, prediction: Float[Tensor, "b t c h w"], latents: Float[Tensor, "b t c h w"]
    ) -> Float[Tensor, "b t c h w"]:
        """Move all frames from this step's noise level to the next one's."""
        return latents + (self.sigmas[step + 1] - self.sigmas[step]).to(latents) * prediction
