"""Sessions: one live rollout that can be forked, restored and saved."""

import base64
import operator
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch

from worldmodel import media
from worldmodel.actions import Action, AnyAction
from worldmodel.actions.words import NOTHING_HAPPENS, understand
from worldmodel.config import height_width
from worldmodel.episodes import DESCRIBE, WHAT_HAPPENED, Outcome, StepResult
from worldmodel.errors import ConfigError, InputError
from worldmodel.media.encoding import encode_png
from worldmodel.models.text import TextSequence, sequences
from worldmodel.models.vision.adapter import Observation
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout import session_file
from worldmodel.rollout.futures import Future, futures
from worldmodel.rollout.observation_score import observation_scores
from worldmodel.rollout.recording import Recording
from worldmodel.rollout.round import LocalEngine, SamplingParams, observe_round, play_round, start_worlds
from worldmodel.rollout.state import WorldState, last_transition, newest_observation

MAX_QUESTION_CHARACTERS = 400
MAX_UNDO = 256
"""Rounds that can be undone; each keeps a few kilobytes, since states share their histories."""


@dataclass(frozen=True)
class Snapshot:
    """The state and the recording of a session at one time; immutable and cheap to keep."""

    state: WorldState
    recording: Recording

    def __repr__(self) -> str:
        return f"Snapshot(round {self.state.round}, {len(self.recording.actions)} actions)"


class Session:
    """One world, played round after round from one observation.

    Rounds are deterministic: the noise of a round depends on the seed and the round's number alone, so a fork
    that takes the same action makes the same frames. The backbone computes only the new positions of a round
    and has a bounded history, so the cost of a round is bounded however long the session is.
    """

    def __init__(
        self,
        model: WorldModel,
        seed: SupportsIndex = 0,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        engine: LocalEngine | None = None,
        negative_prompt: str | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
    ) -> None:
        """Open a session; `reset` starts its world.

        Args:
            model: The model.
            seed: Of the codes and the noise of all rounds.
            num_inference_steps: Denoising steps of a round; by default those of the model's config.
            guidance_scale: Classifier-free guidance; by default that of the model's config.
            engine: Runs the backbone; by default one of the session's own.
            negative_prompt: Text that guidance leads away from, where the generator reads text.
            temperature: Of the choice between possible futures, for models whose states have a code: 0 takes
                the most likely one.
            top_k: Only so many of the most likely values of each variable of the code; 0 is all.

        Raises:
            ConfigError: a setting is out of range.
        """
        try:
            self.model, self.seed = model, operator.index(seed)
        except TypeError:
            raise ConfigError(f"seed is {seed!r}; use an integer.") from None
        self.engine = engine or LocalEngine(model.backbone)
        self.params = sampling_params(
            model, num_inference_steps, guidance_scale, negative_prompt, temperature, top_k
        )
        self._state: WorldState | None = None
        self._recording = Recording(())
        self._before: deque[Snapshot] = deque(maxlen=MAX_UNDO)

    # ---- playing -------------------------------------------------------------------------------------

    def reset(
        self, observation: Any = None, *, text: str | None = None, actions: Sequence[AnyAction] = ()
    ) -> np.ndarray:
        """Start a new world and return its first observation as uint8 frames `[t, h, w, 3]`.

        Args:
            observation: An image or a video: a path, encoded bytes, a PIL image, or uint8 frames
                `[h, w, 3]` or `[t, h, w, 3]`. The rollout continues its last frame; of a video it remembers
                as many rounds as of a rollout (`history_rounds`).
            text: A description, from which the model generates the first observation.
            actions: What was done in the last rounds of a video, the newest last, if it is known: with it
                the world goes on as that one did, also where an image does not show how things move.

        Raises:
            InputError: the observation or text cannot be used, neither or both are given, the model was not
                trained to start from a text or does not take such an action, or there are more actions than
                the video has rounds.
        """
        if (observation is None) == (text is None):
            raise InputError("Pass either an observation (image or video) or text=.")
        if text is not None:
            check_task(self.model, "imagine")
        if text is None:
            frames = self._read(observation)
            check_past(self.model, len(frames), len(actions))
            done = [[Action.of(action) for action in actions]]
            state = start_worlds(self.model, frames[None], (self.seed,), done)
        else:
            if actions:
                raise InputError("actions= are those of a video, and the world starts from text=.")
            blank = WorldState.blank(self.model, (self.seed,))
            (state,) = play_round(self.model, self.engine, [blank], [Action.of(text)], self.params)
        self.restore(Snapshot(state, Recording((state.frames[0],))))
        return state.frames[0].copy()

    def step(self, action: AnyAction = None) -> StepResult:
        """Play one round and return its frames and outcome; None is the null action.

        A list has the actions of the round in order, as many as `model.config.action.per_round`; where that
        is one, it has the names of keys that are held.

        Raises:
            InputError: the session was not reset, or the model does not take such an action.
        """
        taken = self._read_action(action)
        (state,) = play_round(self.model, self.engine, [self.state], [taken], self.params)
        return self.advance(taken, state)

    def advance(self, action: Action, state: WorldState) -> StepResult:
        """Continue from the state after an action, which a batch of rounds has made."""
        self._before.append(self.snapshot())
        self._state, self._recording = state, self._recording.extended(action, state.frames[0])
        frames = state.frames[0].copy()  # the caller may draw on it: forks and snapshots share the state
        predicted = state.states[0] if state.states else None
        return StepResult(frames, self.outcome, predicted)

    def compare(self, *actions: AnyAction) -> list[StepResult]:
        """Return what a round with each of several actions leads to; the session does not change.

        All are one batch, with the same seed, so what differs is what the actions do.

        Raises:
            InputError: as `step`, or there is no action.
        """
        if not actions:
            raise InputError("There is nothing to compare; pass two or more actions.")
        taken = [self._read_action(action) for action in actions]
        states = play_round(self.model, self.engine, [self.state] * len(taken), taken, self.params)
        return [
            StepResult(
                state.frames[0].copy(),
                state.outcomes[0] if state.outcomes else None,
                state.states[0] if state.states else None,
            )
            for state in states
        ]

    def undo(self, rounds: int = 1) -> np.ndarray:
        """Go back by rounds that were played since `reset` or `restore`; return the newest clip then.

        Raises:
            InputError: fewer were played, or they are too long ago (256).
        """
        if not 1 <= rounds <= len(self._before):
            raise InputError(
                f"{rounds} rounds cannot be undone, since {len(self._before)} can; use a snapshot to go back "
                "further."
            )
        snapshot = self._before[-rounds]
        for _ in range(rounds):
            self._before.pop()
        self._state, self._recording = snapshot.state, snapshot.recording
        return snapshot.recording.clips[-1].copy()

    def futures(self, action: AnyAction = None, num_draws: int = 256, max_futures: int = 16) -> list[Future]:
        """Return the distinct observations that an action may lead to, the most probable first.

        The session does not change. Each future is rendered once, however often its code was drawn;
        probabilities are shares of the draws. What `step` would make is among them, unless there are more
        than `max_futures`. `choose` goes on with one.

        Args:
            action: What is done; None is the null action.
            num_draws: Number of codes that are drawn.
            max_futures: Number of futures to return at most.

        Raises:
            InputError: the states of the model have no code, or the model does not take such an action.
        """
        if num_draws < 1 or max_futures < 1:
            raise InputError(f"num_draws is {num_draws} and max_futures {max_futures}; use 1 or more.")
        taken = Action.of(action)
        return futures(self.model, self.engine, self.state, taken, self.params, num_draws, max_futures)

    def choose(self, future: Future) -> StepResult:
        """Continue with one of the futures of the present state.

        Raises:
            InputError: it is a future of another moment.
        """
        before = future.world.previous_latents
        if (
            future.world.round != self.state.round + 1
            or before is None
            or not torch.equal(before, self.state.context[:, -1:])
        ):
            raise InputError("This is a future of another moment; call futures() again.")
        return self.advance(future.action, future.world)

    def observe(self, observation: Any, action: AnyAction = None) -> np.ndarray:
        """Add a round whose outcome was observed instead of generated; return its frames.

        For a world that exists: what the session foresees next follows from what it really did. To correct a
        round that was generated, `restore` a snapshot from before it first.

        Args:
            observation: What the action led to, an image or a video as for `reset`.
            action: What happened, if it is known.

        Raises:
            InputError: the session was not reset, the observation cannot be used, or the model does not take
                such an action.
        """
        taken, state, frames = Action.of(action), self.state, self._read(observation)
        return self.advance(taken, observe_round(self.model, state, frames[None], [taken])).frames

    def describe(self, question: str | None = None) -> str:
        """Describe the newest observation, or answer a question about it ("how many objects are there").

        Raises:
            InputError: the model was not trained to, or the question is empty or too long.
        """
        prompt = read_question(question)
        check_task(self.model, "describe" if question is None else "ask")
        return self.model.generate_text(newest_observation(self.model, self.state), prompt)[0]

    def infer_action(self) -> Action:
        """Return the action between the last two observations: a text, keys, numbers or a camera motion.

        Raises:
            InputError: there is only one observation so far, or the model was not trained to.
        """
        check_task(self.model, "inverse")
        (said,) = self.model.generate_text(transition(self.model, self.state), WHAT_HAPPENED)
        return understand(said, self.model.config.action)

    def confidence(self, words: str) -> float:
        """Return how well the last round fits an action in words; nonsense fits badly.

        It is the mean log-likelihood of the words as the answer to "what happened", less that of "nothing
        happens", in nats per token: one more pass of the backbone. Below `model.config.confidence_threshold`
        the model has probably not understood them.

        Raises:
            InputError: there is only one observation so far.
        """
        # The difference cancels what makes any text about these frames likely or unlikely.
        check_task(self.model, "inverse")
        rows = confidence_rows(self.model, self.state, words)
        said, nothing = self.model.backbone.log_likelihoods(rows)
        return said - nothing

    def observation_score(self) -> float | None:
        """Return how unlike what the model knows the newest frame is, such as the picture of a start.

        1 is the limit that 99 % of held-out frames keep: what is far above it becomes something else within
        a round or two. It is one decoded frame and a pass of the backbone; None if the model's folder does
        not say which observations it knows.

        Raises:
            InputError: the session was not reset.
        """
        scores = observation_scores(self.model, self.engine, self.state.frames[:, -1])
        return None if scores is None else scores[0]

    # ---- snapshots -----------------------------------------------------------------------------------

    @property
    def state(self) -> WorldState:
        """The current state.

        Raises:
            InputError: the session was not reset.
        """
        if self._state is None:
            raise InputError("The session has not started; call reset() with an image, a video or text=.")
        return self._state

    def snapshot(self) -> Snapshot:
        """Return the current state and recording; `restore` returns to them any number of times."""
        return Snapshot(self.state, self._recording)

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot of this or another session with the same model.

        Raises:
            InputError: the snapshot is of a model with other shapes.
        """
        # Shapes tell models apart that could not continue this state; another model of equal shapes could.
        width, cells = self.model.backbone.width, self.model.config.latent_shape[1:]
        parts = (part for history in snapshot.state.histories for part in history)
        head = None if self.model.state is None else self.model.state.code
        code = snapshot.state.code
        fits = code is None or (head and tuple(code.shape[1:]) == (head.length, head.classes))
        if (
            not fits
            or tuple(snapshot.state.context.shape[2:]) != cells
            or any(part.shape[-1] != width for part in parts)
        ):
            raise InputError("The snapshot was made by another model; restore it in a session of that model.")
        self._state, self._recording = snapshot.state, snapshot.recording
        self._before.clear()

    def fork(self) -> "Session":
        """Return an independent copy of the session."""
        params = self.params
        other = Session(
            self.model,
            self.seed,
            params.num_inference_steps,
            params.guidance_scale,
            self.engine,
            params.negative_prompt,
            params.temperature,
            params.top_k,
        )
        other.restore(self.snapshot())
        return other

    @property
    def outcome(self) -> Outcome | None:
        """Predicted reward and end of the last round; None before it, and for models without outcomes."""
        return self.state.outcomes[0] if self.state.outcomes else None

    # ---- recording -----------------------------------------------------------------------------------

    @property
    def frames(self) -> np.ndarray:
        """All frames so far, uint8 `[t, h, w, 3]`."""
        return self.snapshot().recording.frames

    @property
    def clips(self) -> tuple[np.ndarray, ...]:
        """The first observation, then one clip per round."""
        return tuple(clip.copy() for clip in self.snapshot().recording.clips)

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions so far."""
        return self.snapshot().recording.actions

    def save(self, path: str | Path) -> Path:
        """Write the rollout, in the form that the suffix of the file names.

        `.mp4` and `.gif` are a film, and `.png` is a contact sheet with one row per round. `.safetensors` and
        `.pt` are the session itself, which `Session.load` reads; both contain safetensors.

        Raises:
            OutputError: the file cannot be written, or its suffix is not one of these.
        """
        if Path(path).suffix.lower() in session_file.SUFFIXES:
            here = self.snapshot()
            saved = session_file.SavedSession(self.seed, self.params, here.state, here.recording)
            session_file.write(saved, self.model, Path(path))
            return Path(path)
        return self.snapshot().recording.save(path, self.model.config.fps)

    @classmethod
    def load(cls, path: str | Path, model: WorldModel) -> "Session":
        """Open a session that `save` wrote; it goes on with the same frames.

        Raises:
            InputError: there is no such file, it is damaged, or it is of another model.
        """
        seed, params, state, recording = session_file.read(path, model)
        session = cls(
            model,
            seed,
            params.num_inference_steps,
            params.guidance_scale,
            negative_prompt=params.negative_prompt,
            temperature=params.temperature,
            top_k=params.top_k,
        )
        session.restore(Snapshot(state, recording))
        return session

    def __repr__(self) -> str:
        config = self.model.config
        height, width = height_width(config.codec.image_size)
        when = "not started" if self._state is None else f"round {self._state.round}"
        return f"Session({when}, seed {self.seed}, {width} x {height} pixels at {config.fps} fps)"

    def _repr_html_(self) -> str:
        """Show the rollout so far in a notebook: a film, or the picture if there is one frame alone."""
        caption = f"<p>{escape(repr(self))}</p>"
        if self._state is None:
            return caption
        if len(self.frames) == 1:
            png = base64.b64encode(encode_png(self.frames[0])).decode()
            style = "image-rendering: pixelated; min-width: 256px"
            return f'<img src="data:image/png;base64,{png}" style="{style}">{caption}'
        with tempfile.TemporaryDirectory() as folder:
            film = self._recording.save(Path(folder) / "film.mp4", self.model.config.fps).read_bytes()
        source = f"data:video/mp4;base64,{base64.b64encode(film).decode()}"
        return f'<video src="{source}" autoplay loop muted controls playsinline></video>{caption}'

    def forget_recording(self) -> None:
        """Keep only the newest clip, for rollouts without an end."""
        self._recording = Recording(self._recording.clips[-1:])
        self._before.clear()

    def _read_action(self, action: AnyAction) -> Action:
        """Parse an action; a list of names of keys is one action, where a round has one."""
        takes = self.model.config.action
        if isinstance(action, list | tuple) and action and takes.per_round == 1:
            names = [each for each in action if isinstance(each, str)]
            if len(names) == len(action) and set(names) <= set(takes.keys):
                return Action(keys=tuple(names))
        return Action.of(action)

    def _read(self, observation: Any) -> np.ndarray:
        config = self.model.config
        frames = media.read_observation(
            observation,
            size=config.codec.image_size,
            fps=config.fps,
            max_frames=int(media.MediaLimits.max_video_s * config.fps),
            newest=True,
        )
        return frames.copy()  # they may be the caller's own


def sampling_params(
    model: WorldModel,
    num_inference_steps: int | None,
    guidance_scale: float | None,
    negative_prompt: str | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    max_steps: int | None = None,
) -> SamplingParams:
    """Fill settings that are None from the model's config.

    Raises:
        ConfigError: a setting is out of range.
    """
    config = model.config
    steps = config.num_inference_steps if num_inference_steps is None else num_inference_steps
    guidance = config.guidance_scale if guidance_scale is None else guidance_scale
    error = (
        config.steps_error(steps, max_steps)
        or config.sampling_error(steps, guidance, negative_prompt)
        or config.code_error(temperature, top_k)
    )
    if error:
        raise ConfigError(error)
    return SamplingParams(steps, guidance, negative_prompt or "", temperature, top_k)


TASKS = {
    "imagine": "start from a text",
    "describe": "describe what it sees",
    "ask": "answer questions",
    "inverse": "read actions back",
}
"""What a model can be trained to do besides predicting rounds, by the name of the task."""


def check_task(model: WorldModel, task: str) -> None:
    """Check that a model was trained on a task, if its folder says on which ones: else it answers nonsense.

    Raises:
        InputError: it was not.
    """
    if model.tasks is not None and task not in model.tasks:
        raise InputError(
            f"This model was not trained to {TASKS[task]} (task {task}), but on {', '.join(model.tasks)}; "
            "train it on the task, or use a model that was, such as shapes-tiny."
        )


def check_past(model: WorldModel, num_frames: int, num_actions: int) -> None:
    """Check that a video has the rounds of the actions that led to it.

    Raises:
        InputError: it has fewer.
    """
    chunk = model.config.chunk_frames
    if num_actions > (num_frames - 1) // chunk:
        raise InputError(
            f"There are {num_actions} actions for a video of {num_frames} frames; a round has {chunk} after "
            "the first frame, so pass a longer video or fewer actions."
        )


def read_question(question: str | None) -> str:
    """Return the prompt of a question; None asks for a description.

    Raises:
        InputError: the question is empty or too long.
    """
    if question is None:
        return DESCRIBE
    if not question.strip():
        raise InputError("The question is empty; ask something, or leave it out for a description.")
    if len(question) > MAX_QUESTION_CHARACTERS:
        raise InputError(
            f"The question has {len(question)} characters; use {MAX_QUESTION_CHARACTERS} or fewer."
        )
    return question


def confidence_rows(model: WorldModel, state: WorldState, words: str) -> list[TextSequence]:
    """Return the sequences whose likelihoods `Session.confidence` compares.

    Raises:
        InputError: there is only one observation so far.
    """
    observation, answers = transition(model, state), [words, NOTHING_HAPPENS]
    return sequences(model, [observation] * 2, [WHAT_HAPPENED] * 2, answers)


def transition(model: WorldModel, state: WorldState) -> Observation:
    """Return the last two observations of a world as one.

    Raises:
        InputError: there is only one observation so far.
    """
    found = last_transition(model, state)
    if found is None:
        raise InputError("There is only one observation so far; play a round first.")
    return found
