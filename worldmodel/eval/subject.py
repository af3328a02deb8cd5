"""What is evaluated: anything that plays, imagines, says and codes batches of worlds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from worldmodel.data.transforms import to_frames, to_tensor
from worldmodel.models.prefix import History, PrefixCache
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout import noise_of_round
from worldmodel.types import Action

Pictures = UInt8[np.ndarray, "b h w 3"]
Clips = UInt8[np.ndarray, "b t h w 3"]
Observation = tuple[UInt8[np.ndarray, "t h w 3"], ...]
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

    def read(self, observations: Sequence[Observation], prompts: Sequence[str]) -> list[str]:
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


@torch.no_grad()
def play(
    model: WorldModel,
    context: Float[Tensor, "b c h w"],
    actions: Sequence[Action],
    seeds: Sequence[int],
    cache: PrefixCache,
    index: int = 0,
    histories: Sequence[History] | None = None,
    num_inference_steps: int | None = None,
) -> Played:
    """Play one round of many worlds at once; each sample comes out as `Session.step` makes it alone.

    Args:
        model: The model.
        context: The latent frame that each world starts from.
        actions: One action a world.
        seeds: One seed a world, as a session's.
        cache: Keys and values of rounds before; it remembers this one.
        index: Number of the round, counted from 0.
        histories: The rounds before, world by world; None where there were none.
        num_inference_steps: Denoising steps; None takes the model's own number, 0 decodes the forecast.

    Raises:
        InputError: The model does not take one of the actions.
    """
    steps = model.config.num_inference_steps if num_inference_steps is None else num_inference_steps
    before = histories or [()] * len(actions)
    embeds = model.round_embeds(context, actions)
    now: list[History] = [(*history, row) for history, row in zip(before, embeds, strict=True)]
    states = torch.stack(cache.states(now, model.config.num_queries))
    condition = model.condition(states, context)
    latents = condition.forecast
    if steps:
        noise = torch.stack([noise_of_round(seed, index, latents.shape[1:]) for seed in seeds]).to(context)
        latents = model.denoise(condition, context, noise, steps, model.config.guidance_scale)
    return Played(latents, _to_clips(model.decode(latents)), now)


class ModelWorlds:
    """Rollouts of one model in step: latents are fed back and the cache starts anew as in a `Session`."""

    def __init__(
        self,
        model: WorldModel,
        context: Float[Tensor, "b c h w"],
        seeds: Sequence[int],
        num_inference_steps: int | None = None,
        on_work: Callable[[int], None] = count_nothing,
    ) -> None:
        self._model, self._context, self._seeds = model, context, seeds
        self._steps, self._on_work = num_inference_steps, on_work
        self._cache, self._index = PrefixCache(model.backbone), 0
        self._histories: list[History] | None = None

    def step(self, actions: Sequence[Action]) -> Clips:
        """Play one round of every world."""
        if self._index % self._model.config.history_rounds == 0:
            self._histories = None
        now, steps = (self._index, self._histories), self._steps
        played = play(self._model, self._context, actions, self._seeds, self._cache, *now, steps)
        self._context, self._histories = played.latents[:, -1], played.histories
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
        context = self.model.codec.encode(self._pixels(pictures[:, None]))[:, -1]
        return ModelWorlds(self.model, context, seeds, self.steps, self._on_work)

    @torch.no_grad()
    def imagine(self, texts: Sequence[str], seeds: Sequence[int]) -> Pictures:
        """Make a picture of every text, as a session's `reset(text=...)` does."""
        unseen = self.model.unseen[None].expand(len(texts), -1, -1, -1)
        actions = [Action.of(text) for text in texts]
        played = play(
            self.model, unseen, actions, seeds, PrefixCache(self.model.backbone), -1, None, self.steps
        )
        self._on_work(len(texts))
        return played.frames[:, -1]

    @torch.no_grad()
    def read(self, observations: Sequence[Observation], prompts: Sequence[str]) -> list[str]:
        """Say something about every observation; prompts of one length are decoded together."""
        columns = zip(*observations, strict=True)
        latents = torch.cat([self.model.codec.encode(self._pixels(column)) for column in columns], dim=1)
        lengths = [len(self.model.backbone.token_ids(prompt)) for prompt in prompts]
        said = [""] * len(prompts)
        for length in sorted(set(lengths)):
            rows = [row for row, own in enumerate(lengths) if own == length]
            sequences = self.model.read_rows(latents[rows].unbind(), [prompts[row] for row in rows])
            prefix = torch.stack([sequence for sequence, _ in sequences])
            texts = self.model.backbone.decode_text(prefix, self.model.backbone.new_cache(), MAX_TEXT_TOKENS)
            for row, text in zip(rows, texts, strict=True):
                said[row] = text
        self._on_work(len(prompts))
        return said

    @torch.no_grad()
    def reconstruct(self, clips: Clips) -> Clips:
        """Encode clips and decode them again."""
        pixels = self.model.decode(self.model.codec.encode(self._pixels(clips)))[:, : clips.shape[1]]
        self._on_work(len(clips))
        return _to_clips(pixels)

    def with_steps(self, num_inference_steps: int) -> "ModelSubject":
        """Return the same model at another number of denoising steps; 0 shows the forecast alone."""
        return ModelSubject(self.model, num_inference_steps, self._on_work)

    def _pixels(self, clips: Sequence[np.ndarray] | Clips) -> Float[Tensor, "b t 3 h w"]:
        return to_tensor(list(clips)).to(self.model.unseen.device)


def _to_clips(pixels: Float[Tensor, "b t 3 h w"]) -> Clips:
    return np.stack([to_frames(clip) for clip in pixels])
