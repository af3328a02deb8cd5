"""Simulators in which plans are tried; `worldmodel.planning.environment` has one of a real environment."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from worldmodel.actions import Action
from worldmodel.episodes import Outcome
from worldmodel.media import Frame, Frames
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout import LocalEngine, SamplingParams, WorldState, play_round

S = TypeVar("S")


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
    """

    def __init__(
        self,
        model: WorldModel,
        seed: int = 0,
        num_inference_steps: int | None = None,
        max_cache_bytes: int = 2**30,
    ) -> None:
        self.model, self.seed = model, seed
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
        return play_round(self.model, self.engine, states, actions, self.params)

    def frames(self, state: WorldState) -> Frames:
        """Return the frames of the newest round."""
        return state.frames[0]

    def outcome(self, state: WorldState) -> Outcome | None:
        """Return what the model predicts of the newest round, if it predicts outcomes."""
        return state.outcomes[0] if state.outcomes else None
