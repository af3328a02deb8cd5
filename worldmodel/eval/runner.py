"""What is evaluated: anything that plays, imagines, says and codes batches of worlds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from worldmodel.diffusion.swin import Trail
from worldmodel.errors import ConfigError
from worldmodel.media.tensors import to_frames, to_tensor
from worldmodel.models.backbone.prefix_cache import History, PrefixCache
from worldmodel.models.conditioning import Condition
from worldmodel.models.vision.adapter import Observation
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.session import generate
from worldmodel.types import Action

Pictures = UInt8[np.ndarray, "b h w 3"]
Clips = UInt8[np.ndarray, "b t h w 3"]
Shown = tuple[UInt8[np.ndarray, "t h w 3"], ...]
"""One clip, or what was seen before and after."""
MAX_TEXT_TOKENS = 96
"""Longest text that is read, as in `WorldModel.read`."""


def count_nothing(samples: int) -> None:
    """Tell nobody that so many samples are done."""


class Worlds(Protocol):
    """A batch of rollouts that go on together."""

    def step(self, actions: Sequence[Action]) -> Clips:
        """Play one round of every world."""
        ...


class Subject(Protocol):
    """What is evaluated; the tests put the true simulator in a model's place."""

    def open(self, pictures: Pictures, seeds: Sequence[int]) -> Worlds:
        """Start a world from every picture."""
        ...

    def imagine(self, texts: Sequence[str], seeds: Sequence[int]) -> Pictures:
        """Make a picture of every text."""
        ...

    def read(self, observations: Sequence[Shown], prompts: Sequence[str]) -> list[str]:
        """Say something about every observation."""
        ...

    def reconstruct(self, clips: Clips) -> Clips:
        """Encode clips and decode them again."""
        ...

    def with_steps(self, num_inference_steps: int) -> "Subject":
        """Return the same subject at another number of denoising steps; 0 shows the forecast alone."""
        ...


@dataclass(frozen=True)
class Played:
    """One round of a batch of worlds."""

    latents: Float[Tensor, "b t c h w"]
    frames: Clips
    histories: list[History]
    """What the backbone now looks back on, world by world."""
    trail: Trail[Condition] | None
    """What the next round follows, where chunks overlap."""


@torch.no_grad()
def play(
    model: WorldModel,
    seen: Observation,
    actions: Sequence[Action],
    seeds: Sequence[int],
    cache: PrefixCache,
    index: int = 0,
    histories: Sequence[History] | None = None,
    num_inference_steps: int | None = None,
    trail: Trail[Condition] | None = None,
) -> Played:
    """Play one round of many worlds at once; each sample comes out as `Session.step` makes it alone.

    Args:
        model: The model.
        seen: What each world goes on from: the latents of its context, and pixels if the model wants them.
        actions: One action a world.
        seeds: One seed a world, as a session's.
        cache: Keys and values of rounds before; it remembers this one.
        index: Number of the round, counted from 0.
        histories: The rounds before, world by world; None where there were none.
        num_inference_steps: Denoising steps; None takes the model's own number, 0 decodes the forecast.
        trail: What the round before left, where chunks overlap.

    Raises:
        InputError: The model does not take one of the actions.
    """
    steps = model.config.num_inference_steps if num_inference_steps is None else num_inference_steps
    before = histories or [()] * len(actions)
    context = seen.latents
    embeds = model.round_embeds(seen, actions)
    now: list[History] = [(*history, row) for history, row in zip(before, embeds, strict=True)]
    states = torch.stack(cache.states(now, model.config.num_queries))
    condition = model.condition(states, context, actions)
    if steps:
        draws = [(seed, index) for seed in seeds]
        latents, trail = generate(model, condition, context, draws, steps, model.config.guidance_scale, trail)
    elif condition.forecast is None:
        raise ConfigError("This model forecasts no latents to show; use 1 or more denoising steps.")
    else:
        latents = condition.forecast
    return Played(latents, _to_clips(model.decode(latents, context)), now, trail)


class ModelWorlds:
    """Rollouts of one model in step: latents are fed back and the cache starts anew as in a `Session`."""

    def __init__(
        self,
        model: WorldModel,
        seen: Observation,
        seeds: Sequence[int],
        num_inference_steps: int | None = None,
        on_work: Callable[[int], None] = count_nothing,
    ) -> None:
        self._model, self._seen, self._seeds = model, seen, seeds
        self._steps, self._on_work = num_inference_steps, on_work
        self._cache, self._index = PrefixCache(model.backbone), 0
        self._histories: list[History] | None = None
        self._trail: Trail[Condition] | None = None

    def step(self, actions: Sequence[Action]) -> Clips:
        """Play one round of every world."""
        if self._index % self._model.config.history_rounds == 0:
            self._histories = None
        now = self._index, self._histories, self._steps, self._trail
        played = play(self._model, self._seen, actions, self._seeds, self._cache, *now)
        pixels = None
        if self._model.codec.causal or self._model.vision.needs_frames:
            pixels = to_tensor(list(played.frames)).to(played.latents)
        looked = None if pixels is None else self._model.look(pixels)
        self._seen = Observation(self._model.context(played.latents, pixels), looked)
        self._histories, self._trail = played.histories, played.trail
        self._index += 1
        self._on_work(len(actions))
        return played.frames


class ModelSubject:
    """A world model as it is: in fp32, with its own number of steps and guidance unless told otherwise.

    Args:
        model: The model.
        num_inference_steps: Denoising steps; None takes the model's own number.
        on_work: Called with a number of samples whenever so many are done.
    """

    def __init__(
        self,
        model: WorldModel,
        num_inference_steps: int | None = None,
        on_work: Callable[[int], None] = count_nothing,
    ) -> None:
        self.model, self.steps, self._on_work = model.eval(), num_inference_steps, on_work

    @torch.no_grad()
    def open(self, pictures: Pictures, seeds: Sequence[int]) -> Worlds:
        """Start a world from every picture, each a clip of one frame."""
        frames = self._pixels(pictures[:, None])
        seen = self.model.observe(frames)
        context = self.model.context(seen.latents, frames)
        return ModelWorlds(self.model, replace(seen, latents=context), seeds, self.steps, self._on_work)

    @torch.no_grad()
    def imagine(self, texts: Sequence[str], seeds: Sequence[int]) -> Pictures:
        """Make a picture of every text, as a session's `reset(text=...)` does."""
        nothing = self.model.nothing(len(texts))
        actions = [Action.of(text) for text in texts]
        played = play(
            self.model, nothing, actions, seeds, PrefixCache(self.model.backbone), -1, None, self.steps
        )
        self._on_work(len(texts))
        return played.frames[:, -1]

    @torch.no_grad()
    def read(self, observations: Sequence[Shown], prompts: Sequence[str]) -> list[str]:
        """Say something about every observation; prompts of one length are decoded together."""
        parts = [self.model.observe(self._pixels(column)) for column in zip(*observations, strict=True)]
        frames = [part.frames for part in parts if part.frames is not None]
        latents = torch.cat([part.latents for part in parts], dim=1)
        seen = Observation(latents, torch.cat(frames, dim=1) if frames else None).unstack()
        lengths = [len(self.model.backbone.token_ids(prompt)) for prompt in prompts]
        said = [""] * len(prompts)
        for length in sorted(set(lengths)):
            rows = [row for row, own in enumerate(lengths) if own == length]
            asked = [seen[row] for row in rows]
            sequences = self.model.read_rows(asked, [prompts[row] for row in rows])
            prefix = torch.stack([sequence for sequence, _ in sequences])
            texts = self.model.backbone.decode_text(prefix, self.model.backbone.new_cache(), MAX_TEXT_TOKENS)
            for row, text in zip(rows, texts, strict=True):
                said[row] = text
        self._on_work(len(prompts))
        return said

    @torch.no_grad()
    def reconstruct(self, clips: Clips) -> Clips:
        """Encode clips and decode them again."""
        pixels = self.model.decode(self.model.observe(self._pixels(clips)).latents)[:, : clips.shape[1]]
        self._on_work(len(clips))
        return _to_clips(pixels)

    def with_steps(self, num_inference_steps: int) -> "ModelSubject":
        """Return the same model at another number of denoising steps; 0 shows the forecast alone."""
        return ModelSubject(self.model, num_inference_steps, self._on_work)

    def _pixels(self, clips: Sequence[np.ndarray] | Clips) -> Float[Tensor, "b t 3 h w"]:
        return to_tensor(list(clips)).to(self.model.unseen.device)


def _to_clips(pixels: Float[Tensor, "b t 3 h w"]) -> Clips:
    return np.stack([to_frames(clip) for clip in pixels])
