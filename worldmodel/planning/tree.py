"""The tree of action sequences that were played: each prefix of a sequence is played once."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from worldmodel.errors import InputError
from worldmodel.planning.objective import Objective, Trajectory
from worldmodel.planning.simulator import S, Simulator
from worldmodel.types import Action


@dataclass(frozen=True)
class Node(Generic[S]):
    """A state, and how it was reached."""

    trajectory: Trajectory
    state: S
    objective: Objective

    @functools.cached_property
    def score(self) -> float:
        """What the objective says of the trajectory; that of the empty one is minus infinity.

        Raises:
            InputError: it is not a number.
        """
        if not self.trajectory.actions:
            return -math.inf
        score = float(self.objective(self.trajectory))
        if math.isnan(score):
            raise InputError(
                f"The score of {', '.join(map(str, self.trajectory.actions))} is not a number; return -inf "
                "to rule it out."
            )
        return score


class Tree(Generic[S]):
    """Plays sequences from one state, in batches; they stop where their episode ends."""

    def __init__(self, simulator: Simulator[S], start: S, objective: Objective, batch_size: int) -> None:
        self.simulator, self.objective, self.batch_size = simulator, objective, batch_size
        self.root = Node(Trajectory(), start, objective)
        self.nodes: dict[tuple[Action, ...], Node[S]] = {(): self.root}
        self.rounds = 0
        """Number of rounds that were played."""

    def play(self, sequences: Sequence[tuple[Action, ...]]) -> list[Node[S]]:
        """Return the end of each sequence."""
        for depth in range(1, max(map(len, sequences)) + 1):
            prefixes = {each[:depth]: None for each in sequences if len(each) >= depth}
            missing = [prefix for prefix in prefixes if prefix not in self.nodes]
            self.nodes |= {x: self.nodes[x[:-1]] for x in missing if self.nodes[x[:-1]].trajectory.ended}
            missing = [prefix for prefix in missing if prefix not in self.nodes]
            for first in range(0, len(missing), self.batch_size):
                self._step(missing[first : first + self.batch_size])
        return [self.nodes[each] for each in sequences]

    def forget(self) -> None:
        """Forget all but the root, where sequences do not share prefixes."""
        self.nodes = {(): self.root}

    def _step(self, prefixes: Sequence[tuple[Action, ...]]) -> None:
        parents = [self.nodes[prefix[:-1]] for prefix in prefixes]
        states = self.simulator.step([node.state for node in parents], [prefix[-1] for prefix in prefixes])
        self.rounds += len(prefixes)
        for prefix, parent, state in zip(prefixes, parents, states, strict=True):
            rounds = (*parent.trajectory.rounds, self.simulator.frames(state))
            outcomes = (*parent.trajectory.outcomes, self.simulator.outcome(state))
            trajectory = Trajectory(prefix, rounds, outcomes)
            self.nodes[prefix] = Node(trajectory, state, self.objective)
