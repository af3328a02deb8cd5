"""What a loss is made of, so that it does not matter how its episodes are spread over processes.

A term is a sum over rows divided by a count over the whole step. Losses add up over microbatches and
processes; the counts are known before the first backward pass; the random numbers of a row belong to its
episode. A step on any mesh is then the step of one process.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from worldmodel.data.loader import Batch
from worldmodel.models.vision.adapter import Observation
from worldmodel.types import Action

Losses = dict[str, Tensor]
"""Terms by name, summed over the rows of a microbatch."""


class SampleRng:
    """Random numbers for the rows of a batch, each row from a stream of its own.

    `keys` name the streams: whoever computes a row draws the same numbers for it.
    """

    def __init__(
        self,
        keys: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.device, self.dtype = device, dtype
        self.streams = []
        for key in keys:
            state = np.random.SeedSequence(tuple(key)).generate_state(1, np.uint64)[0]
            self.streams.append(torch.Generator(device).manual_seed(int(state >> 1)))

    def normal(self, *shape: int) -> Float[Tensor, "b ..."]:
        """Draw `[b, *shape]` from the standard normal law."""
        drawn = torch.stack([torch.randn(shape, generator=s, device=self.device) for s in self.streams])
        return drawn.to(self.dtype)

    def uniform(self, *shape: int) -> Float[Tensor, "b ..."]:
        """Draw `[b, *shape]` from [0, 1)."""
        drawn = torch.stack([torch.rand(shape, generator=s, device=self.device) for s in self.streams])
        return drawn.to(self.dtype)

    def below(self, high: int, *shape: int) -> Int[Tensor, "b ..."]:
        """Draw whole numbers `[b, *shape]` from 0 to `high - 1`."""
        return (self.uniform(*shape) * high).long().clamp(max=high - 1)


@dataclass(frozen=True)
class Prepared:
    """A microbatch as an objective wants it: nothing in it needs gradients."""

    batch: Batch
    chance: SampleRng
    counts: dict[str, float]
    """Denominators of the terms, of this microbatch alone."""
    content: Any
    """What the frozen parts made of the episodes, as the objective defines it."""
    tokens: int = 0
    """Positions that pass the backbone."""


@dataclass(frozen=True)
class Rounds:
    """Episodes as latents: what was seen before each round and what came of it."""

    context: Float[Tensor, "b r s c h w"]
    target: Float[Tensor, "b r t c h w"]
    changed: Bool[Tensor, "b r t h w"]
    """Cells that differ from the context: few, and all that an action is about."""
    frames: Float[Tensor, "b r f 3 H W"] | None = None
    """Pixels seen before each round, for an encoder that looks at those."""

    def counts(self) -> dict[str, float]:
        """Count changed and unchanged cells: each kind carries half of the loss, few as the former are."""
        changed = float(self.changed.sum())
        return {"changed": changed, "unchanged": self.changed.numel() - changed}

    def errors(self, forecast: Float[Tensor, "b r t c h w"]) -> Losses:
        """Sum squared errors over changed and over unchanged cells, averaged over channels."""
        error = (forecast - self.target).pow(2).mean(dim=3)
        mask = self.changed.to(error.dtype)
        return {"changed": (error * mask).sum(), "unchanged": (error * (1 - mask)).sum()}


@dataclass(frozen=True)
class Asked:
    """Observations with a prompt and the text that should follow."""

    seen: list[Observation]
    prompts: list[str | None]
    answers: list[str]


def drop_actions(batch: Batch, chance: SampleRng, share: float) -> Batch:
    """Replace a share of the actions by the null action, so that a world also learns to go on by itself."""
    if not share:
        return batch
    dropped = (chance.uniform(len(batch.episodes[0].actions)) < share).tolist()
    episodes = []
    for episode, row in zip(batch.episodes, dropped, strict=True):
        pairs = zip(episode.actions, row, strict=True)
        episodes.append(replace(episode, actions=tuple(Action() if gone else act for act, gone in pairs)))
    return replace(batch, episodes=episodes)


def noisy(
    latents: Float[Tensor, "b ..."], level: float, strength: Tensor, noise: Tensor
) -> Float[Tensor, "b ..."]:
    """Add noise of a strength drawn per sample from U(0, level): the model's own latents are not exact."""
    return latents + level * strength.view(-1, *[1] * (latents.dim() - 1)) * noise


def reconstruction_error(
    made: Float[Tensor, "b t 3 h w"], truth: Float[Tensor, "b t 3 h w"]
) -> Float[Tensor, " b"]:
    """Compare pixels; foreground and its edges count more, since shapes live there."""
    error = made - truth
    return (foreground_weight(truth) * (error.abs() + 2 * error.pow(2))).flatten(1).mean(dim=1)


def foreground_weight(frames: Float[Tensor, "b t 3 h w"]) -> Float[Tensor, "b t 1 h w"]:
    """Weigh pixels that differ from the clip's median colour five times, those on an outline ten times."""
    median = frames.flatten(3).median(dim=3).values[..., None, None]
    inside = ((frames - median).abs().amax(dim=2) > 0.3).to(frames.dtype)
    grown = F.max_pool2d(inside, 3, stride=1, padding=1)
    shrunk = 1 - F.max_pool2d(1 - inside, 3, stride=1, padding=1)
    return (1 + 4 * inside + 5 * (grown - shrunk))[:, :, None]


def label(batch: Batch, name: str, shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Stack a label of all episodes: values `[b, *shape]`, and which rows `[b]` have it.

    Rows whose source knows no such label are zeros.
    """
    values = torch.zeros(len(batch.episodes), *shape)
    known = torch.zeros(len(batch.episodes), dtype=torch.bool)
    for row, episode in enumerate(batch.episodes):
        found = (episode.labels or {}).get(name)
        if found is not None and found.shape == tuple(shape):
            values[row], known[row] = torch.from_numpy(found), True
    return values.to(device), known.to(device)
