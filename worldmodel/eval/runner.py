"""The interface of evaluated models, and world models behind it."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from worldmodel.actions import Action
from worldmodel.episodes import Outcome
from worldmodel.media.tensors import to_frames, to_tensor
from worldmodel.models import text
from worldmodel.models.vision.adapter import Observation
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout import LocalEngine, SamplingParams, WorldState, play_round, start_worlds
from worldmodel.rollout.session import sampling_params
from worldmodel.rollout.state import newest_observation

Images = UInt8[np.ndarray, "b h w 3"]
Clips = UInt8[np.ndarray, "b t h w 3"]
Observed = tuple[UInt8[np.ndarray, "t h w 3"], ...]
"""The clip of an observation, or the clips before and after an action."""


def ignore_progress(samples: int) -> None:
    """Do nothing with the number of finished samples."""


class Worlds(Protocol):
    """A batch of rollouts that advance together."""

    def step(self, actions: Sequence[Action]) -> Clips:
        """Play one round of every world."""
        ...

    def ask(self, prompts: Sequence[str]) -> list[str]:
        """Answer a question about every world."""
        ...


class Subject(Protocol):
    """An evaluated model; tests also evaluate the true simulator through this interface."""

    def open(
        self, starts: Images | Clips, seeds: Sequence[int], actions: Sequence[Sequence[Action]] = ()
    ) -> Worlds:
        """Start a world from every image or video; `actions` are those of the last rounds of the videos."""
        ...

    def imagine(self, texts: Sequence[str], seeds: Sequence[int]) -> Clips:
        """Generate a clip from every text."""
        ...

    def read(self, observations: Sequence[Observed], prompts: Sequence[str]) -> list[str]:
        """Generate a text about every observation."""
        ...

    def reconstruct(self, clips: Clips) -> Clips:
        """Encode and decode clips."""
        ...

    def with_steps(self, num_inference_steps: int) -> "Subject":
        """Return the same subject with another number of denoising steps; 0 decodes the forecast."""
        ...


class ModelWorlds:
    """Rollouts of one model, played as one batch."""

    def __init__(
        self,
        model: WorldModel,
        state: WorldState,
        params: SamplingParams,
        on_work: Callable[[int], object] = ignore_progress,
    ) -> None:
        self._model, self._state, self._params, self._on_work = model, state, params, on_work
        self._engine = LocalEngine(model.backbone)

    def step(self, actions: Sequence[Action]) -> Clips:
        (self._state,) = play_round(self._model, self._engine, [self._state], actions, self._params)
        self._on_work(len(actions))
        return self._state.frames

    def ask(self, prompts: Sequence[str]) -> list[str]:
        """Answer a question about every world, as `Session.describe` does."""
        said = _read(self._model, newest_observation(self._model, self._state).unstack(), prompts)
        self._on_work(len(prompts))
        return said

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Reward and end of the last round of every world, if the model predicts them."""
        return self._state.outcomes


class ModelSubject:
    """A world model as a subject, in fp32 and with its own guidance.

    Args:
        model: The model.
        num_inference_steps: Denoising steps; None takes the model's own number.
        on_work: Called with the number of samples after each batch.
    """

    def __init__(
        self,
        model: WorldModel,
        num_inference_steps: int | None = None,
        on_work: Callable[[int], object] = ignore_progress,
    ) -> None:
        self.model, self._on_work = model.eval(), on_work
        self._params = sampling_params(model, num_inference_steps, None)

    @torch.no_grad()
    def open(
        self, starts: Images | Clips, seeds: Sequence[int], actions: Sequence[Sequence[Action]] = ()
    ) -> Worlds:
        films = starts if starts.ndim == 5 else starts[:, None]
        state = start_worlds(self.model, films, tuple(seeds), actions)
        return ModelWorlds(self.model, state, self._params, self._on_work)

    @torch.no_grad()
    def imagine(self, texts: Sequence[str], seeds: Sequence[int]) -> Clips:
        """Generate a clip from every text, as `Session.reset(text=...)` does."""
        blank = WorldState.blank(self.model, tuple(seeds))
        worlds = ModelWorlds(self.model, blank, self._params, self._on_work)
        return worlds.step([Action.of(description) for description in texts])

    @torch.no_grad()
    def read(self, observations: Sequence[Observed], prompts: Sequence[str]) -> list[str]:
        """Generate a text about every observation; prompts of equal length are decoded together."""
        parts = [self.model.observe(self._pixels(column)) for column in zip(*observations, strict=True)]
        frames = [part.frames for part in parts if part.frames is not None]
        latents = torch.cat([part.latents for part in parts], dim=1)
        seen = Observation(latents, torch.cat(frames, dim=1) if frames else None).unstack()
        said = _read(self.model, seen, prompts)
        self._on_work(len(prompts))
        return said

    @torch.no_grad()
    def reconstruct(self, clips: Clips) -> Clips:
        pixels = self.model.decode(self.model.observe(self._pixels(clips)).latents)[:, : clips.shape[1]]
        self._on_work(len(clips))
        return _to_clips(pixels)

    def with_steps(self, num_inference_steps: int) -> "ModelSubject":
        return ModelSubject(self.model, num_inference_steps, self._on_work)

    def _pixels(self, clips: Sequence[np.ndarray] | Clips) -> Float[Tensor, "b t 3 h w"]:
        return to_tensor(list(clips), self.model.device)


@torch.no_grad()
def _read(model: WorldModel, seen: Sequence[Observation], prompts: Sequence[str]) -> list[str]:
    """Decode a text about every observation; sequences of equal length form a batch."""
    sequences = [row for row, _ in text.sequences(model, seen, prompts)]
    said = [""] * len(prompts)
    for length in sorted({len(row) for row in sequences}):
        rows = [row for row, own in enumerate(sequences) if len(own) == length]
        prefix = torch.stack([sequences[row] for row in rows])
        decoded = model.backbone.decode_text(prefix, model.backbone.new_cache(), text.MAX_TOKENS)
        for row, answer in zip(rows, decoded, strict=True):
            said[row] = answer
    return said


def _to_clips(pixels: Float[Tensor, "b t 3 h w"]) -> Clips:
    return np.stack([to_frames(clip) for clip in pixels])
