"""The interface of training objectives, and the batches and random numbers they share.

Every loss is a sum over rows divided by a count over the whole step. Sums add up over microbatches and
processes, counts are known before the first backward pass, and the random numbers of a row are keyed by its
sample index, so a step gives the same result on any mesh.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from worldmodel.actions import Action
from worldmodel.batch import to_device
from worldmodel.data.loader import Batch
from worldmodel.errors import ConfigError
from worldmodel.models.vision.adapter import Observation
from worldmodel.models.world_model import WorldModel

TASKS = ("rounds", "imagine", "describe", "ask", "inverse", "document")
"""All tasks that sources offer (`StageConfig.tasks`)."""

LEAST_CELLS = 8
"""Fewer changed cells of a round count as so many, or noise in a single cell would weigh as an event."""

Losses = dict[str, Tensor]
"""Losses by name, summed over the rows of a microbatch."""

Counts = dict[str, float | Tensor]
"""Denominators of losses by name; a tensor where it is computed on the device, to avoid waiting for it."""

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the processes that see different episodes."""


class SampleRng:
    """Random numbers for the rows of a batch, with one generator per row.

    Each of `keys` seeds the generator of a row, so any process that computes a row draws the same numbers.
    They are drawn on the CPU, since generators of other devices give other numbers.
    """

    def __init__(
        self,
        keys: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        states = [np.random.SeedSequence(tuple(key)).generate_state(1, np.uint64)[0] for key in keys]
        self.streams = [torch.Generator().manual_seed(int(state >> 1)) for state in states]

    def normal(self, *shape: int) -> Float[Tensor, "b ..."]:
        """Draw `[b, *shape]` from the standard normal distribution."""
        drawn = torch.stack([torch.randn(shape, generator=stream) for stream in self.streams])
        return to_device(drawn.to(self.dtype), self.device)

    def uniform(self, *shape: int) -> Float[Tensor, "b ..."]:
        """Draw `[b, *shape]` from [0, 1)."""
        return to_device(self.host_uniform(*shape).to(self.dtype), self.device)

    def host_uniform(self, *shape: int) -> Float[Tensor, "b ..."]:
        """Draw `[b, *shape]` from [0, 1), for decisions of the host."""
        return torch.stack([torch.rand(shape, generator=stream) for stream in self.streams])

    def integers(self, high: int, *shape: int) -> Int[Tensor, "b ..."]:
        """Draw integers `[b, *shape]` from 0 to `high - 1`."""
        return (self.uniform(*shape) * high).long().clamp(max=high - 1)


@dataclass(frozen=True)
class StageBatch:
    """A microbatch prepared by an objective; nothing in it requires gradients."""

    batch: Batch
    rng: SampleRng
    counts: Counts
    """Denominators of the losses, for this microbatch alone."""
    content: Any
    """Outputs of the frozen parts, in the format of the objective."""
    tokens: int = 0
    """Positions that pass through the backbone."""


@dataclass(frozen=True)
class Rounds:
    """Latents of episodes: the context of each round and its target."""

    context: Float[Tensor, "b r s c h w"]
    target: Float[Tensor, "b r t c h w"]
    changed: Bool[Tensor, "b r t h w"]
    """Cells that differ from the context: few, but the ones that actions affect."""
    scored: Bool[Tensor, "b r"]
    """Rounds that a model is trained to predict; the others were observed, and it only remembers them."""
    frames: Float[Tensor, "b r f 3 H W"] | None = None
    """Pixels seen before each round, for a vision encoder that reads pixels."""

    @property
    def cells(self) -> Bool[Tensor, "b r t h w"]:
        """Cells of the rounds that count."""
        return self.scored[:, :, None, None, None].expand_as(self.changed)

    def counts(self) -> Counts:
        """Count changed and unchanged cells, so that both contribute equally although the former are few."""
        changed = (self.changed & self.cells).sum()
        return {"changed": changed, "unchanged": self.cells.sum() - changed}

    def errors(self, forecast: Float[Tensor, "b r t c h w"], target: Float[Tensor, "b r t c h w"]) -> Losses:
        """Sum squared errors over changed and over unchanged cells, averaged over channels."""
        error = (forecast - target).pow(2).mean(dim=3)
        changed = self.changed & self.cells
        unchanged = ~self.changed & self.cells
        return {"changed": (error * changed).sum(), "unchanged": (error * unchanged).sum()}

    def mean_changed(
        self, forecast: Float[Tensor, "b r t c h w"], target: Float[Tensor, "b r t c h w"]
    ) -> Tensor:
        """Sum over rounds the mean squared error of their changed cells.

        So an event that changes few cells counts as much as one that changes many: a code would otherwise
        leave the former out.
        """
        error = (forecast - target).pow(2).mean(dim=3)
        changed = (self.changed & self.cells).flatten(2)
        return ((error.flatten(2) * changed).sum(dim=2) / changed.sum(dim=2).clamp(min=LEAST_CELLS)).sum()


@dataclass(frozen=True)
class TextPrompt:
    """Observations, each with a prompt and the answer to predict."""

    observations: list[Observation]
    prompts: list[str | None]
    answers: list[str]
    before: Float[Tensor, "b r s c h w"] | None = None
    """Contexts of the rounds before the observations, where the texts are about these, too."""
    frames: Float[Tensor, "b r f 3 H W"] | None = None
    """Pixels seen before each of these rounds, for a vision encoder that reads pixels."""


class Objective(nn.Module, ABC):
    """A loss, with heads that are trained with the model but not exported.

    The total loss is the sum of `weights[name] * sum / count`; losses without a weight are only reported. An
    objective is built with the model and the stage's `objective_args`.
    """

    weights: Mapping[str, float]
    tasks: ClassVar[tuple[str, ...]] = TASKS
    """Tasks that it can be trained on."""
    has_teacher: ClassVar[bool] = False
    """Whether `teach` needs the weights with which the stage began."""
    previews_rounds: ClassVar[bool] = False
    """Whether `preview` shows the last rounds of the episodes."""

    def __init__(self, model: WorldModel) -> None:
        super().__init__()

    @abstractmethod
    def prepare(self, model: WorldModel, batch: Batch, rng: SampleRng) -> StageBatch:
        """Run the frozen parts and count the rows of each loss; called without gradients."""

    def teach(self, model: WorldModel, inputs: StageBatch) -> StageBatch:
        """Complete a microbatch with the weights with which the stage began; called without gradients."""
        return inputs

    @abstractmethod
    def forward(self, model: WorldModel, inputs: StageBatch) -> Losses:
        """Return the summed losses; all random numbers come from `inputs.rng`."""

    def preview(self, model: WorldModel, inputs: StageBatch) -> tuple[Tensor, Tensor] | None:
        """Return true and predicted videos, `[b, t, 3, h, w]`, if the objective predicts any.

        With `previews_rounds`, they are of the last rounds of the episodes.
        """
        return None

    def finish(self, model: WorldModel, batches: Sequence[Batch], reduce: Reduce) -> None:
        """Run once after the last step of the stage, on that step's microbatches."""


def drop_actions(batch: Batch, rng: SampleRng, share: float) -> Batch:
    """Replace a share of the actions by the null action, so that the model also learns to go without."""
    if not share:
        return batch
    dropped = (rng.host_uniform(len(batch.episodes[0].actions)) < share).tolist()
    episodes = []
    for episode, row in zip(batch.episodes, dropped, strict=True):
        pairs = zip(episode.actions, row, strict=True)
        episodes.append(replace(episode, actions=tuple(Action() if drop else act for act, drop in pairs)))
    return replace(batch, episodes=episodes)


def add_noise(
    latents: Float[Tensor, "b ..."], max_sigma: float, strength: Tensor, noise: Tensor
) -> Float[Tensor, "b ..."]:
    """Add noise with a standard deviation of `strength`, in [0, 1], times `max_sigma` to each sample.

    In a rollout the context is generated and therefore inexact.
    """
    return latents + max_sigma * strength.view(-1, *[1] * (latents.dim() - 1)) * noise


def label(batch: Batch, name: str, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Stack a label of all episodes on the CPU: values `[b, *shape]`, and which rows `[b]` have it.

    Rows whose source has no such label are zeros.

    Raises:
        ConfigError: one has another shape, such as that of the latent cells of another codec.
    """
    values = torch.zeros(len(batch.episodes), *shape)
    known = torch.zeros(len(batch.episodes), dtype=torch.bool)
    for row, episode in enumerate(batch.episodes):
        found = (episode.labels or {}).get(name)
        if found is None:
            continue
        if found.shape != tuple(shape):
            raise ConfigError(
                f"The label {name!r} of {episode.name!r} has the shape {found.shape}, and the model needs "
                f"{tuple(shape)}; make the labels of your world for its latent cells (model.codec)."
            )
        values[row] = torch.from_numpy(found)
        known[row] = True
    return values, known
