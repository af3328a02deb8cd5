"""Batches of episodes, in an order that is a function of (seed, step): the only importer of torchdata."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode, Loader, Mapper, ParallelMapper

from worldmodel.config import StageConfig
from worldmodel.data.sources import Source
from worldmodel.types import Episode


@dataclass(frozen=True)
class Batch:
    """Episodes of one task for one step on one process."""

    step: int
    task: str
    episodes: list[Episode]
    self_rollout: float = 0.0
    """Chance that the model continues from its own predictions (see StageConfig)."""


class Steps(BaseNode[int]):
    """Counts steps; its state is the next step."""

    KEY = "step"

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.step = first

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.step = initial_state[self.KEY] if initial_state else self.first

    def next(self) -> int:
        if self.step >= self.last:
            raise StopIteration
        self.step += 1
        return self.step - 1

    def get_state(self) -> dict[str, Any]:
        return {self.KEY: self.step}


def batches(
    source: Source,
    stage: StageConfig,
    seed: int,
    first_step: int,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
) -> Loader[Batch]:
    """Stream one stage's batches from `first_step` on.

    The task of a step and the episodes in it depend on (seed, step) alone: every process draws the same
    task and takes its own part, and a run that starts again at a step sees what it would have seen.
    """
    names = list(stage.tasks)
    weights = np.array([stage.tasks[name] for name in names])
    weights = weights / weights.sum()

    def make(step: int) -> Batch:
        task = names[int(np.random.default_rng((seed, step)).choice(len(names), p=weights))]
        first = (step * world_size + rank) * stage.batch_size
        episodes = [
            source.episode(task, seed, index, stage.rounds)
            for index in range(first, first + stage.batch_size)
        ]
        start, end = stage.self_rollout
        return Batch(step, task, episodes, start + (end - start) * step / stage.steps)

    steps = Steps(first_step, stage.steps)
    if num_workers:
        return Loader(ParallelMapper(steps, make, num_workers=num_workers, method="thread", in_order=True))
    return Loader(Mapper(steps, make))
