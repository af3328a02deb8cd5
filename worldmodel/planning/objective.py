"""Objectives of plans: rewards, a goal in words, or a goal image."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from worldmodel import media
from worldmodel.actions import Action
from worldmodel.config import ImageSize
from worldmodel.episodes import Outcome
from worldmodel.errors import InputError
from worldmodel.media import Frame, Frames


@dataclass(frozen=True)
class Trajectory:
    """Result of a sequence of actions."""

    actions: tuple[Action, ...] = ()
    rounds: tuple[Frames, ...] = ()
    """Frames of each round, uint8 `[t, h, w, 3]`."""
    outcomes: tuple[Outcome | None, ...] = ()
    """Reward and end of each round; None where the simulator has none."""

    @property
    def ended(self) -> bool:
        """Whether the episode has ended."""
        return any(outcome is not None and outcome.ended for outcome in self.outcomes[-1:])


class Objective(Protocol):
    """Scores what a plan leads to; a higher score is better."""

    def __call__(self, trajectory: Trajectory, /) -> float:
        """Return the score of a trajectory."""
        ...


@dataclass(frozen=True)
class Return:
    """The discounted sum of the rewards of all rounds."""

    reward: Callable[[Frames, Action], float] | None = None
    """Reward of a round, from its frames and the action that led to them, as in `worldmodel.env`; None: that
    of the simulator."""
    discount: float = 1.0

    def __call__(self, trajectory: Trajectory, /) -> float:
        """Return the sum.

        Raises:
            InputError: neither the simulator nor `reward` gives rewards.
        """
        total = 0.0
        steps = zip(trajectory.rounds, trajectory.actions, trajectory.outcomes, strict=True)
        for number, (frames, action, outcome) in enumerate(steps):
            if self.reward is None and outcome is None:
                raise InputError(
                    "This model predicts no rewards; pass a reward of frames, or train with outcomes: true."
                )
            given = self.reward(frames, action) if self.reward else outcome.reward if outcome else 0.0
            total += self.discount**number * given
        return total


class Reached:
    """The reward of the last round alone, for goals that count once: the probability of a goal in words."""

    def __call__(self, trajectory: Trajectory, /) -> float:
        """Return the reward; of no rounds, minus infinity.

        Raises:
            InputError: the simulator gives no rewards.
        """
        if not trajectory.outcomes:
            return -np.inf
        last = trajectory.outcomes[-1]
        if last is None:
            raise InputError("This simulator gives no rewards; plan in a model with a goal (ModelSimulator).")
        return last.reward


class GoalImage:
    """Minus the distance of the last frame to an image: the mean absolute difference of pixels, 0 to 255.

    Args:
        image: Path, bytes, Pillow image or uint8 array.
        size: Size of the frames.

    Raises:
        InputError: the image cannot be read.
    """

    def __init__(self, image: Any, size: ImageSize) -> None:
        self.image: Frame = media.read_image(image, size)

    def __call__(self, trajectory: Trajectory, /) -> float:
        """Return minus the distance; of no rounds, minus infinity."""
        if not trajectory.rounds:
            return -np.inf
        return -float(np.abs(trajectory.rounds[-1][-1].astype(np.float32) - self.image).mean())
