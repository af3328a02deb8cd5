"""Which samples a step takes, as pure functions of (seed, step): nothing is drawn that cannot be drawn again.

A sample is known by its global index, counted over the steps of a stage. The sources that offer the step's
task share its samples in blocks, so that how many samples a source has given by any step is a sum, and with
it the place in the source where the next one stands. A finite source is walked epoch after epoch, shuffled
window by window. No part of this knows of processes or workers: they only take their share of the result.
"""

import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from worldmodel.config import StageConfig
from worldmodel.data.sources import Source
from worldmodel.errors import ConfigError
from worldmodel.parallel.planner import assign

BLOCK = 1000
"""Samples within which every source gets its exact share."""
NEAR = 5
"""Attempts at replacing a bad clip within its window; after that, anywhere in the source."""
TASK, MIXTURE, WINDOWS, ROWS, REPLACEMENT, OWN = range(6)
"""What a random number is for: its seed has it at the end, so that no two purposes share numbers."""


@dataclass(frozen=True)
class Sample:
    """One sample of a step: which source makes it, and from which of its episodes."""

    index: int
    """Among all samples of the stage."""
    source: str
    episode: int
    """What the source calls it: for a finite source `epoch * size + row`."""


class Mixture:
    """Shares samples out to sources: exactly by weight in every block of `BLOCK`, at random inside it."""

    def __init__(self, weights: Sequence[float], seed: int, salt: int = 0) -> None:
        self.seed, self.salt = seed, salt
        quotas = np.maximum(np.round(np.asarray(weights) / sum(weights) * BLOCK).astype(int), 1)
        quotas[np.argmax(quotas)] += BLOCK - quotas.sum()  # what rounding left
        self.quotas = quotas
        self.block = lru_cache(maxsize=2)(self._block)

    def _block(self, number: int) -> np.ndarray:
        """Return who gets each sample of a block."""
        owners = np.repeat(np.arange(len(self.quotas)), self.quotas)
        return np.random.default_rng((self.seed, number, self.salt, MIXTURE)).permutation(owners)

    def source(self, sample: int) -> int:
        """Return the place of the source that gives a sample."""
        return int(self.block(sample // BLOCK)[sample % BLOCK])

    def given(self, source: int, samples: int) -> int:
        """Return how many of the first `samples` samples a source gives."""
        blocks, rest = divmod(samples, BLOCK)
        return int(blocks * self.quotas[source] + (self.block(blocks)[:rest] == source).sum())


class Order:
    """The order in which a source is walked, epoch after epoch: windows at random, and rows within each.

    A source that can only be read front to back (`Source.seekable` is false) keeps its windows in order, and
    is one endless epoch.
    """

    def __init__(self, source: Source, name: str, window: int, seed: int) -> None:
        self.size = source.size if source.seekable and source.size else sys.maxsize
        self.window, self.seekable = min(window, self.size), source.seekable
        self.key = (seed, zlib.crc32(name.encode()))
        self.windows = lru_cache(maxsize=2)(self._windows)
        self.rows = lru_cache(maxsize=4)(self._rows)

    def _windows(self, epoch: int) -> np.ndarray:
        count = -(-self.size // self.window)
        return np.random.default_rng((*self.key, epoch, WINDOWS)).permutation(count)

    def _rows(self, epoch: int, window: int) -> np.ndarray:
        first = window * self.window
        rng = np.random.default_rng((*self.key, epoch, window, ROWS))
        return first + rng.permutation(min(self.window, self.size - first))

    def episode(self, position: int) -> int:
        """Return `epoch * size + row` of the sample at a position of the endless walk."""
        if not self.seekable:
            window, place = divmod(position, self.window)
            return int(self.rows(0, window)[place])
        epoch, place = divmod(position, self.size)
        order = self.windows(epoch)
        missing = -self.size % self.window  # what the last window lacks
        end = (int(np.argmax(order == len(order) - 1)) + 1) * self.window - missing
        if place < end:
            slot, place = divmod(place, self.window)
        else:
            slot, place = divmod(place + missing, self.window)
        return epoch * self.size + int(self.rows(epoch, int(order[slot]))[place])

    def replacement(self, episode: int, attempt: int) -> int:
        """Return the episode that is tried instead of a bad one: another of its epoch.

        It is of the same window, which is at hand. Where a window of few rows has nothing else to give, a
        seekable source gives any row.
        """
        epoch, row = divmod(episode, self.size)
        first = row // self.window * self.window
        length = min(self.window, self.size - first)
        if self.seekable and (length == 1 or attempt > NEAR):
            first, length = 0, self.size
        rng = np.random.default_rng((*self.key, episode, attempt, REPLACEMENT))
        return epoch * self.size + first + (row - first + int(rng.integers(1, max(length, 2)))) % length


class Plan:
    """What every step of a stage takes.

    Raises:
        ConfigError: a task of the stage is offered by no source.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        weights: Mapping[str, float],
        stage: StageConfig,
        seed: int,
        window: int,
    ) -> None:
        self.stage, self.seed = stage, seed
        self.tasks = list(stage.tasks)
        chances = np.array([stage.tasks[task] for task in self.tasks])
        self.chances = chances / chances.sum()
        self.orders = {
            name: Order(source, name, window, seed)
            for name, source in sources.items()
            if source.size is not None or not source.seekable
        }
        self.givers: dict[str, list[str]] = {}
        self.mixtures: dict[str, Mixture] = {}
        for task in self.tasks:
            givers = [name for name, source in sources.items() if task in source.tasks and weights[name] > 0]
            if not givers:
                mixed = [source for name, source in sources.items() if weights[name] > 0]
                known = ", ".join(sorted({known for source in mixed for known in source.tasks})) or "nothing"
                raise ConfigError(
                    f"No source with a weight offers the task {task!r}; data.sources offer {known}."
                )
            self.givers[task] = givers
            self.mixtures[task] = Mixture([weights[name] for name in givers], seed, zlib.crc32(task.encode()))
        self._counted: tuple[int, Counter[str]] = (0, Counter())

    def task(self, step: int) -> str:
        """Return the task of a step."""
        return self.tasks[
            int(np.random.default_rng((self.seed, step)).choice(len(self.tasks), p=self.chances))
        ]

    def self_rollout(self, step: int) -> bool:
        """Return whether a step continues from the model's own predictions (see StageConfig.self_rollout)."""
        start, end = self.stage.self_rollout
        probability = start + (end - start) * step / self.stage.steps
        return bool(np.random.default_rng((self.seed, step, OWN)).random() < probability)

    def samples(self, step: int) -> list[Sample]:
        """Return the samples of a step, over all processes."""
        size, task = self.stage.batch_size, self.task(step)
        mixture, givers, before = self.mixtures[task], self.givers[task], self.steps_before(step)
        given = {name: self._given(name, before) for name in givers if name in self.orders}
        samples = []
        for place in range(size):
            name = givers[mixture.source(before[task] * size + place)]
            episode = index = step * size + place
            if name in self.orders:
                episode = self.orders[name].episode(given[name])
                given[name] += 1
            samples.append(Sample(index, name, episode))
        return samples

    def _given(self, name: str, before: Mapping[str, int]) -> int:
        """Return how many samples a source gave in earlier steps, over all tasks."""
        size = self.stage.batch_size
        return sum(
            self.mixtures[task].given(givers.index(name), before[task] * size)
            for task, givers in self.givers.items()
            if name in givers
        )

    def steps_before(self, step: int) -> Mapping[str, int]:
        """Count the earlier steps of each task."""
        if len(self.tasks) == 1:
            return Counter({self.tasks[0]: step})
        first, counts = self._counted
        if step < first:
            first, counts = 0, Counter()
        counts = counts + Counter(self.task(earlier) for earlier in range(first, step))
        self._counted = step, counts
        return counts


def share(costs: Sequence[float], dp_rank: int, dp_size: int) -> list[int]:
    """Return which samples of a step a rank takes: of equal cost, contiguous parts; else balanced ones."""
    if len(set(costs)) > 1:
        return assign(costs, dp_size)[dp_rank]
    return list(range(len(costs) * dp_rank // dp_size, len(costs) * (dp_rank + 1) // dp_size))
