"""Simulators in which plans are tried; `worldmodel.planning.environment` has one of a real environment."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from worldmodel.actions import Action
from worldmodel.episodes import Outcome
from worldmodel.media import Frame, Frames
from worldmodel.models.text import TextSequence, sequences
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout import LocalEngine, SamplingParams, WorldState, play_round
from worldmodel.rollout.session import check_task, read_question
from worldmodel.rollout.state import newest_observation

S = TypeVar("S")
MAX_LOG_ODDS = 700.0
"""Greater log-odds overflow as odds."""


class Simulator(Protocol[S]):
    """Plays actions from states, which it does not change, so that any state can be continued many times."""

    def start(self, frame: Frame) -> S:
        """Return the state in which a frame is observed and nothing before it."""
        ...

    def step(self, states: Sequence[S], actions: Sequence[Action]) -> list[S]:
        """Return the states after one action each."""
        ...

    def frames(self, state: S) -> Frames:
        """Return the newest observation of a state, uint8 `[t, h, w, 3]`."""
        ...

    def outcome(self, state: S) -> Outcome | None:
        """Return reward and end of the newest round of a state, if they are known."""
        ...


class ModelSimulator:
    """The learned world: rounds of all states run as one batch.

    Args:
        model: The model.
        seed: Seed of all its worlds, so that the same actions lead to the same frames.
        num_inference_steps: Denoising steps; by default the model's.
        max_cache_bytes: Memory for the backbone's states of earlier rounds.
        goal: A question that the language model answers by yes or no, or a statement that it was trained to
            judge so. The probability of yes is then the reward of every round, and an episode ends when yes
            is likelier than no.

    Raises:
        InputError: there is a goal, and the model was not trained to answer questions, or it is empty.
    """

    def __init__(
        self,
        model: WorldModel,
        seed: int = 0,
        num_inference_steps: int | None = None,
        max_cache_bytes: int = 2**30,
        goal: str | None = None,
    ) -> None:
        self.model, self.seed = model, seed
        if goal is not None:
            check_task(model, "ask")
            read_question(goal)
        self.goal = goal
        session = model.session(seed, num_inference_steps)
        self.params: SamplingParams = session.params
        self.engine = LocalEngine(model.backbone, max_cache_bytes)

    def start(self, frame: Frame) -> WorldState:
        """Return the world that begins with a frame, uint8 `[h, w, 3]`."""
        session = self.model.session(self.seed)
        session.reset(frame)
        return session.state

    def futures(self, state: WorldState, count: int) -> list[WorldState]:
        """Return worlds that differ from one in their seeds alone, and so in what happens next."""
        (seed,) = state.seeds
        return [replace(state, seeds=(seed + number,)) for number in range(1, count + 1)]

    def step(self, states: Sequence[WorldState], actions: Sequence[Action]) -> list[WorldState]:
        """Play one round of every world.

        Raises:
            InputError: the model does not take one of the actions.
        """
        after = play_round(self.model, self.engine, states, actions, self.params)
        return after if self.goal is None else self._judged(after, self.goal)

    def _judged(self, states: Sequence[WorldState], goal: str) -> list[WorldState]:
        """Replace the reward of each world by the probability that it has reached the goal."""
        model, answers = self.model, ["yes", "no"]
        rows: list[TextSequence] = []
        for state in states:
            observation = newest_observation(model, state)
            rows += sequences(model, [observation] * 2, [goal] * 2, answers)
        means = model.backbone.log_likelihoods(rows)
        totals = [mean * int((labels >= 0).sum()) for mean, (_, labels) in zip(means, rows, strict=True)]
        judged = []
        for state, yes, no in zip(states, totals[::2], totals[1::2], strict=True):
            probability = 1 / (1 + math.exp(min(no - yes, MAX_LOG_ODDS)))
            over = any(outcome.ended for outcome in state.outcomes)
            judged.append(replace(state, outcomes=(Outcome(probability, over or probability > 0.5),)))
        return judged

    def frames(self, state: WorldState) -> Frames:
        """Return the frames of the newest round."""
        return state.frames[0]

    def outcome(self, state: WorldState) -> Outcome | None:
        """Return what the model predicts of the newest round, if it predicts outcomes."""
        return state.outcomes[0] if state.outcomes else None
