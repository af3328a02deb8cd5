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
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from worldmodel import batch
from worldmodel.actions import Action
from worldmodel.diffusion import swin
from worldmodel.diffusion.sampler import Chunk
from worldmodel.diffusion.solver import EulerSolver
from worldmodel.episodes import PredictedState
from worldmodel.errors import ConfigError
from worldmodel.media.tensors import to_frames
from worldmodel.models.backbone.causal_lm import Backbone
from worldmodel.models.backbone.prefix_cache import History, PrefixCache, remembered
from worldmodel.models.code import CodeSampling
from worldmodel.models.conditioning import Condition
from worldmodel.models.state import State
from worldmodel.models.vision.adapter import EncodedObservation, Observation
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.state import Clips, WorldState, encode_context, film_frames, observe

CODE_STREAM = 2**61
"""Keeps the random numbers of codes apart from those of noise."""


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
    temperature: float = 1.0
    """Of the code of states, as of language models: 0 takes the most likely future."""
    top_k: int = 0
    """Only so many of the most likely values of each variable of the code are drawn; 0 is all."""


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
    code: Float[Tensor, "b v k"] | None = None,
) -> list[WorldState]:
    """Play one round of every world as one batch; each comes out as it would alone, up to rounding.

    With a `code` the future that it names happens, and none is drawn.

    Raises:
        InputError: the model does not take one of the actions; no world has changed then.
    """
    inputs = prepare(model, worlds, actions)
    hidden = engine.predict_states(inputs.histories, model.config.num_queries)
    state = read_state(model, inputs, hidden, params, code)
    condition = model.condition(state, inputs.context, inputs.actions)
    chunks = start_chunks(model, inputs, condition, params)
    return finish(model, inputs, state, chunks, model.denoise(chunks))


@torch.no_grad()
def start_worlds(
    model: WorldModel,
    frames: Clips,
    seeds: tuple[int, ...],
    actions: Sequence[Sequence[Action]] = (),
) -> WorldState:
    """Start worlds from an image or a video each, of which the newest `film_frames` frames count.

    The last rounds of a video are observed, so the history holds what moved in it.

    Args:
        model: The model.
        frames: What was observed, of the same length in all worlds.
        seeds: The seed of every world.
        actions: Of every world, what was done in the last rounds of its video, the newest last; rounds
            without an action have the null action.

    Raises:
        InputError: the model does not take one of the actions.
    """
    frames = frames[:, -film_frames(model.config) :]
    count, chunk = frames.shape[1], model.config.chunk_frames
    # Frames before the last whole rounds are the first observation; at least one frame must remain for it.
    rounds = min((count - 1) // chunk, model.config.history_rounds)
    world = WorldState.from_frames(model, frames, seeds)
    if not rounds:
        return world
    done = [[Action()] * rounds + list(each) for each in actions or [()] * len(seeds)]
    seen = WorldState.from_frames(model, frames[:, : count - rounds * chunk], seeds)
    for left in range(rounds, 0, -1):
        clip = frames[:, count - left * chunk : count - (left - 1) * chunk]
        seen = observe_round(model, seen, clip, [each[-left] for each in done])
    # All frames are encoded at once, as the model would see an image or clip alone; only the memory
    # comes from playing the rounds one by one.
    return replace(world, histories=seen.histories, code=seen.code)


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
    seen = WorldState.from_frames(model, frames, world.seeds)
    return replace(
        seen,
        context=encode_context(model, seen.latents, frames, world.context),
        round=world.round + 1,
        histories=inputs.histories,
        cameras=tuple(action.move_camera(camera) for action, camera in moved),
        previous_latents=world.context[:, -1:],
        previous_frames=world.frames[:, -1:],
        code=observed_code(model, world.context, seen.latents),
    )


def prepare(model: WorldModel, worlds: Sequence[WorldState], actions: Sequence[Action]) -> RoundInputs:
    """Encode observations and actions, and append them to the histories.

    A history of `context_rounds` rounds first forgets all but the newest `history_rounds`, so that the cost
    of a round is bounded however long a rollout is.

    Raises:
        InputError: the model does not take one of the actions.
    """
    actions = [action.of_round(model.config.action.per_round) for action in actions]
    cameras = (camera for world in worlds for camera in world.cameras)
    resolved = [action.relative_to(camera) for action, camera in zip(actions, cameras, strict=True)]
    taken, observed = model.encode_action(resolved), _encode(model, worlds)
    parts = taken.rows(
        [tokens for seen in observed for tokens in seen.tokens],
        torch.cat([seen.queries for seen in observed]),
    )
    before = (history for world in worlds for history in world.histories)
    histories = (
        (*remembered(history, model.config.history_rounds), torch.cat(each))
        for history, each in zip(before, parts, strict=True)
    )
    return RoundInputs(tuple(worlds), tuple(actions), tuple(histories))


def read_state(
    model: WorldModel,
    inputs: RoundInputs,
    hidden: Float[Tensor, "b n d"],
    params: SamplingParams,
    code: Float[Tensor, "b v k"] | None = None,
) -> State:
    """Read the states of a round, and draw their codes if none is given.

    A draw depends on a world's seed and the round's number alone, as noise does.
    """
    draws = None
    if code is None and model.state is not None and model.state.code is not None:
        rounds = [(seed, world.round) for world in inputs.worlds for seed in world.seeds]
        draws = draw_uniform(rounds, model.state.code.length).to(hidden.device)
    return model.read_state(
        hidden,
        inputs.context,
        inputs.actions,
        code=code,
        draws=draws,
        sampling=CodeSampling(params.temperature, params.top_k),
    )


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
    # One condition per state; with guidance, a second one without the state.
    branches = [batch.split(condition, inputs.sizes)]
    if params.guidance_scale != 1.0:
        null = model.null_condition(context, params.negative_prompt)
        branches.append(batch.split(null, inputs.sizes))
    chunks = []
    for world, *conditions in zip(inputs.worlds, *branches, strict=True):
        draws = [(seed, world.round) for seed in world.seeds]
        # Drawn on the CPU, where equal seeds give equal numbers on every machine, then moved.
        latents, past = draw_noise(draws, model.config.latent_shape).to(context), world.context
        if overlapping:  # the noise of the context has random streams of its own
            draws = [(-1 - seed, index) for seed, index in draws]
            past = swin.renoise(past, draw_noise(draws, past.shape[1:]).to(context))
        if not params.num_inference_steps:
            if conditions[0].forecast is None:
                raise ConfigError("This model regresses no forecast; use 1 or more denoising steps.")
            latents, overlapping = conditions[0].forecast, False
            solver = EulerSolver.of(0)  # a generator of diffusers has no schedule without steps
        else:
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
                model.make_step_cache() if model.make_step_cache else None,
            )
        )
    return chunks


def finish(
    model: WorldModel,
    inputs: RoundInputs,
    state: State,
    chunks: Sequence[Chunk[Condition]],
    latents: Sequence[Float[Tensor, "b t c h w"]],
) -> list[WorldState]:
    """Decode the latents of a round, read its outcomes from the state, and return the worlds after it.

    A blank world starts from the whole clip that a text describes.
    """
    if all(world.is_blank for world in inputs.worlds):
        clips = _clips(model.decode(torch.cat(list(latents))), inputs.sizes)
        rows = zip(inputs.worlds, latents, clips, strict=True)
        return [WorldState.from_latents(model, made, frames, world.seeds) for world, made, frames in rows]
    clips = _clips(model.decode(torch.cat(list(latents)), inputs.context), inputs.sizes)
    histories, actions = iter(inputs.histories), iter(inputs.actions)
    head = None if model.state is None else model.state.outcome
    outcomes = iter(() if head is None else head.read(state.hidden))
    codes = [None] * len(inputs.worlds) if state.code is None else state.code.split(inputs.sizes)
    summaries = iter(_summaries(state))
    return [
        replace(
            world,
            context=encode_context(model, made, frames, world.context),
            latents=made,
            frames=frames,
            histories=tuple(next(histories) for _ in world.seeds),
            cameras=tuple(next(actions).move_camera(camera) for camera in world.cameras),
            round=world.round + 1,
            previous_latents=world.context[:, -1:],
            previous_frames=world.frames[:, -1:],
            outcomes=tuple(islice(outcomes, len(world))),
            code=code,
            states=tuple(islice(summaries, len(world))),
            trace=chunk.trace,
        )
        for world, chunk, made, frames, code in zip(inputs.worlds, chunks, latents, clips, codes, strict=True)
    ]


def draw_noise(draws: Sequence[tuple[int, int]], shape: Sequence[int]) -> Float[Tensor, "b t c h w"]:
    """Draw the noise of rounds, each given by a world's seed and the round's index (-1: the first frame)."""
    return torch.stack([torch.randn(tuple(shape), generator=_generator(*each)) for each in draws])


def draw_uniform(draws: Sequence[tuple[int, int]], count: int) -> Float[Tensor, "b v"]:
    """Draw numbers in [0, 1) for the codes of rounds, each given by a world's seed and the round's index."""
    return torch.stack(
        [torch.rand(count, generator=_generator(seed, index, CODE_STREAM)) for seed, index in draws]
    )


def _generator(seed: int, index: int, stream: int = 0) -> torch.Generator:
    # The stride keeps pairs of seed and round apart for a million rounds; the modulus brings large and
    # negative seeds into the range of the generator.
    return torch.Generator().manual_seed((seed * 1_000_003 + index + 1 + stream) % 2**63)


@torch.no_grad()
def observed_code(
    model: WorldModel, context: Float[Tensor, "b s c h w"], latents: Float[Tensor, "b t c h w"]
) -> Float[Tensor, "b v k"] | None:
    """Return the most likely code of a round that was observed; None for models without one."""
    if model.state is None or model.state.code is None or latents.shape[1] != model.config.chunk_latents:
        return None
    log_posterior = model.state.posterior(context, latents)
    return F.one_hot(log_posterior.argmax(dim=-1), log_posterior.shape[-1]).to(latents)


def _summaries(state: State) -> list[PredictedState]:
    """Return what users see of states, one per world."""
    if state.cells is None:
        return []
    features = state.cells.float().mean(dim=1).cpu().numpy()
    if state.code is None or state.log_probability is None:
        return [PredictedState(row) for row in features]
    values, likely = state.code.argmax(dim=-1).tolist(), state.log_probability.tolist()
    return [
        PredictedState(row, tuple(code), p) for row, code, p in zip(features, values, likely, strict=True)
    ]


def _encode(model: WorldModel, worlds: Sequence[WorldState]) -> list[EncodedObservation]:
    """Encode what worlds observe and the codes that led to it; observations of equal shape form a batch."""
    observations = [observe(model, model.unseen(world.context), world.frames) for world in worlds]
    encoded: dict[int, EncodedObservation] = {}
    for kind in {(each.shape, world.code is None) for each, world in zip(observations, worlds, strict=True)}:
        rows = [
            row for row, each in enumerate(observations) if (each.shape, worlds[row].code is None) == kind
        ]
        codes = [code for row in rows if (code := worlds[row].code) is not None]
        history = model.state.history(torch.cat(codes)) if model.state is not None and codes else None
        together = model.encode_observation(Observation.stack([observations[row] for row in rows]), history)
        parts = batch.split(together, [len(observations[row].latents) for row in rows])
        encoded |= dict(zip(rows, parts, strict=True))
    return [encoded[row] for row in range(len(observations))]


def _clips(pixels: Float[Tensor, "b t 3 h w"], sizes: Sequence[int]) -> list[Clips]:
    frames = np.stack([to_frames(clip) for clip in pixels])
    return np.split(frames, np.cumsum(sizes)[:-1])
