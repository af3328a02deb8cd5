"""Search for a sequence of actions.

random   the best of random sequences
cem      the cross-entropy method (Rubinstein, 1999): the distribution follows the best sequences
mppi     model predictive path integral control (Williams et al., 2017): it follows all, by their scores
search   breadth-first over the states of a world with a finite set of actions, without those seen before
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from worldmodel.actions import Action
from worldmodel.config.checks import check_literals, check_numbers
from worldmodel.errors import ConfigError
from worldmodel.media import Frame
from worldmodel.planning.objective import Objective, Trajectory
from worldmodel.planning.proposals import ActionSet, Choices
from worldmodel.planning.simulator import S, Simulator
from worldmodel.planning.tree import Node, Risk, Tree

Method = Literal["random", "cem", "mppi", "search"]
METHODS: tuple[str, ...] = get_args(Method)
BLOCK = 4
"""Side in pixels of the blocks by whose mean colours states are compared."""


@dataclass(frozen=True)
class PlanSettings:
    """Settings of a search."""

    method: Method = "cem"
    horizon: int = 12
    """Longest sequence, in actions."""
    candidates: int = 64
    """Sequences per iteration; for `search`, states of a depth that are continued, the best ones."""
    iterations: int = 4
    """Iterations of `random`, `cem` and `mppi`."""
    elites: float = 0.125
    """Share of the candidates that `cem` follows."""
    temperature: float = 0.3
    """Of `mppi`, in standard deviations of the scores: with a lower one, the best sequences count more."""
    until: float = float("inf")
    """Score with which the search ends."""
    tolerance: float = 24.0
    """`search` takes two frames for one state if no block of 4 x 4 pixels differs by more, of 255."""
    batch_size: int = 64
    """Rounds that are played together."""
    seed: int = 0
    hold: int = 1
    """Rounds for which `random`, `cem` and `mppi` hold each action, of which they then choose fewer."""
    risk: Risk = "expected"
    """How several futures of a sequence count, if the search starts from several states."""

    def __post_init__(self) -> None:
        check_literals(self)
        check_numbers(self, "horizon", "hold", "candidates", "iterations", "batch_size", least=1)
        if not (0 < self.elites <= 1 and 0 < self.temperature < np.inf and self.tolerance >= 0):
            raise ConfigError(
                f"elites is {self.elites}, temperature {self.temperature} and tolerance {self.tolerance}; "
                "use above 0 to 1, above 0, and 0 or more."
            )


@dataclass(frozen=True)
class Plan:
    """The best sequence that was found."""

    trajectory: Trajectory
    """Its actions, and what the simulator predicts for each in the first future."""
    score: float
    """Mean score of its futures, or the lowest (`risk`)."""
    scores: tuple[float, ...]
    """Score of each future."""
    num_rounds: int
    """Rounds that were played to find it."""


def plan(
    simulator: Simulator[S],
    start: S,
    objective: Objective,
    actions: ActionSet,
    settings: PlanSettings = PlanSettings(),
    follow: Sequence[Action] = (),
    futures: Sequence[S] = (),
) -> Plan:
    """Return the best sequence of actions that a search finds.

    Except for `search`, the first samples are drawn around `follow`: the rest of the plan before this one.
    Where the world is uncertain, `futures` are further states of the same moment in which other things happen
    (`ModelSimulator.futures`): a sequence is played in all of them, and scored by `settings.risk`.

    Raises:
        ConfigError: `search` without a finite set of actions.
        InputError: the simulator does not take one of the actions, or a score is not a number.
    """
    tree = Tree(simulator, [start, *futures], objective, settings.batch_size, settings.risk)
    if settings.method == "search":
        best = _search(tree, actions, settings)
    else:
        best = _sample(tree, actions, settings, follow)
    return Plan(best.trajectory, best.score, best.scores, tree.rounds)


def _sample(tree: Tree[S], actions: ActionSet, settings: PlanSettings, follow: Sequence[Action]) -> Node[S]:
    hold, horizon = settings.hold, settings.horizon
    proposal, rng = actions.proposal(math.ceil(horizon / hold)), np.random.default_rng(settings.seed)
    proposal.follow(follow[:horizon:hold])
    best: Node[S] | None = None
    for _ in range(settings.iterations):
        if not isinstance(actions, Choices):
            tree.forget()
        samples = proposal.sample(settings.candidates, rng)
        nodes = tree.play([_held(proposal.actions(sample), hold)[:horizon] for sample in samples])
        best = max([*([best] if best else []), *nodes], key=lambda node: node.score)
        if best.score >= settings.until:
            break
        if settings.method != "random":
            proposal.update(samples, _weights(np.array([node.score for node in nodes]), settings))
    assert best
    return best


def _held(actions: Sequence[Action], rounds: int) -> tuple[Action, ...]:
    return tuple(itertools.chain.from_iterable(itertools.repeat(action, rounds) for action in actions))


def _weights(scores: np.ndarray, settings: PlanSettings) -> np.ndarray:
    """Return the weights of candidates in an update, which add up to 1."""
    if settings.method == "cem":
        count = max(1, round(settings.elites * len(scores)))
        weights = np.zeros(len(scores))
        weights[np.argsort(-scores, kind="stable")[:count]] = 1 / count
        return weights
    usable = np.isfinite(scores)
    if not usable.any():
        return np.full(len(scores), 1 / len(scores))
    spread = scores[usable].std()
    # Sequences that are ruled out (score -inf) get weight 0.
    weights = np.exp((scores - scores[usable].max()) / (settings.temperature * spread if spread else 1.0))
    return weights / weights.sum()


def _search(tree: Tree[S], actions: ActionSet, settings: PlanSettings) -> Node[S]:
    if not isinstance(actions, Choices):
        raise ConfigError("The method search needs a finite set of actions; use cem or mppi for vectors.")
    seen = SeenStates(settings.tolerance)
    seen.add(tree.simulator.frames(tree.root.states[0])[-1])
    frontier: Sequence[Node[S]] = [tree.root]
    best: Node[S] | None = None
    for _ in range(settings.horizon):
        made = tree.play(
            [(*node.trajectory.actions, action) for node in frontier for action in actions.actions]
        )
        best = max([*([best] if best else []), *made], key=lambda node: node.score)
        going = [node for node in made if not node.ended]
        frontier = [node for node in going if seen.add(node.trajectory.rounds[-1][-1])]
        frontier = sorted(frontier, key=lambda node: -node.score)[: settings.candidates]
        if best.score >= settings.until or not frontier:
            break
    assert best
    return best


class SeenStates:
    """Frames that were seen, compared by the mean colours of their blocks."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self._seen: list[np.ndarray] = []

    def add(self, frame: Frame) -> bool:
        """Remember a frame; return whether it shows a state that was not seen before."""
        height, width = (side // BLOCK * BLOCK for side in frame.shape[:2])
        blocks = frame[:height, :width].reshape(height // BLOCK, BLOCK, width // BLOCK, BLOCK, 3)
        means = blocks.mean(axis=(1, 3)).astype(np.float32).ravel()
        if self._seen and (np.abs(np.stack(self._seen) - means).max(axis=1) <= self.tolerance).any():
            return False
        self._seen.append(means)
        return True
