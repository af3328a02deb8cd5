"""One round of any number of worlds, batch first: the only implementation.

Sessions, vector environments and evaluation call `play_round`. The server runs the same steps, and awaits its
engine and its denoising loop in between, so that rounds of many clients share batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from worldmodel import batch
from worldmodel.diffusion import swin
from worldmodel.diffusion.sampler import Chunk
from worldmodel.diffusion.step_cache import StepCache
from worldmodel.errors import ConfigError
from worldmodel.media.tensors import to_frames
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.backbone.prefix_cache import History, PrefixCache, remembered
from worldmodel.models.conditioning import Condition
from worldmodel.models.vision.adapter import EncodedObservation, Observation
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.state import Clips, WorldState, encode_context, film_frames, observe
from worldmodel.types import Action


class Engine(Protocol):
    """Runs the backbone."""

    def predict_states(self, histories: Sequence[History], num_queries: int) -> Float[Tensor, "b n d"]:
        """Return the hidden states at the query positions of the newest round of every history."""
        ...


class LocalEngine:
    """The backbone in this process, with a cache of the prefixes that it has computed.

    Histories whose cached and new lengths agree run as one batch.
    """

    def __init__(self, backbone: Backbone, max_cache_bytes: int = 2**28) -> None:
        self.backbone, self.cache = backbone, PrefixCache(backbone, max_cache_bytes)

    @torch.no_grad()
    def predict_states(self, histories: Sequence[History], num_queries: int) -> Float[Tensor, "b n d"]:
        """Return the hidden states at the query positions, computing only new positions."""
        states: dict[int, Tensor] = {}
        for group in self.cache.groups(histories):
            ends = torch.full((len(group.rows), 1), group.embeds.shape[1])
            predicted = self.backbone.predict_states(group.embeds, ends, num_queries, group.cache)[:, 0]
            states |= dict(zip(group.rows, predicted, strict=True))
            self.cache.store(group)
        return torch.stack([states[row] for row in range(len(histories))])


@dataclass(frozen=True)
class SamplingParams:
    """Settings of the sampler."""

    num_inference_steps: int
    """0 decodes the regressed forecast, without the generator."""
    guidance_scale: float = 1.0
    negative_prompt: str = ""
    """Text that guidance leads away from, where the generator reads text."""


@dataclass(frozen=True)
class RoundInputs:
    """A round before the backbone runs; actions and histories are one per world, in order."""

    worlds: tuple[WorldState, ...]
    actions: tuple[Action, ...]
    histories: tuple[History, ...]

    @classmethod
    def join(cls, parts: "Sequence[RoundInputs]") -> "RoundInputs":
        """Return rounds that were prepared apart as one."""
        worlds, actions, histories = (
            tuple(item for part in parts for item in getattr(part, name))
            for name in ("worlds", "actions", "histories")
        )
        return cls(worlds, actions, histories)

    def split(self) -> "list[RoundInputs]":
        """Return the rounds of states of one world each apart."""
        rows = zip(self.worlds, self.actions, self.histories, strict=True)
        return [RoundInputs((world,), (action,), (history,)) for world, action, history in rows]

    @property
    def context(self) -> Float[Tensor, "b s c h w"]:
        """Latent frames that the round continues."""
        return torch.cat([world.context for world in self.worlds])

    @property
    def sizes(self) -> list[int]:
        """Number of worlds in each state."""
        return [len(world) for world in self.worlds]


@torch.no_grad()
def play_round(
    model: WorldModel,
    engine: Engine,
    worlds: Sequence[WorldState],
    actions: Sequence[Action],
    params: SamplingParams,
) -> list[WorldState]:
    """Play one round of every world as one batch; each comes out as it would alone, up to rounding.

    Raises:
        InputError: the model does not take one of the actions; no world has changed then.
    """
    inputs = prepare(model, worlds, actions)
    states = engine.predict_states(inputs.histories, model.config.num_queries)
    condition = model.condition(states, inputs.context, inputs.actions)
    chunks = start_chunks(model, inputs, condition, params)
    return finish(model, inputs, states, chunks, model.denoise(chunks))


@torch.no_grad()
def start_worlds(model: WorldModel, frames: Clips, seeds: tuple[int, ...]) -> WorldState:
    """Start worlds from an image or a video each, of which the newest `film_frames` frames count.

    The last rounds of a video are observed with the null action, so the history holds what moved in it.
    """
    frames = frames[:, -film_frames(model.config) :]
    count, chunk = frames.shape[1], model.config.chunk_frames
    first = count - chunk * min((count - 1) // chunk, model.config.history_rounds)
    world = WorldState.from_frames(model, frames, seeds)
    if first == count:
        return world
    seen = WorldState.from_frames(model, frames[:, :first], seeds)
    for start in range(first, count, chunk):
        seen = observe_round(model, seen, frames[:, start : start + chunk], (Action(),) * len(seeds))
    return replace(world, histories=seen.histories)


@torch.no_grad()
def observe_round(
    model: WorldModel, world: WorldState, frames: Clips, actions: Sequence[Action]
) -> WorldState:
    """Add a round whose outcome was observed instead of generated.

    Raises:
        InputError: the model does not take one of the actions.
    """
    inputs = prepare(model, [world], actions)
    moved = zip(inputs.actions, world.cameras, strict=True)
    return replace(
        WorldState.from_frames(model, frames, world.seeds),
        round=world.round + 1,
        histories=inputs.histories,
        cameras=tuple(action.move_camera(camera) for action, camera in moved),
        previous_latents=world.context[:, -1:],
        previous_frames=world.frames[:, -1:],
    )


def prepare(model: WorldModel, worlds: Sequence[WorldState], actions: Sequence[Action]) -> RoundInputs:
    """Encode observations and actions, and append them to the histories.

    A history of `context_rounds` rounds first forgets all but the newest `history_rounds`, so that the cost
    of a round is bounded however long a rollout is.

    Raises:
        InputError: the model does not take one of the actions.
    """
    histories: list[History] = []
    actions = [action.of_round(model.config.action.per_round) for action in actions]
    cameras = (camera for world in worlds for camera in world.cameras)
    resolved = [action.relative_to(camera) for action, camera in zip(actions, cameras, strict=True)]
    taken = iter(model.encode_action(resolved))
    observed = _encode(model, [observe(model, world.context, world.frames) for world in worlds])
    for world, seen in zip(worlds, observed, strict=True):
        for history, tokens, queries in zip(world.histories, seen.tokens, seen.queries, strict=True):
            parts = tokens, next(taken), queries
            histories.append((*remembered(history, model.config.history_rounds), torch.cat(parts)))
    return RoundInputs(tuple(worlds), tuple(actions), tuple(histories))


def start_chunks(
    model: WorldModel, inputs: RoundInputs, condition: Condition, params: SamplingParams
) -> list[Chunk[Condition]]:
    """Return the chunks of a round at the start of denoising, one per state.

    Noise depends on a world's seed and the round's number alone, so a fork that takes the same action makes
    the same frames.

    Raises:
        ConfigError: 0 steps, and the model regresses no forecast.
    """
    context, overlapping = inputs.context, model.config.sampler == "swin"
    branches = [batch.split(condition, inputs.sizes)]
    if params.guidance_scale != 1.0:
        null = model.null_condition(context, params.negative_prompt)
        branches.append(batch.split(null, inputs.sizes))
    chunks = []
    for world, *conditions in zip(inputs.worlds, *branches, strict=True):
        draws = [(seed, world.round) for seed in world.seeds]
        latents, past = draw_noise(draws, model.config.latent_shape).to(context), world.context
        if overlapping:  # the noise of the context has random streams of its own
            draws = [(-1 - seed, index) for seed, index in draws]
            past = swin.renoise(past, draw_noise(draws, past.shape[1:]).to(context))
        if not params.num_inference_steps:
            if conditions[0].forecast is None:
                raise ConfigError("This model regresses no forecast; use 1 or more denoising steps.")
            latents, overlapping = conditions[0].forecast, False
        solver = model.generator.solver(params.num_inference_steps)
        chunks.append(
            Chunk(
                latents,
                solver,
                tuple(conditions),
                past,
                params.guidance_scale,
                overlapping,
                world.trace,
                StepCache(threshold) if (threshold := model.config.cache_threshold) else None,
                model.config.guidance_interval,
            )
        )
    return chunks


def finish(
    model: WorldModel,
    inputs: RoundInputs,
    states: Float[Tensor, "b n d"],
    chunks: Sequence[Chunk[Condition]],
    latents: Sequence[Float[Tensor, "b t c h w"]],
) -> list[WorldState]:
    """Decode the latents of a round, read its outcomes from the states, and return the worlds after it.

    A blank world starts from the whole clip that a text describes.
    """
    if all(world.is_blank for world in inputs.worlds):
        clips = _clips(model.decode(torch.cat(list(latents))), inputs.sizes)
        rows = zip(inputs.worlds, latents, clips, strict=True)
        return [WorldState.from_latents(model, made, frames, world.seeds) for world, made, frames in rows]
    clips = _clips(model.decode(torch.cat(list(latents)), inputs.context), inputs.sizes)
    histories, actions = iter(inputs.histories), iter(inputs.actions)
    outcomes = iter(model.outcome.read(states) if model.outcome is not None else ())
    return [
        replace(
            world,
            context=encode_context(model, made, frames),
            latents=made,
            frames=frames,
            histories=tuple(next(histories) for _ in world.seeds),
            cameras=tuple(next(actions).move_camera(camera) for camera in world.cameras),
            round=world.round + 1,
            previous_latents=world.context[:, -1:],
            previous_frames=world.frames[:, -1:],
            outcomes=tuple(islice(outcomes, len(world))),
            trace=chunk.trace,
        )
        for world, chunk, made, frames in zip(inputs.worlds, chunks, latents, clips, strict=True)
    ]


def draw_noise(draws: Sequence[tuple[int, int]], shape: Sequence[int]) -> Float[Tensor, "b t c h w"]:
    """Draw the noise of rounds, each given by a world's seed and the round's index (-1: the first frame)."""
    rows = []
    for seed, index in draws:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + index + 1) % 2**63)
        rows.append(torch.randn(tuple(shape), generator=generator))
    return torch.stack(rows)


def _encode(model: WorldModel, observations: Sequence[Observation]) -> list[EncodedObservation]:
    """Encode the observations of several states, those of equal shape as one batch."""
    encoded: dict[int, EncodedObservation] = {}
    for shape in {each.shape for each in observations}:
        rows = [row for row, each in enumerate(observations) if each.shape == shape]
        together = model.encode_observation(Observation.stack([observations[row] for row in rows]))
        parts = batch.split(together, [len(observations[row].latents) for row in rows])
        encoded |= dict(zip(rows, parts, strict=True))
    return [encoded[row] for row in range(len(observations))]


def _clips(pixels: Float[Tensor, "b t 3 h w"], sizes: Sequence[int]) -> list[Clips]:
    frames = np.stack([to_frames(clip) for clip in pixels])
    return np.split(frames, np.cumsum(sizes)[:-1])
