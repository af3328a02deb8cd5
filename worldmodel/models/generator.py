"""What a video generator must offer: the same calls for our transformer and for diffusers' models."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.diffusion.sampler import Solver
from worldmodel.errors import ConfigError
from worldmodel.models.condition import Condition
from worldmodel.parallel.mesh import SequenceGroup

Past = list[tuple[Tensor, ...]]
"""What a generator keeps of the context frames of a chunk; the batch is the first axis of every tensor."""


@dataclass(frozen=True)
class Taught:
    """What a training step learns from one noise level."""

    error: Float[Tensor, "b t h w"]
    """Squared error of the prediction, averaged over channels."""
    clean: Float[Tensor, "b t c h w"]
    """The clean latents that the prediction implies."""


class VideoGenerator(nn.Module, ABC):
    """Makes the latents of a chunk that goes on from context frames, under a condition.

    `forward` speaks its model's own language: `level` is what that model calls the time of a frame, and the
    prediction is what the steps of its own `solver` take.
    """

    token_width: int
    """Width of `Condition.tokens`."""
    width: int
    """Width of its hidden states."""
    cells_per_token: int = 1
    """Latent cells that share a token."""
    layers: nn.ModuleList
    """Its transformer blocks."""
    sequence: SequenceGroup = SequenceGroup()
    """Processes that share a clip in training."""

    @abstractmethod
    def start(self, context: Float[Tensor, "b s c h w"], condition: Condition) -> Past:
        """Do what the steps of a chunk share: the work on its context frames, which end where it begins."""

    def follow(
        self,
        context: Float[Tensor, "b s c h w"],
        latents: Float[Tensor, "b t c h w"],
        level: Float[Tensor, "b t"],
        condition: Condition,
    ) -> Past:
        """Do the same for context frames and a chunk behind them that is still noisy; the next begins there.

        Raises:
            ConfigError: the model has one noise level for all frames.
        """
        raise ConfigError("This generator has one noise level for all frames; use sampler: chunk.")

    @abstractmethod
    def forward(
        self,
        latents: Float[Tensor, "b t c h w"],
        level: Float[Tensor, "b t"],
        condition: Condition,
        past: Past,
    ) -> Float[Tensor, "b t c h w"]:
        """Predict at a noise level per frame; a model without that takes the first frame's for all."""

    @abstractmethod
    def solver(self, num_inference_steps: int) -> Solver:
        """Return a solver for one chunk."""

    @abstractmethod
    def teach(
        self,
        clean: Float[Tensor, "b t c h w"],
        noise: Float[Tensor, "b t c h w"],
        sigma: Float[Tensor, "b t"],
        condition: Condition,
        context: Float[Tensor, "b s c h w"],
    ) -> Taught:
        """Compare the prediction with the truth at noise levels in [0, 1] (1: noise alone)."""

    def encode_text(self, texts: Sequence[str]) -> Float[Tensor, "b m e"] | None:
        """Embed texts as the model was trained to read them; None where it reads none."""
        return None
