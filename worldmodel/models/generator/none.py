"""Takes the place of the generator in a model that has none."""

from typing import Any, NoReturn

from torch import nn

from worldmodel.diffusion.solver import EulerSolver
from worldmodel.errors import ConfigError
from worldmodel.models.generator.base import VideoGenerator


class NoGenerator(VideoGenerator):
    """Without weights: the forecast of the condition adapter is shown, after no denoising steps."""

    token_width = width = num_heads = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()

    @property
    def networks(self) -> list[nn.Module]:
        """None."""
        return []

    def solver(self, num_inference_steps: int) -> EulerSolver:
        """Return a solver of 0 steps.

        Raises:
            ConfigError: there are more.
        """
        if num_inference_steps:
            raise ConfigError(
                f"num_inference_steps is {num_inference_steps}, and the model has no generator; use 0."
            )
        return EulerSolver.of(0)

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: nothing is generated in 0 steps."""
        raise ConfigError("The model has no generator; set model.generator.")

    prefill = training_loss = forward
