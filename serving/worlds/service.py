"""Live worlds of a server, whose rounds are batched in the engine, the denoising loop and the codec.

The steps of a round are imported from `worldmodel.rollout.round`.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worldmodel import batch
from worldmodel.actions import Action, AnyAction
from worldmodel.actions.words import understand
from worldmodel.config import height_width
from worldmodel.diffusion.sampler import Chunk
from worldmodel.episodes import WHAT_HAPPENED, Outcome, PredictedState
from worldmodel.errors import ConfigError, InputError
from worldmodel.models import text
from worldmodel.models.conditioning import Condition
from worldmodel.models.state import State
from worldmodel.models.vision.adapter import Observation
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.futures import Future, check_futures, foresee, one_hot_code
from worldmodel.rollout.observation_score import check_score, look, states_of
from worldmodel.rollout.round import (
    RoundInputs,
    SamplingParams,
    finish,
    prepare,
    read_state,
    start_chunks,
    start_worlds,
)
from worldmodel.rollout.saved import identify
from worldmodel.rollout.session import (
    check_past,
    check_task,
    confidence_rows,
    read_question,
    sampling_params,
    transition,
)
from worldmodel.rollout.state import WorldState, film_frames, newest_observation
from worldmodel.serving.engine.adapters import ServedAdapters
from worldmodel.serving.engine.batching import CONDITION, DENOISE, PREPARE, Batcher, Compute
from worldmodel.serving.engine.completion import Completion, TextParams, last
from worldmodel.serving.engine.denoiser import DenoisingLoop, Progress
from worldmodel.serving.engine.generator_processes import GeneratorProcesses
from worldmodel.serving.engine.local import Engine, InProcessEngine, known
from worldmodel.serving.settings import MAX_STEPS
from worldmodel.serving.tracing import span
from worldmodel.serving.worlds.identity import Identity

GREEDY = TextParams()


@dataclass(frozen=True, kw_only=True)
class WorldSettings(SamplingParams):
    """Settings of one world."""

    seed: int
    adapter: str | None


class WorldService:
    """A model, its engine and its denoising loop, shared by all live worlds."""

    max_rounds = 10_000
    """Most rounds of a world."""
    max_snapshots = 16
    """Most snapshots of a world; above it, the oldest is deleted."""

    def __init__(
        self,
        model: WorldModel,
        engine: Engine | None = None,
        *,
        compute: Compute | None = None,
        adapters: ServedAdapters | None = None,
        processes: GeneratorProcesses | None = None,
        digest: str | None = None,
        max_batch: int = 16,
    ) -> None:
        """Serve a model, which is divided if `digest` (of its whole weights, from `identify`) is given."""
        self.model = model.eval()
        self.name = ""
        """Name under which requests choose the model."""
        self._digest = digest
        self.compute = compute or Compute()
        self.adapters = adapters or ServedAdapters(model)
        self.engine: Engine = engine or InProcessEngine(model.backbone, self.compute, self.adapters)
        self.denoising = DenoisingLoop(model.generator, self.compute, max_batch, self.adapters, processes)
        # The weights of one adapter are active at a time, so rows of different ones share no batch. Nor do
        # worlds whose codes are drawn differently, or a blank world, which has no context to decode after.
        self._prepare = Batcher(
            self.compute, partial(self._with_adapter, self._prepared), PREPARE, max_batch, lambda row: row[0]
        )
        self._start = Batcher(
            self.compute,
            partial(self._with_adapter, self._started),
            CONDITION,
            max_batch,
            lambda row: (row[0], row[3].temperature, row[3].top_k, row[4] is None),
        )
        self._finish = Batcher(
            self.compute,
            partial(self._with_adapter, self._finished),
            DENOISE,
            max_batch,
            lambda row: (row[0], row[1].worlds[0].is_blank),
        )

    @property
    def alive(self) -> bool:
        """Whether engine and denoising loop can still compute; what has failed never recovers."""
        return self.engine.alive and self.denoising.alive

    @cached_property
    def identity(self) -> Identity:
        """Digests of the model and of the adapters."""
        return Identity(self._digest or identify(self.model), self.adapters.digests)

    @property
    def tasks(self) -> tuple[str, ...]:
        """What the model was trained on or, where its folder does not say, what its actions permit."""
        permitted = ("rounds", "imagine", "describe", "ask", "inverse")
        return self.model.tasks or permitted[: None if self.model.config.action.text else 1]

    @property
    def confidence_threshold(self) -> float | None:
        """The model's `confidence_threshold`; None where the engine computes no likelihoods."""
        return self.model.config.confidence_threshold if self.engine.likelihoods else None

    def check_confidence(self) -> None:
        """Raise `InputError` if the model was not trained for `World.confidence`, or the engine has none."""
        check_task(self.model, "inverse")
        if not self.engine.likelihoods:
            raise InputError(
                f"The engine of this server, {self.engine.name}, gives no confidence; leave it out, or "
                "start the server with --engine in-process."
            )

    @property
    def max_steps(self) -> int:
        """Most denoising steps of a round; 0 for a model without a generator."""
        return MAX_STEPS if self.model.config.generator else 0

    @property
    def chunk_s(self) -> float:
        """Playback time of a round."""
        return self.model.config.chunk_frames / self.model.config.fps

    @property
    def frame_size(self) -> str:
        """The model's frame size as `WIDTHxHEIGHT`."""
        height, width = height_width(self.model.config.codec.image_size)
        return f"{width}x{height}"

    async def start(
        self,
        frames: np.ndarray | None = None,
        *,
        text: str | None = None,
        actions: Sequence[Action] = (),
        settings: WorldSettings | None = None,
        **options: Any,
    ) -> "World":
        """Start a world from frames (uint8 `[t, h, w, 3]`, the model's size) or from a description.

        Args:
            frames: What was observed.
            text: A description.
            actions: What was done in the last rounds of the frames.
            settings: Settings of the world.
            options: Instead of settings, those of `WorldService.settings`.

        Raises:
            InputError: neither or both are given, the frames have fewer rounds than there are actions, the
                model does not take one of them, or a setting is out of range.
        """
        settings = settings or self.settings(**options)
        return World(self, settings, await self.first(settings, frames, text, actions))

    async def resume(
        self, settings: WorldSettings, state: WorldState, world_id: str | None = None
    ) -> "World":
        """Return a world that plays on from a state which another server may have made.

        The keys and values of its history are computed round by round, as its rounds did: computed at once,
        they would differ in rounding, and so would the next frames.

        Raises:
            InputError: a setting is out of range, or there is no such adapter.
        """
        settings = self.settings(**asdict(settings))
        (history,), config = state.histories, self.model.config
        # The cache of a history that never forgot a round grew from its first round; after forgetting, the
        # newest rounds were computed in one pass and the following ones singly.
        first = 1 if state.round <= config.context_rounds else config.history_rounds + 1
        for end in range(first, len(history) + 1):
            await self.engine.predict_states(history[:end], config.num_queries, settings.adapter)
        return World(self, settings, state, world_id)

    def settings(
        self,
        seed: int = 0,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        adapter: str | None = None,
        **sampling: Any,
    ) -> WorldSettings:
        """Complete settings that are None from the model's config; `sampling` are others of `SamplingParams`.

        Raises:
            InputError: a setting is out of range, or there is no such adapter.
        """
        try:
            params = sampling_params(
                self.model, num_inference_steps, guidance_scale, **sampling, max_steps=MAX_STEPS
            )
        except ConfigError as error:
            raise InputError(str(error)) from None
        if not 0 <= seed < 2**63:
            raise InputError(f"seed is {seed}; use 0 to 2^63 - 1.")
        return WorldSettings(**vars(params), seed=seed, adapter=known(adapter, self.engine.adapters))

    def stats(self) -> dict[str, float]:
        """Return statistics of the denoising loop and the engine."""
        occupancy = self.denoising.occupancy
        return {
            "denoising_steps": occupancy.steps,
            "denoising_rows": occupancy.rows,
            **self.engine.stats(),
        }

    async def play_test_round(self) -> None:
        """Play a round of a black picture, which fails if the model cannot compute."""
        height, width = height_width(self.model.config.codec.image_size)
        world = await self.start(np.zeros((1, height, width, 3), np.uint8))
        await world.step()

    async def discard(self) -> None:
        """Let all further calls to the model fail, and drop its weights and caches."""

        def drop() -> None:  # in the thread that runs the model, which no call uses then
            self.adapters.model_removed = True
            for module in self.model.modules():  # some worlds, whose calls fail, may refer to it for a while
                module._parameters.clear()
                module._buffers.clear()

        await self.compute.run(drop)
        await self.engine.close()
        self.denoising.close()

    async def close(self) -> None:
        """Close the engine, the thread that runs the model, and the processes of the generator."""
        await self.engine.close()
        self.compute.close()
        self.denoising.close()

    # ---- one round, in the steps of `worldmodel.rollout.round` -----------------------------------------

    async def play(
        self,
        settings: WorldSettings,
        state: WorldState,
        action: Action,
        on_progress: Progress | None = None,
        code: Sequence[int] | None = None,
    ) -> WorldState:
        """Play one round of a world; every step is batched with steps of other worlds.

        With a `code` the future that it names happens, and none is drawn.
        """
        one_hot = None if code is None else one_hot_code(self.model, code)
        inputs, hidden = await self._predict(settings, state, action)
        with span("denoise"):
            row = (settings.adapter, inputs, hidden, settings, one_hot)
            predicted, chunk = await self._start(row)
            await self.denoising.run(chunk, on_progress, settings.adapter)
        with span("decode"):
            return await self._finish((settings.adapter, inputs, predicted, chunk))

    async def _predict(
        self, settings: WorldSettings, state: WorldState, action: Action
    ) -> tuple[RoundInputs, Tensor]:
        """Return the inputs of a world's round, and the hidden states at its queries."""
        with span("prepare"):
            inputs = await self._prepare((settings.adapter, state, action))
        with span("predict states"):
            num_queries = self.model.config.num_queries
            hidden = await self.engine.predict_states(inputs.histories[0], num_queries, settings.adapter)
            return inputs, hidden[None].to(state.context)

    async def futures(
        self, settings: WorldSettings, state: WorldState, action: Action, num_draws: int, max_futures: int
    ) -> list[Future]:
        """Return the distinct futures of a world after an action; see `Session.futures`."""
        check_futures(self.model)
        inputs, hidden = await self._predict(settings, state, action)
        foreseen, chunks = await self.run(
            settings.adapter, foresee, self.model, inputs, hidden, settings, num_draws, max_futures
        )
        async with asyncio.TaskGroup() as group:
            for chunk in chunks:
                group.create_task(self.denoising.run(chunk, None, settings.adapter))
        latents = [chunk.latents for chunk in chunks]
        made = await self.run(
            settings.adapter, finish, self.model, foreseen.inputs, foreseen.state, chunks, latents
        )
        return foreseen.futures(made)

    async def read(
        self, observation: Observation, prompt: str, adapter: str | None, params: TextParams = GREEDY
    ) -> AsyncGenerator[Completion, None]:
        """Generate text about an observation; yields it after every token, and whole at the end."""
        ((prefix, _),) = await self.run(adapter, text.sequences, self.model, [observation], [prompt])
        tokens: list[int] = []
        async with aclosing(self.engine.generate_tokens(prefix, params, adapter)) as generated:
            async for token in generated:
                tokens.append(token)
                yield Completion(self.model.backbone.text(tokens), len(prefix), len(tokens))
        reason = "length" if len(tokens) == params.max_tokens else "stop"
        yield Completion(self.model.backbone.text(tokens), len(prefix), len(tokens), reason)

    async def first(
        self,
        settings: WorldSettings,
        frames: np.ndarray | None,
        description: str | None,
        actions: Sequence[Action] = (),
    ) -> WorldState:
        """Return the initial state of a world, from frames or generated from a description.

        Raises:
            InputError: neither or both are given, or the frames have fewer rounds than there are actions.
        """
        if (frames is None) == (description is None):
            raise InputError("Pass either an image or video, or a text.")
        seeds = (settings.seed,)
        if frames is not None:
            # A longer video was cut when it was decoded: only its end is remembered.
            if len(frames) < film_frames(self.model.config):
                check_past(self.model, len(frames), len(actions))
            return await self.run(settings.adapter, start_worlds, self.model, frames[None], seeds, [actions])
        if actions:
            raise InputError("actions are those of an uploaded video, and the world starts from a text.")
        check_task(self.model, "imagine")
        blank = await self.run(settings.adapter, WorldState.blank, self.model, seeds)
        return await self.play(settings, blank, Action.of(description))

    async def observation_score(self, settings: WorldSettings, image: np.ndarray) -> float | None:
        """Return how unlike what the model knows an image is; see `Session.observation_score`."""
        known = self.model.known
        if known is None:
            return None
        with span("observation score"):
            errors, inputs = await self.run(settings.adapter, look, self.model, image[None])
            num_queries = self.model.config.num_queries
            hidden = await self.engine.predict_states(inputs.histories[0], num_queries, settings.adapter)
            return float(known.score(errors.cpu(), states_of(hidden[None]).cpu())[0])

    async def run(self, adapter: str | None, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function with an adapter, in the thread that runs the model."""

        def call() -> Any:
            with self.adapters.using(adapter):
                return function(*args)

        return await self.compute.run(call)

    def _with_adapter(
        self, function: Callable[[Sequence[Any]], Sequence[Any]], rows: Sequence[tuple[Any, ...]]
    ) -> Sequence[Any]:
        """Call a function with rows of one adapter, which comes first in every row."""
        with self.adapters.using(rows[0][0]):
            return function([row[1:] for row in rows])

    def _prepared(self, rows: Sequence[tuple[WorldState, Action]]) -> Sequence[RoundInputs | Exception]:
        try:
            return prepare(self.model, *zip(*rows, strict=True)).split()
        except InputError as error:
            if len(rows) == 1:
                return [error]
            # A batch belongs to many clients: the error of one must not fail the rounds of the others.
            return [result for row in rows for result in self._prepared([row])]  # the others are valid

    def _started(
        self, rows: Sequence[tuple[RoundInputs, Tensor, SamplingParams, Tensor | None]]
    ) -> list[tuple[State, Chunk[Condition]]]:
        """Read states and start chunks of worlds whose codes are drawn alike."""
        inputs = RoundInputs.join([row[0] for row in rows])
        hidden = torch.cat([row[1] for row in rows])
        codes = [code for *_, code in rows if code is not None]
        given = torch.cat(codes).to(hidden) if codes else None
        state = read_state(self.model, inputs, hidden, rows[0][2], given)
        condition = self.model.condition(state, inputs.context, inputs.actions)
        started = []
        parts = zip(rows, batch.split(state, inputs.sizes), batch.split(condition, inputs.sizes), strict=True)
        for (own_inputs, _, params, _), own_state, own_condition in parts:
            (chunk,) = start_chunks(self.model, own_inputs, own_condition, params)
            started.append((own_state, chunk))
        return started

    def _finished(self, rows: Sequence[tuple[RoundInputs, State, Chunk[Condition]]]) -> Sequence[WorldState]:
        inputs = RoundInputs.join([row[0] for row in rows])
        state = batch.stack([row[1] for row in rows])
        chunks = [row[2] for row in rows]
        return finish(self.model, inputs, state, chunks, [chunk.latents for chunk in chunks])


class World:
    """One live rollout; its caller makes one call at a time, and a call that fails changes nothing."""

    def __init__(
        self, service: WorldService, settings: WorldSettings, state: WorldState, world_id: str | None = None
    ) -> None:
        self.id = world_id or f"world-{secrets.token_urlsafe(16)}"
        self.settings = settings
        self.service, self._state = service, state
        self._snapshots: OrderedDict[str, WorldState] = OrderedDict()
        self.observation_score: float | None = None
        """How unlike what the model knows the picture of the start is, if it was measured."""

    @property
    def round(self) -> int:
        """Rounds played so far."""
        return self._state.round

    @property
    def last_frames(self) -> np.ndarray:
        """Frames of the newest observation, uint8 `[t, h, w, 3]`."""
        return self._state.frames[0]

    @property
    def outcome(self) -> Outcome | None:
        """Predicted reward and end of the last round; None before it, and for models without outcomes."""
        return self._state.outcomes[0] if self._state.outcomes else None

    @property
    def predicted(self) -> PredictedState | None:
        """Predicted state of the last round; None before it, and for models without one."""
        return self._state.states[0] if self._state.states else None

    @property
    def snapshots(self) -> tuple[str, ...]:
        """Names of the snapshots, oldest first."""
        return tuple(self._snapshots)

    async def step(
        self,
        action: AnyAction = None,
        on_progress: Progress | None = None,
        code: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> np.ndarray:
        """Play one round and return its frames, uint8 `[t, h, w, 3]`; None is the null action.

        With a `seed`, this round alone has that one instead of the world's.

        Raises:
            InputError: the model does not take such an action or code, or the world has reached its maximum
                of rounds.
        """
        if self.round >= self.service.max_rounds:
            raise InputError(
                f"This world has played {self.round} rounds, its maximum; reset it or start another."
            )
        before = self._state
        drawn = before if seed is None else replace(before, seeds=(seed,))
        played = await self.service.play(self.settings, drawn, Action.of(action), on_progress, code)
        self._state = played if seed is None else replace(played, seeds=before.seeds)
        return self.last_frames

    async def futures(self, action: AnyAction, num_draws: int, max_futures: int) -> list[Future]:
        """Return the distinct futures after an action; see `Session.futures`."""
        return await self.service.futures(
            self.settings, self._state, Action.of(action), num_draws, max_futures
        )

    async def reset(
        self, frames: np.ndarray | None = None, *, text: str | None = None, actions: Sequence[Action] = ()
    ) -> np.ndarray:
        """Restart the world, delete its snapshots, and return the first observation.

        Raises:
            InputError: as `WorldService.start`.
        """
        self._state = await self.service.first(self.settings, frames, text, actions)
        self._snapshots.clear()
        self.observation_score = None
        return self.last_frames

    async def measure(self, limit: float | None = None) -> None:
        """Measure how unlike what the model knows the newest frame is (`observation_score`).

        Raises:
            ConfigError: the limit is not above 0.
            InputError: the score is above the limit, or there is none.
        """
        image = self.last_frames[-1]
        self.observation_score = await self.service.observation_score(self.settings, image)
        check_score(self.observation_score, limit)

    async def describe(self, question: str | None = None) -> str:
        """Describe the newest observation, or answer a question about it."""
        return (await last(self.complete(question))).text

    async def complete(
        self, question: str | None = None, params: TextParams = GREEDY
    ) -> AsyncGenerator[Completion, None]:
        """Describe the newest observation, or answer a question about it; yields the text as it grows."""
        prompt = read_question(question)
        service = self.service
        check_task(service.model, "describe" if question is None else "ask")
        observation = newest_observation(service.model, self._state)
        async with aclosing(service.read(observation, prompt, self.settings.adapter, params)) as texts:
            async for completion in texts:
                yield completion

    async def infer_action(self) -> Action:
        """Return the action that led to the newest observation."""
        service = self.service
        check_task(service.model, "inverse")
        observation = transition(service.model, self._state)
        said = await last(service.read(observation, WHAT_HAPPENED, self.settings.adapter))
        return understand(said.text, service.model.config.action)

    async def confidence(self, words: str) -> float:
        """Return how well the last round fits an action in words; see `Session.confidence`."""
        service = self.service
        service.check_confidence()
        rows = await service.run(None, confidence_rows, service.model, self._state, words)
        said, nothing = await service.engine.log_likelihoods(rows, self.settings.adapter)
        return said - nothing

    def fork(self) -> "World":
        """Return an independent copy of the world, without its snapshots."""
        copy = World(self.service, self.settings, self._state)
        copy.observation_score = self.observation_score
        return copy

    def snapshot(self) -> str:
        """Save the current state and return its name; above the limit the oldest snapshot is deleted."""
        name = f"snapshot-{secrets.token_urlsafe(8)}"
        self._snapshots[name] = self._state
        while len(self._snapshots) > self.service.max_snapshots:
            self._snapshots.popitem(last=False)
        return name

    def state(self, name: str | None = None) -> WorldState:
        """Return the state of a snapshot, by default the current one.

        Raises:
            InputError: there is no such snapshot.
        """
        if name is None:
            return self._state
        if name not in self._snapshots:
            raise InputError(f"This world has no snapshot {name!r}; take one first, or use a newer one.")
        return self._snapshots[name]

    def restore(self, moment: str | WorldState) -> None:
        """Return to a snapshot, by its name, or to an earlier state."""
        self._state = self.state(moment) if isinstance(moment, str) else moment

    def close(self) -> None:
        """Delete the snapshots."""
        self._snapshots.clear()
