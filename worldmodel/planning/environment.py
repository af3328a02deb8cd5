"""Plans carried out in the real environment, and the environment itself as a simulator for comparison.

Needs the extra `gym`.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import gymnasium
import numpy as np

from worldmodel.actions import Action
from worldmodel.episodes import Outcome
from worldmodel.errors import InputError
from worldmodel.media import Frame, Frames
from worldmodel.planning.objective import Objective
from worldmodel.planning.proposals import ActionSet
from worldmodel.planning.search import Plan, PlanSettings, SeenStates, plan
from worldmodel.planning.simulator import S, Simulator
from worldmodel.recording.environment import EnvironmentEpisodes


@dataclass(frozen=True)
class EnvironmentState:
    """A copy of an environment, with what it showed last."""

    env: gymnasium.Env
    frame: Frame
    outcome: Outcome | None = None


class EnvironmentSimulator:
    """The true environment as its own simulator, by copies: the best that a model can be.

    Raises:
        InputError: the environment cannot be copied.
    """

    def __init__(self, played: EnvironmentEpisodes) -> None:
        self.played = played

    def start(self, frame: Frame) -> EnvironmentState:
        """Return the state in which the environment is now; `frame` is what it shows."""
        return EnvironmentState(self._copied(self.played.env), frame)

    def step(self, states: Sequence[EnvironmentState], actions: Sequence[Action]) -> list[EnvironmentState]:
        """Step a copy of every environment."""
        found = []
        for state, action in zip(states, actions, strict=True):
            env = self._copied(state.env)
            step = self.played.advance(env, action)
            outcome = Outcome(step.reward, step.terminated)
            found.append(EnvironmentState(env, self.played.frame(env, step.observation), outcome))
        return found

    def frames(self, state: EnvironmentState) -> Frames:
        """Return the newest frame."""
        return state.frame[None]

    def outcome(self, state: EnvironmentState) -> Outcome | None:
        """Return the true reward and end."""
        return state.outcome

    @staticmethod
    def _copied(env: gymnasium.Env) -> gymnasium.Env:
        try:
            return copy.deepcopy(env)
        # Environments of compiled simulators fail in many ways.
        except Exception as error:
            raise InputError(
                f"{env} cannot be copied ({error}), so it cannot be its own simulator; plan in a model."
            ) from None


@dataclass
class Attempt:
    """An episode of the real environment."""

    frames: list[Frame]
    actions: list[Action] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    """The first plan, and those that replaced it."""
    rewards: list[float] = field(default_factory=list)
    """The reward of each action."""
    ended: bool = False
    success: bool = False
    """Whether it ended with a reward above 0."""

    @property
    def reward(self) -> float:
        """Sum of the rewards."""
        return sum(self.rewards)

    def step(self, played: EnvironmentEpisodes, action: Action) -> Frame:
        """Carry out an action, and return what the environment then shows."""
        step = played.advance(played.env, action)
        self.frames.append(played.frame(played.env, step.observation))
        self.actions.append(action)
        self.rewards.append(step.reward)
        self.ended = step.terminated or step.truncated
        self.success = step.terminated and step.reward > 0
        return self.frames[-1]


def control(
    played: EnvironmentEpisodes,
    seed: int,
    simulator: Simulator[S],
    objective: Objective,
    actions: ActionSet,
    settings: PlanSettings,
    max_plans: int | None = 8,
    replan: int = 0,
    progress: Callable[[Plan], object] = lambda made: None,
) -> Attempt:
    """Play an episode of an environment by plans.

    A plan is carried out until it ends, or until a frame differs from what it predicts; then another is made
    from that frame. With `replan`, that is after so many actions, whatever the frames show (model predictive
    control).

    Args:
        played: The environment; `settings.max_steps` limits its episodes.
        seed: Seed of its episode.
        simulator: What the plans are tried in.
        objective: What they are for.
        actions: The actions to choose from.
        settings: Settings of the search.
        max_plans: Plans of an episode; None: as many as its steps need.
        replan: Actions of a plan that are carried out; 0: see above.
        progress: Called with each plan.

    Raises:
        InputError: the environment or the simulator does not take one of the actions, or `replan` is
            negative.
    """
    if replan < 0:
        raise InputError(f"replan is {replan}; use 1 or more, or 0 to plan anew when frames differ.")
    attempt, rest = Attempt([played.reset(seed)]), tuple[Action, ...]()
    while len(attempt.plans) != max_plans and len(attempt.actions) < played.settings.max_steps:
        found = plan(simulator, simulator.start(attempt.frames[-1]), objective, actions, settings, rest)
        attempt.plans.append(found)
        progress(found)
        rest = found.trajectory.actions[replan:] if replan else ()
        planned = zip(found.trajectory.actions, found.trajectory.rounds, strict=True)
        for action, rounds in itertools.islice(planned, replan or None):
            shown = attempt.step(played, action)
            if attempt.ended or len(attempt.actions) >= played.settings.max_steps:
                return attempt
            if replan:
                continue
            expected = SeenStates(settings.tolerance)
            expected.add(rounds[-1])
            if expected.add(shown):
                break
    return attempt


def random_attempt(
    played: EnvironmentEpisodes, seed: int, actions: ActionSet, rng: np.random.Generator
) -> Attempt:
    """Play an episode by random actions, for comparison."""
    attempt, proposal = Attempt([played.reset(seed)]), actions.proposal(played.settings.max_steps)
    for action in proposal.actions(proposal.sample(1, rng)[0]):
        attempt.step(played, action)
        if attempt.ended:
            break
    return attempt
