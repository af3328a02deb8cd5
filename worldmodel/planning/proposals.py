"""Distributions of action sequences, which sample candidates and learn from their scores."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from worldmodel.actions import Action
from worldmodel.config import WorldModelConfig
from worldmodel.errors import InputError

KEPT = 0.3
"""Share of the former distribution that an update keeps, so that no action is given up at once."""
MIN_STD = 0.05
"""Smallest standard deviation of a number, as a share of its range."""


@dataclass(frozen=True)
class Choices:
    """A finite set of actions."""

    actions: tuple[Action, ...]

    def __post_init__(self) -> None:
        if not self.actions:
            raise InputError("There are no actions to choose from; name at least one.")

    def proposal(self, horizon: int) -> "Proposal":
        """Return the uniform distribution of sequences."""
        return CategoricalProposal(self.actions, horizon)


@dataclass(frozen=True)
class Box:
    """Vectors between bounds."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    per_round: int = 1
    """Actions of a round, all with the same vector."""

    def proposal(self, horizon: int) -> "Proposal":
        """Return a normal distribution around the middle of the bounds, cut at them."""
        return GaussianProposal(np.array(self.low), np.array(self.high), horizon, self.per_round)


ActionSet = Choices | Box


def action_set(config: WorldModelConfig) -> ActionSet:
    """Return the actions of a model: vectors if it takes them, else each key, and none in a world that runs.

    Each holds for a whole round.

    Raises:
        InputError: the model takes neither; name its actions.
    """
    takes = config.action
    if takes.vector:
        low, high = takes.vector.low or (-1.0,), takes.vector.high or (1.0,)
        unbounded = 1 if takes.vector.low else takes.vector.size
        return Box(low * unbounded, high * unbounded, takes.per_round)
    if not takes.keys:
        raise InputError(
            "This model takes neither keys nor vectors; name the actions to choose from (--action, Choices)."
        )
    idle = () if config.pace == "on_action" else (Action(),)
    held = (*(Action(keys=(key,)) for key in takes.keys), *idle)
    return Choices(tuple(each.of_round(takes.per_round) for each in held))


class Proposal(ABC):
    """A distribution of sequences of actions; a sample is an array with one row per action."""

    @abstractmethod
    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return `count` samples `[count, horizon, …]`."""

    @abstractmethod
    def actions(self, sample: np.ndarray) -> tuple[Action, ...]:
        """Return the actions of a sample."""

    @abstractmethod
    def follow(self, actions: Sequence[Action]) -> None:
        """Sample the first actions around these, the rest of an earlier plan."""

    @abstractmethod
    def update(self, samples: np.ndarray, weights: np.ndarray) -> None:
        """Move towards samples, by weights `[count]` that add up to 1."""


class CategoricalProposal(Proposal):
    """Independent probabilities of the actions at every step."""

    def __init__(self, actions: Sequence[Action], horizon: int) -> None:
        self.choices = tuple(actions)
        self.probabilities = np.full((horizon, len(self.choices)), 1 / len(self.choices))

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return indices of actions `[count, horizon]`."""
        bounds = self.probabilities.cumsum(axis=1)[None, :, :-1]
        return (rng.random((count, len(self.probabilities), 1)) > bounds).sum(axis=2)

    def actions(self, sample: np.ndarray) -> tuple[Action, ...]:
        """Return the actions of a sample."""
        return tuple(self.choices[index] for index in sample)

    def follow(self, actions: Sequence[Action]) -> None:
        """Give these actions most of the probability."""
        chosen = [self.choices.index(action) for action in actions]
        self.probabilities[: len(chosen)] *= KEPT
        self.probabilities[range(len(chosen)), chosen] += 1 - KEPT

    def update(self, samples: np.ndarray, weights: np.ndarray) -> None:
        """Move the probabilities towards the weighted frequencies."""
        shares = np.einsum("n,nhk->hk", weights, np.eye(len(self.choices))[samples])
        self.probabilities = KEPT * self.probabilities + (1 - KEPT) * shares


class GaussianProposal(Proposal):
    """Independent normal distributions of the numbers at every step."""

    def __init__(self, low: np.ndarray, high: np.ndarray, horizon: int, per_round: int = 1) -> None:
        self.low, self.high, self.per_round = low, high, per_round
        self.mean = np.tile((low + high) / 2, (horizon, 1))
        self.std = np.tile((high - low) / 2, (horizon, 1))

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return vectors `[count, horizon, a]`."""
        noise = rng.standard_normal((count, *self.mean.shape))
        return np.clip(self.mean + self.std * noise, self.low, self.high)

    def actions(self, sample: np.ndarray) -> tuple[Action, ...]:
        """Return the actions of a sample."""
        return tuple(Action(vector=tuple(row)).of_round(self.per_round) for row in sample.tolist())

    def follow(self, actions: Sequence[Action]) -> None:
        """Begin with these vectors as the mean."""
        for row, action in enumerate(actions):
            first = action.chunk[0] if action.chunk else action
            self.mean[row] = first.vector

    def update(self, samples: np.ndarray, weights: np.ndarray) -> None:
        """Move mean and deviation towards the weighted samples'."""
        mean = np.einsum("n,nha->ha", weights, samples)
        std = np.sqrt(np.einsum("n,nha->ha", weights, np.square(samples - mean)))
        self.mean = KEPT * self.mean + (1 - KEPT) * mean
        self.std = np.maximum(KEPT * self.std + (1 - KEPT) * std, MIN_STD * (self.high - self.low))
