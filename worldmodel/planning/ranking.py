"""Policies ranked by what they earn in a learned world, beside what they earn in the real environment.

A world in which policies keep their order is one in which they can be chosen without the environment.
Policies see the same in both: frames of the model's size, and nothing else.

Needs the extra `gym`.
"""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import gymnasium
import numpy as np
from gymnasium import spaces

from worldmodel.actions import Action
from worldmodel.errors import InputError
from worldmodel.eval.figures import BOOTSTRAPS, Figure
from worldmodel.media import Frame
from worldmodel.planning.environment import Attempt
from worldmodel.planning.simulator import S, Simulator
from worldmodel.recording.environment import EnvironmentEpisodes
from worldmodel.recording.policies import Policy, open_policy

BATCH = 64
"""Rounds of the world that are played together."""


@dataclass(frozen=True)
class RankedPolicy:
    """What a policy earns from the same starts in the world and in the environment."""

    name: str
    imagined: tuple[float, ...]
    """Sum of the predicted rewards of each episode."""
    real: tuple[float, ...]
    """Sum of the environment's rewards of each episode."""


@dataclass
class _Imagined(Generic[S]):
    """An episode that is played in the world."""

    policy: Policy
    frame: Frame
    state: S
    total: float = 0.0
    ended: bool = False


def rank_policies(
    names: Sequence[str],
    played: EnvironmentEpisodes,
    simulator: Simulator[S],
    seeds: Sequence[int],
    per_round: int = 1,
    progress: Callable[[int], object] = lambda steps: None,
) -> list[RankedPolicy]:
    """Play episodes of every policy in a world and in the environment, from the same first frames.

    Args:
        names: Policies as in `open_policy`, each with `@SHARE` of random actions behind it, if at all.
        played: The environment; `settings.max_steps` limits the episodes in both.
        simulator: The world.
        seeds: Seeds of the episodes.
        per_round: Actions of a round of the world; a policy chooses one for all of them.
        progress: Called with the number of steps and rounds that were played.

    Returns:
        The policies in the order in which they were named.

    Raises:
        InputError: a policy cannot be opened or raises an error, or the world predicts no rewards.
    """
    shape = played.reset(seeds[0]).shape
    policies = [_open(name, FramesOnly(played.env.action_space, shape)) for name in names]
    real = [[_play(make(), played, seed, per_round, progress) for seed in seeds] for make in policies]
    starts = []
    for seed in seeds:
        frame = played.reset(seed)
        starts.append((seed, frame, simulator.start(frame)))
    episodes = []
    for make, (seed, frame, state) in itertools.product(policies, starts):
        policy = make()
        policy.reset(seed)
        episodes.append(_Imagined(policy, frame, state))
    for first in range(0, len(episodes), BATCH):
        _imagine(episodes[first : first + BATCH], played, simulator, per_round, progress)
    totals = iter(episode.total for episode in episodes)
    return [
        RankedPolicy(name, tuple(itertools.islice(totals, len(seeds))), tuple(earned))
        for name, earned in zip(names, real, strict=True)
    ]


class FramesOnly(gymnasium.Env):
    """What a policy is made for: the actions of an environment, and frames in place of its observations.

    It cannot be played, and has nothing of the environment's own state, which a learned world does not have.
    """

    def __init__(self, actions: spaces.Space, shape: tuple[int, ...]) -> None:
        self.action_space, self.observation_space = actions, spaces.Box(0, 255, shape, np.uint8)


def _open(name: str, env: FramesOnly) -> Callable[[], Policy]:
    """Return what makes a policy anew: each episode has its own, with random actions of its own."""
    base, _, share = name.partition("@")
    try:
        epsilon = float(share) if share else 0.0
    except ValueError:
        raise InputError(f"The policy {name!r} has the share {share!r}; use a number from 0 to 1.") from None

    def make() -> Policy:
        return open_policy(base, copy.deepcopy(env), epsilon)

    make()  # so that an unknown one is found before anything is played
    return make


def _choose(policy: Policy, frame: Frame, played: EnvironmentEpisodes, per_round: int) -> Action:
    try:
        element: Any = policy(frame)
        numbers = played.mapping.numbers(element).tolist()
    # Policies are any code.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"The policy {type(policy).__name__} cannot choose an action ({reason}); rank policies that see "
            "a frame, uint8 [h, w, 3], and return an element of the environment's action space."
        ) from error
    return Action.of_numbers(played.mapping.specs, numbers).of_round(per_round)


def _play(
    policy: Policy,
    played: EnvironmentEpisodes,
    seed: int,
    per_round: int,
    progress: Callable[[int], object],
) -> float:
    """Return the rewards of an episode of the environment."""
    attempt = Attempt([played.reset(seed)])
    policy.reset(seed)
    while not attempt.ended and len(attempt.actions) < played.settings.max_steps:
        attempt.step(played, _choose(policy, attempt.frames[-1], played, per_round))
        progress(1)
    return attempt.reward


def _imagine(
    episodes: Sequence[_Imagined[S]],
    played: EnvironmentEpisodes,
    simulator: Simulator[S],
    per_round: int,
    progress: Callable[[int], object],
) -> None:
    """Play episodes in the world, all in one batch."""
    for _ in range(played.settings.max_steps):
        going = [episode for episode in episodes if not episode.ended]
        if not going:
            break
        actions = [_choose(episode.policy, episode.frame, played, per_round) for episode in going]
        states = simulator.step([episode.state for episode in going], actions)
        for episode, state in zip(going, states, strict=True):
            outcome = simulator.outcome(state)
            if outcome is None:
                raise InputError("This model predicts no rewards; train it with outcomes: true.")
            episode.state, episode.frame = state, simulator.frames(state)[-1]
            episode.total += outcome.reward
            episode.ended = outcome.ended
        progress(len(going))


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the rank correlation of two lists, -1 to 1; NaN where one of them is constant.

    Source: Spearman 1904, Am. J. Psychol. 15:72; equal values have the mean of their ranks.
    """
    ranks = np.stack([_ranks(np.asarray(values, np.float64)) for values in (left, right)])
    ranks -= ranks.mean(axis=1, keepdims=True)
    scale = float(np.sqrt(np.square(ranks).sum(axis=1).prod()))
    return float(ranks.prod(axis=0).sum() / scale) if scale else math.nan


def _ranks(values: np.ndarray) -> np.ndarray:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def agreement(policies: Sequence[RankedPolicy]) -> Figure:
    """Return the rank correlation of the policies' mean returns with its bootstrap interval, for JSON.

    Policies and episodes are drawn again, with a fixed seed: the interval is for other policies of the kind
    and other starts. `n` is the number of policies.

    Source: Efron 1979, Ann. Stat. 7:1.
    """
    imagined, real = (np.array([getattr(each, name) for each in policies]) for name in ("imagined", "real"))
    rng, found = np.random.default_rng(0), []
    count, starts = imagined.shape
    for _ in range(BOOTSTRAPS):
        rows, columns = rng.integers(count, size=count), rng.integers(starts, size=starts)
        drawn = [each[rows][:, columns].mean(axis=1).tolist() for each in (imagined, real)]
        found.append(spearman(*drawn))
    usable = [value for value in found if not math.isnan(value)] or [math.nan]
    low, high = np.percentile(usable, (2.5, 97.5))
    value = spearman(imagined.mean(axis=1).tolist(), real.mean(axis=1).tolist())
    return {"value": value, "low": float(low), "high": float(high), "n": count}
