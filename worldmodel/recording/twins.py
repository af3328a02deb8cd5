"""Recording of twin futures (`worldmodel.data.twins`): does the picture follow the actions?

The seed and the actions of an episode are played again up to a moment, and from there on two random sequences
of actions, which differ in their first one.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from gymnasium.utils.env_checker import data_equivalence

from worldmodel.errors import InputError
from worldmodel.recording.environment import EnvironmentEpisodes
from worldmodel.recording.episode import RecordedEpisode

ATTEMPTS = 10
"""Moments that are tried for two futures that both last."""
DRAWS = 100
"""Actions that are drawn for one that differs from another."""
MAX_STEPS = 500
"""Longest futures, which are read as a whole."""
VISIBLE = 32
"""Grey levels, of 255, by which a pixel differs where chance shows."""
MAX_ALIKE = 20
"""Pairs without any difference after which actions are taken to have no effect."""


class TwinEpisodes:
    """Plays pairs of futures; episodes 2k and 2k + 1 are a pair.

    Args:
        episodes: Plays the environment.
        recorded: The episodes of the recording that are played again.
        num_steps: Steps after the moment.
        history: Most steps before the moment that are kept.

    Raises:
        InputError: `num_steps` is out of range.
    """

    def __init__(
        self, episodes: EnvironmentEpisodes, recorded: Sequence[int], num_steps: int, history: int
    ) -> None:
        if not 1 <= num_steps <= MAX_STEPS:
            raise InputError(f"Twin futures have {num_steps} steps; use 1 to {MAX_STEPS}.")
        self.episodes, self.recorded = episodes, recorded
        self.num_steps, self.history = num_steps, history
        self.env_id, self.space = episodes.settings.env_id, episodes.env.action_space
        twins = {"steps": num_steps, "history": history}
        self.format = replace(episodes.format, settings={**episodes.format.settings, "twins": twins})
        self._pair = lru_cache(maxsize=1)(self._play_pair)
        self._taken = lru_cache(maxsize=len(recorded))(self._play_again)

    def episode(self, index: int) -> RecordedEpisode:
        """Return one of a pair.

        Raises:
            InputError: the environment is not reproducible, its episodes end at once, or as
                `EnvironmentEpisodes.episode`.
        """
        return self._pair(index // 2)[index % 2]

    def check(self) -> float:
        """Play pairs until one differs, and a future twice; return the seconds that a pair takes.

        Raises:
            InputError: as `episode`, or the actions make no difference to the picture.
        """
        began = time.perf_counter()
        first, _ = self._play_pair(0)
        took = time.perf_counter() - began
        again, _ = self._play_pair(0)
        if not _equal(first, again):
            raise self._not_reproducible()
        if all(_equal(*self._play_pair(number)) for number in range(MAX_ALIKE)):
            raise InputError(
                f"The actions of {self.env_id} make no difference to its picture: {MAX_ALIKE} pairs of "
                f"random futures of {self.num_steps} steps are alike; check its actions and the camera."
            )
        return took

    def differs_by_chance(self, number: int) -> bool:
        """Return whether the same actions can lead to visibly other frames from a moment on.

        An episode goes on with the policy's own actions, once as it was recorded and once after the random
        generator of the environment (`Env.np_random`) was replaced. Chance that an environment takes from
        elsewhere is not found.
        """
        rng = np.random.default_rng((self.episodes.settings.seed, number))
        index = self.recorded[number % len(self.recorded)]
        taken = self._taken(index)
        moment = int(rng.integers(max(0, len(taken) - self.num_steps) + 1))
        actions = taken[: moment + self.num_steps]
        recorded, other = (self.episodes.future(index, actions, moment, seed) for seed in (None, number))
        if len(recorded.actions) != len(other.actions):
            return True
        return any(
            bool((np.abs(frames.astype(int) - other.cameras[name]) > VISIBLE).any())
            for name, frames in recorded.cameras.items()
        )

    def _play_again(self, index: int) -> list[Any]:
        """Return what the policy does in an episode of an environment that is opened anew, as futures are."""
        fresh = EnvironmentEpisodes(self.episodes.settings)
        try:
            return fresh.actions(index)
        finally:
            fresh.close()

    def _play_pair(self, number: int) -> tuple[RecordedEpisode, RecordedEpisode]:
        rng = np.random.default_rng((self.episodes.settings.seed, number))
        index = self.recorded[number % len(self.recorded)]
        taken = self._taken(index)
        best: tuple[int, tuple[RecordedEpisode, RecordedEpisode]] | None = None
        for _ in range(ATTEMPTS):
            moment = int(rng.integers(max(0, len(taken) - self.num_steps) + 1))
            pair = self._futures(index, taken[:moment], rng)
            lasted = min(len(each.actions) for each in pair) - min(moment, self.history)
            if best is None or lasted > best[0]:
                best = lasted, pair
            if lasted == self.num_steps:
                break
        assert best, "there are attempts"
        if best[0] < 1:
            raise InputError(
                f"Episode {index} of {self.env_id} ends at once whatever is done in it; record longer "
                "episodes, or leave out the twins."
            )
        return best[1]

    def _futures(
        self, index: int, before: Sequence[Any], rng: np.random.Generator
    ) -> tuple[RecordedEpisode, RecordedEpisode]:
        """Play two futures of a moment, which differ in their first action."""
        self.space.seed(int(rng.integers(2**31)))
        one, other = ([self.space.sample() for _ in range(self.num_steps)] for _ in range(2))
        draws = 0
        while data_equivalence(one[0], other[0], exact=True):
            draws += 1
            if draws == DRAWS:
                raise InputError(f"{self.env_id} has one action, {one[0]!r}, so it has no twin futures.")
            other[0] = self.space.sample()
        shown_from = max(0, len(before) - self.history)
        first, second = (self.episodes.future(index, [*before, *each], shown_from) for each in (one, other))
        shared = len(before) - shown_from
        if not _equal(first, second, shared):
            raise self._not_reproducible()
        return first, second

    def _not_reproducible(self) -> InputError:
        return InputError(
            f"{self.env_id} is not reproducible: the same seed and actions gave other frames, so it has no "
            "twin futures; let reset(seed) decide all of its chance, or leave out the twins."
        )


def _equal(one: RecordedEpisode, other: RecordedEpisode, steps: int | None = None) -> bool:
    """Return whether two episodes have the same frames, up to a step or to the end."""
    lengths = {len(each.actions) for each in (one, other)}
    if len(lengths) > 1 if steps is None else min(lengths) < steps:
        return False
    end = None if steps is None else steps + 1
    return all(
        np.array_equal(frames[:end], other.cameras[name][:end]) for name, frames in one.cameras.items()
    )
