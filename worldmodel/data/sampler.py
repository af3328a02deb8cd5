"""Samplers: which episodes a step takes, as pure functions of (seed, step).

A sample is identified by its global index, counted over the steps of a stage. The sources that offer the
step's task share its samples in blocks, so the number of samples that a source has provided before any step
is a sum, which gives the position of its next one. A finite source is read epoch after epoch, shuffled
window by window. Nothing here depends on processes or workers: they only take their share of the result.
"""

import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from worldmodel.config import StageConfig
from worldmodel.data.buckets import BucketedSource, Size
from worldmodel.data.sources import Source, StreamedSource
from worldmodel.errors import ConfigError
from worldmodel.parallel.planner import chunks_by_area

BLOCK = 1000
"""Samples within which every source provides its exact share."""
NEAR_ATTEMPTS = 5
"""Attempts at replacing a bad clip from its window; after that, from the whole source."""
TASK, MIXTURE, WINDOWS, ROWS, REPLACEMENT, SELF_ROLLOUT = range(6)
"""Purposes of random numbers: the last element of a seed, so that no two purposes share numbers."""


@dataclass(frozen=True)
class Sample:
    """One sample of a step: its source, and which of the source's episodes it is."""

    index: int
    """Index among all samples of the stage."""
    source: str
    episode: int
    """Index within the source: for a finite one `epoch * size + row`."""
    turn: int | None = None
    """Position in the order of a source that is read in streams; ranks take turns there."""
    bucket: int = 0
    """Bucket of the step, see buckets.py."""


class Mixture:
    """Assigns samples to sources: exactly by weight in every block of `BLOCK`, in random order within it."""

    def __init__(self, weights: Sequence[float], seed: int, salt: int = 0) -> None:
        self.seed, self.salt = seed, salt
        # Exact quotas per block, unlike independent draws, make the number of samples before any step a sum
        # of a product and one partial block: resuming costs the same at any step. A source with a tiny weight
        # still gets one sample in a block.
        quotas = np.maximum(np.round(np.asarray(weights) / sum(weights) * BLOCK).astype(int), 1)
        quotas[np.argmax(quotas)] += BLOCK - quotas.sum()  # the rounding error
        self.quotas = quotas
        self.block = lru_cache(maxsize=2)(self._block)

    def _block(self, number: int) -> np.ndarray:
        """Return the index of the source of each sample of a block."""
        owners = np.repeat(np.arange(len(self.quotas)), self.quotas)
        return np.random.default_rng((self.seed, number, self.salt, MIXTURE)).permutation(owners)

    def source(self, sample: int) -> int:
        """Return the index of the source of a sample."""
        return int(self.block(sample // BLOCK)[sample % BLOCK])

    def count(self, source: int, samples: int) -> int:
        """Count the samples of a source among the first `samples`."""
        blocks, rest = divmod(samples, BLOCK)
        return int(blocks * self.quotas[source] + (self.block(blocks)[:rest] == source).sum())


class EpisodeSampler:
    """The order of a source's episodes, epoch after epoch: shuffled windows, and shuffled rows within each.

    A source that can only be read front to back (`Source.streams` above 0) keeps its windows in order and has
    a single endless epoch. Its streams take turns: position `p` is a row of stream `p % streams`.

    Args:
        source: The source.
        name: Its name, which seeds its order.
        window: Rows that are shuffled together.
        seed: Seed of the run.
        bucket: Above 0, so many rows of about equal cost of a window follow each other.
        rounds: Most rounds of an episode, for its cost.
        part: The rows of the source that it is about; None is all.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        window: int,
        seed: int,
        bucket: int = 0,
        rounds: int = 1,
        part: range | None = None,
    ) -> None:
        self.streams, self.bucket = source.streams, bucket
        self.total = source.size if not self.streams and source.size else sys.maxsize
        self.first, self.size = (part.start, len(part)) if part else (0, self.total)
        self.cost = lambda row: source.cost(self.first + row, rounds)
        self.window = min(window, self.size)
        if bucket:
            # Whole buckets in a window, so that only the last window of an epoch has one that is not full.
            self.window -= self.window % bucket if self.window > bucket else 0
        if isinstance(source, StreamedSource) and source.streams:
            self.window = source.window * source.streams
        self.key = (seed, zlib.crc32(name.encode()))
        self.windows = lru_cache(maxsize=2)(self._windows)
        self.rows = lru_cache(maxsize=4)(self._rows)

    def _windows(self, epoch: int) -> np.ndarray:
        count = -(-self.size // self.window)
        return np.random.default_rng((*self.key, epoch, WINDOWS)).permutation(count)

    def _rows(self, epoch: int, window: int) -> np.ndarray:
        first = window * self.window
        rng = np.random.default_rng((*self.key, epoch, window, ROWS))
        if not self.streams:
            return self._bucketed(first + rng.permutation(min(self.window, self.size - first)), rng)
        # Position p stays a row of stream p % streams: each stream is shuffled apart, and streams take turns.
        orders = [rng.permutation(self.window // self.streams) for _ in range(self.streams)]
        return first + (np.stack(orders, axis=1) * self.streams + np.arange(self.streams)).flatten()

    def _bucketed(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Put rows of about equal cost into buckets, in random order; one that is not full is the last."""
        if not self.bucket:
            return rows
        rows = rows[np.argsort([self.cost(int(row)) for row in rows], kind="stable")]
        full = len(rows) // self.bucket
        buckets = np.split(rows, np.arange(1, full + 1) * self.bucket)
        return np.concatenate([*(buckets[index] for index in rng.permutation(full)), buckets[full]])

    def episode(self, position: int) -> int:
        """Return `epoch * total + row` of the sample at a position of the endless order."""
        if self.streams:
            window, offset = divmod(position, self.window)
            return int(self.rows(0, window)[offset])
        epoch, offset = divmod(position, self.size)
        windows = self.windows(epoch)
        # Windows are visited in random order, and the short last one may come anywhere. Positions after it
        # are moved on by what it lacks, so that a division finds their window again.
        missing = -self.size % self.window  # rows that the last window is short of
        end = (int(np.argmax(windows == len(windows) - 1)) + 1) * self.window - missing
        if offset < end:
            index, offset = divmod(offset, self.window)
        else:
            index, offset = divmod(offset + missing, self.window)
        return epoch * self.total + self.first + int(self.rows(epoch, int(windows[index]))[offset])

    def replacement(self, episode: int, attempt: int) -> int:
        """Return the episode that replaces a bad one: another of the same epoch.

        It comes from the same window of the same stream, which is already in memory. Without streams any row
        of the source may be taken when a small window has no others.
        """
        epoch, row = divmod(episode, self.total)
        row -= self.first
        first = row // self.window * self.window
        length = min(self.window, self.size - first)
        if not self.streams and (length == 1 or attempt > NEAR_ATTEMPTS):
            first, length = 0, self.size
        step = self.streams or 1
        place, stream = divmod(row - first, step)
        count = length // step
        rng = np.random.default_rng((*self.key, episode, attempt, REPLACEMENT))
        # An offset of 1 to count - 1 gives another row wherever there is one; attempts differ in their random
        # numbers.
        place = (place + int(rng.integers(1, max(count, 2)))) % count
        return epoch * self.total + self.first + first + place * step + stream


def offering_sources(
    sources: Mapping[str, Source], weights: Mapping[str, float], stage: StageConfig
) -> dict[str, list[str]]:
    """Return the names of the sources with a weight that offer each task of a stage.

    Raises:
        ConfigError: a task is offered by none.
    """
    mixed = {name: source for name, source in sources.items() if weights[name] > 0}
    found = {}
    for task in stage.tasks:
        found[task] = [name for name, source in mixed.items() if task in source.tasks]
        if not found[task]:
            known = ", ".join(sorted({known for source in mixed.values() for known in source.tasks}))
            raise ConfigError(
                f"No source with a weight offers the task {task!r}; data.sources offer {known or 'nothing'}."
            )
    return found


Kind = tuple[str, int]
"""Task and bucket of a step."""


class StepSampler:
    """The task, the bucket and the samples of every step of a stage.

    A bucket is drawn as often as its clips, by the weights of their sources, are among all that offer a task.

    Args:
        sources: All sources by name.
        weights: Of all sources.
        stage: Steps, batch size and tasks.
        seed: Seed of the order.
        window: Clips that are shuffled together.
        length_buckets: Whether episodes of a step are of about equal length.
        sizes: Height and width of the frames of every bucket.
        bucket_of: Bucket of each source whose clips are all in one; without, the first.

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
        length_buckets: bool = False,
        sizes: Sequence[Size] = (),
        bucket_of: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.stage, self.seed, self.sizes, self.bucket_of = stage, seed, sizes, bucket_of
        bucket = stage.batch_size * length_buckets
        parts = {name: _parts(source, bucket_of.get(name, 0)) for name, source in sources.items()}
        self.samplers = {
            (name, number): EpisodeSampler(
                sources[name], _named(name, number), window, seed, bucket, stage.rounds, part
            )
            for name, ranges in parts.items()
            for number, part in ranges.items()
            if sources[name].size is not None or sources[name].streams
            if part is None or len(part)
        }
        self.offering: dict[Kind, list[str]] = {}
        """Sources of each kind of step."""
        self.mixtures: dict[Kind, Mixture] = {}
        amounts: dict[Kind, float] = {}
        for task, names in sorted(offering_sources(sources, weights, stage).items()):
            for number in range(max(len(self.sizes), 1)):
                shares = {name: weights[name] * _share(parts[name], number) for name in names}
                if not any(shares.values()):
                    continue
                kind = task, number
                self.offering[kind] = found = [name for name in names if shares[name]]
                salt = zlib.crc32(_named(task, number).encode())
                self.mixtures[kind] = Mixture([shares[name] for name in found], seed, salt)
                every = sum(weights[name] for name in names)
                amounts[kind] = stage.tasks[task] * (sum(shares.values()) / every)
        self.kinds = list(amounts)  # sorted: the order of tasks in a file must not change a run
        weights_of_kinds = np.array(list(amounts.values()))
        self.probabilities = weights_of_kinds / weights_of_kinds.sum()
        self._counted: tuple[int, Counter[Kind]] = (0, Counter())

    def kind(self, step: int) -> Kind:
        """Return the task and the bucket of a step."""
        return self.kinds[
            int(np.random.default_rng((self.seed, step)).choice(len(self.kinds), p=self.probabilities))
        ]

    def task(self, step: int) -> str:
        """Return the task of a step."""
        return self.kind(step)[0]

    def size(self, step: int) -> tuple[int, int] | None:
        """Return height and width of the frames of a step; None without buckets."""
        return self.sizes[self.kind(step)[1]] if self.sizes else None

    def self_rollout(self, step: int) -> bool:
        """Return whether a step continues from the model's own predictions (see StageConfig.self_rollout)."""
        start, end = self.stage.self_rollout
        probability = start + (end - start) * step / self.stage.steps
        return bool(np.random.default_rng((self.seed, step, SELF_ROLLOUT)).random() < probability)

    def samples(self, step: int) -> list[Sample]:
        """Return the samples of a step, over all processes."""
        size, kind = self.stage.batch_size, self.kind(step)
        mixture, offering, before = self.mixtures[kind], self.offering[kind], self.steps_before(step)
        bucket = kind[1]
        samplers = {name: self.samplers.get((name, bucket)) for name in offering}
        positions = {name: self._position(name, bucket, before) for name in offering if samplers[name]}
        samples = []
        for offset in range(size):
            name = offering[mixture.source(before[kind] * size + offset)]
            episode = index = step * size + offset
            turn = None
            if (sampler := samplers[name]) is not None:
                episode = sampler.episode(positions[name])
                turn = positions[name] if sampler.streams else None
                positions[name] += 1
            samples.append(Sample(index, name, episode, turn, bucket))
        return samples

    def window(self, name: str, step: int) -> int:
        """Return the window of a source in streams from which its next sample comes at a step."""
        bucket = self.bucket_of.get(name, 0)
        return self._position(name, bucket, self.steps_before(step)) // self.samplers[name, bucket].window

    def _position(self, name: str, bucket: int, before: Mapping[Kind, int]) -> int:
        """Count the samples of a bucket that a source provided in earlier steps, over all tasks."""
        size = self.stage.batch_size
        return sum(
            self.mixtures[kind].count(offering.index(name), before[kind] * size)
            for kind, offering in self.offering.items()
            if kind[1] == bucket and name in offering
        )

    def steps_before(self, step: int) -> Mapping[Kind, int]:
        """Count the earlier steps of each kind."""
        if len(self.kinds) == 1:
            return Counter({self.kinds[0]: step})
        # The kind of a step is drawn from (seed, step), so only counting finds how many came before. The
        # count is kept for the next step; far into a run, the first call takes seconds.
        first, counts = self._counted
        if step < first:
            first, counts = 0, Counter()
        counts = counts + Counter(self.kind(earlier) for earlier in range(first, step))
        self._counted = step, counts
        return counts


def _parts(source: Source, bucket: int) -> dict[int, range | None]:
    """Return the rows of a source in every bucket; None is all, where they are in one bucket."""
    if not isinstance(source, BucketedSource):
        return {bucket: None}
    ends = np.cumsum(source.counts).tolist()
    ranges = (range(end - count, end) for count, end in zip(source.counts, ends, strict=True))
    return dict(enumerate(ranges))


def _share(parts: Mapping[int, range | None], bucket: int) -> float:
    """Return the share of a source's rows that are in a bucket."""
    if None in parts.values():
        return float(bucket in parts)
    return len(parts[bucket] or ()) / sum(len(part or ()) for part in parts.values())


def _named(name: str, bucket: int) -> str:
    """Return the name that seeds the order of a source or task in a bucket: in the first, its own."""
    return f"{name} in bucket {bucket}" if bucket else name


def rank_share(
    costs: Sequence[float], dp_rank: int, dp_size: int, turns: Sequence[int | None] = ()
) -> list[int]:
    """Return the indices of a rank's samples.

    They are contiguous if all cost the same, else equally many for each rank and balanced by cost. Samples of
    a source that is read in streams go to rank `turn % dp_size`, so that a rank reads the same streams in
    every step; the others balance them.
    """
    if any(turn is not None for turn in turns):
        owners = _owners(costs, dp_size, turns)
        return [index for index, owner in enumerate(owners) if owner == dp_rank]
    if len(set(costs)) > 1:
        return chunks_by_area(costs, dp_size)[dp_rank]
    return list(range(len(costs) * dp_rank // dp_size, len(costs) * (dp_rank + 1) // dp_size))


def _owners(costs: Sequence[float], dp_size: int, turns: Sequence[int | None]) -> list[int]:
    """Return the rank of every sample; none is without samples if there are enough."""
    owners = [-1 if turn is None else turn % dp_size for turn in turns]
    loads = [0.0] * dp_size
    for owner, cost in zip(owners, costs, strict=True):
        loads[owner] += cost * (owner >= 0)
    # Greedy: the costliest sample to the rank with the least work, ties by index, the same on every rank.
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        if owners[index] < 0:
            owners[index] = loads.index(min(loads))
            loads[owners[index]] += costs[index]
    counts = Counter(owners)
    for rank in range(min(dp_size, len(costs))):  # turns of several sources may fall on the same ranks
        if not counts[rank]:
            giver = counts.most_common(1)[0][0]
            owners[len(owners) - 1 - owners[::-1].index(giver)] = rank
            counts = Counter(owners)
    return owners
