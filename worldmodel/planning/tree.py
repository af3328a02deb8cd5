"""The tree of action sequences that were played: each prefix of a sequence is played once."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal

from worldmodel.actions import Action
from worldmodel.errors import InputError
from worldmodel.planning.objective import Objective, Trajectory
from worldmodel.planning.simulator import S, Simulator

Risk = Literal["expected", "worst"]
"""How the scores of several futures count: their mean, or the lowest."""


@dataclass(frozen=True)
class Node(Generic[S]):
    """States after a sequence of actions, one per future of the world, and how they were reached."""

    trajectories: tuple[Trajectory, ...]
    states: tuple[S, ...]
    objective: Objective
    risk: Risk = "expected"

    @property
    def trajectory(self) -> Trajectory:
        """What happens in the first future."""
        return self.trajectories[0]

    @property
    def ended(self) -> bool:
        """Whether the episode has ended in every future."""
        return all(each.ended for each in self.trajectories)

    @functools.cached_property
    def scores(self) -> tuple[float, ...]:
        """Values of the trajectories under the objective; minus infinity for empty ones.

        Raises:
            InputError: one is not a number.
        """
        return tuple(self._score(each) for each in self.trajectories)

    @functools.cached_property
    def score(self) -> float:
        """Mean of the scores, or the lowest."""
        return min(self.scores) if self.risk == "worst" else sum(self.scores) / len(self.scores)

    def _score(self, trajectory: Trajectory) -> float:
        if not trajectory.actions:
            return -math.inf
        score = float(self.objective(trajectory))
        if math.isnan(score):
            raise InputError(
                f"The score of {', '.join(map(str, trajectory.actions))} is not a number; return -inf to "
                "rule it out."
            )
        return score


class Tree(Generic[S]):
    """Plays sequences from the same start in one or several futures, in batches, until episodes end."""

    def __init__(
        self,
        simulator: Simulator[S],
        starts: Sequence[S],
        objective: Objective,
        batch_size: int,
        risk: Risk = "expected",
    ) -> None:
        self.simulator, self.objective, self.batch_size = simulator, objective, batch_size
        self.risk: Risk = risk
        self.root = Node((Trajectory(),) * len(starts), tuple(starts), objective, risk)
        self.nodes: dict[tuple[Action, ...], Node[S]] = {(): self.root}
        self.rounds = 0
        """Number of rounds that were played."""

    def play(self, sequences: Sequence[tuple[Action, ...]]) -> list[Node[S]]:
        """Return the end of each sequence."""
        for depth in range(1, max(map(len, sequences)) + 1):
            prefixes = {each[:depth]: None for each in sequences if len(each) >= depth}
            missing = [prefix for prefix in prefixes if prefix not in self.nodes]
            self.nodes |= {x: self.nodes[x[:-1]] for x in missing if self.nodes[x[:-1]].ended}
            missing = [prefix for prefix in missing if prefix not in self.nodes]
            at_once = max(1, self.batch_size // len(self.root.states))
            for first in range(0, len(missing), at_once):
                self._step(missing[first : first + at_once])
        return [self.nodes[each] for each in sequences]

    def forget(self) -> None:
        """Forget all but the root, where sequences do not share prefixes."""
        self.nodes = {(): self.root}

    def _step(self, prefixes: Sequence[tuple[Action, ...]]) -> None:
        parents = [self.nodes[prefix[:-1]] for prefix in prefixes]
        # A future that has ended stays as it is.
        places = [
            (row, future)
            for row, parent in enumerate(parents)
            for future, trajectory in enumerate(parent.trajectories)
            if not trajectory.ended
        ]
        states = self.simulator.step(
            [parents[row].states[future] for row, future in places],
            [prefixes[row][-1] for row, _ in places],
        )
        self.rounds += len(places)
        after = dict(zip(places, states, strict=True))
        for row, (prefix, parent) in enumerate(zip(prefixes, parents, strict=True)):
            trajectories, reached = [], []
            for future, (trajectory, state) in enumerate(
                zip(parent.trajectories, parent.states, strict=True)
            ):
                if (row, future) in after:
                    state = after[row, future]
                    rounds = (*trajectory.rounds, self.simulator.frames(state))
                    outcomes = (*trajectory.outcomes, self.simulator.outcome(state))
                    trajectory = Trajectory(prefix, rounds, outcomes)
                trajectories.append(trajectory)
                reached.append(state)
            self.nodes[prefix] = Node(tuple(trajectories), tuple(reached), self.objective, self.risk)
