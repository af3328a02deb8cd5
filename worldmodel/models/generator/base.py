"""What a video generator must offer: the same calls for our transformer and for diffusers' models."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from worldmodel.diffusion.sampler import Solver
from worldmodel.models.conditioning import Condition, take
from worldmodel.parallel.mesh import SequenceGroup

Past = list[tuple[Tensor, ...]]
"""What a generator keeps of the context frames of a chunk; the batch is the first axis of every tensor."""


@dataclass(frozen=True)
class LossOutput:
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
    chunkwise: bool = False
    """Whether a chunk can go on from one that is still noisy: `lead`, `sigma_at` and `windows` are there."""
    sequence: SequenceGroup = SequenceGroup()
    """Processes that share a clip in training."""

    @abstractmethod
    def start(self, context: Float[Tensor, "b s c h w"], condition: Condition) -> Past:
        """Do what the steps of a chunk share: the work on its context frames, which end where it begins."""

    def lead(
        self,
        context: Float[Tensor, "b s c h w"],
        latents: Float[Tensor, "b t c h w"],
        level: Float[Tensor, "b t"],
        condition: Condition,
    ) -> tuple[Float[Tensor, "b t c h w"], Past]:
        """Predict a chunk behind context frames; return also what a chunk behind it goes on from."""
        raise NotImplementedError

    def sigma_at(self, place: Float[Tensor, "b r"]) -> Float[Tensor, "b r"]:
        """Return the sigma of a chunk at a place of the schedule, from 1 where it begins towards 0."""
        raise NotImplementedError

    def windows(
        self,
        context: Float[Tensor, "b s c h w"],
        latents: Float[Tensor, "b t c h w"],
        level: Float[Tensor, "b t"],
        condition: Condition,
        behind: Bool[Tensor, " b"],
    ) -> Float[Tensor, "b t c h w"]:
        """Predict chunks of which some are `behind` the one in the row before, as that looks at its level.

        A row behind another sees that one's context frames in place of its own, as in `diffusion.swin`.
        """
        front, back = ((~behind).nonzero()[:, 0], behind.nonzero()[:, 0])
        if not len(back):  # processes share weights (FSDP), so each calls its layers as often as the others
            back = back.new_ones(1)
        made, kept = self.lead(context[front], latents[front], level[front], take(condition, front))
        ahead = torch.searchsorted(front, back - 1)
        past = [tuple(part[ahead] for part in entry) for entry in kept]
        after = self(latents[back], level[back], take(condition, back), past)
        return made.new_zeros(latents.shape).index_copy(0, back, after).index_copy(0, front, made)

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
    def training_loss(
        self,
        clean: Float[Tensor, "b t c h w"],
        noise: Float[Tensor, "b t c h w"],
        sigma: Float[Tensor, "b t"],
        condition: Condition,
        context: Float[Tensor, "b s c h w"],
        behind: Bool[Tensor, " b"] | None = None,
    ) -> LossOutput:
        """Compare the prediction with the truth at noise levels in [0, 1] (1: noise alone).

        `behind` says which chunks go on from the noisy one in the row before (see `windows`); None: no one.
        """

    def encode_text(self, texts: Sequence[str]) -> Float[Tensor, "b m e"] | None:
        """Embed texts as the model was trained to read them; None where it reads none."""
        return None
