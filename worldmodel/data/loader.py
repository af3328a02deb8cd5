"""Loader of training batches: the same in every run, on any number of processes, from any step on.

The samples of a step are a function of (seed, step) (see sampler.py), so the state of a loader is its step
and the number of bad clips before it. Episodes are made by worker processes that can be lost without a hang
(see worker.py): decoding in threads would slow down the trainer's own Python, and some sources are Python
themselves (docs/how-to/data.md). No other module imports torchdata, whose nodes form the pipeline

    IterableWrapper ─► ParallelMapper (calls the workers, keeps the order) ─► StepCollator
                    ─► Mapper (makes batches and stages their frames) ─► Prefetcher
"""

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchdata.nodes import BaseNode, IterableWrapper, Mapper, ParallelMapper, Prefetcher

from worldmodel.config import DataConfig, StageConfig, WorldModelConfig
from worldmodel.data.buckets import bucket_of, check_filled, open_in_buckets
from worldmodel.data.sampler import Sample, StepSampler, offering_sources, rank_share
from worldmodel.data.sources import Source, StreamedSource, stage_weights
from worldmodel.data.staging import StagedFrames, StageFrames
from worldmodel.data.worker import BadClip, Failure, Request, Result, Worker, make_episode, with_timeout
from worldmodel.episodes import Episode
from worldmodel.errors import ConfigError, cause

MAX_ATTEMPTS = 20
"""Bad clips in a row, in place of one sample, before the run fails."""
MIN_CLIPS = 200
"""Number of clips against which the share of bad ones is computed at first, when few were read."""
SOURCE_GRACE_S = 5.0
"""Extra time for a source to report its own timeout."""

SumCounts = Callable[[Sequence[int]], list[int]]
"""Sums counts, element by element, over all data-parallel ranks."""

Bookmarks = dict[str, dict[str, Any]]
"""Positions in the streams of sources, by source and stream."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """Episodes of one task and one shape that go through the model together."""

    step: int
    task: str
    indices: tuple[int, ...]
    """Sample indices of the episodes within the stage, which seed their random numbers."""
    episodes: list[Episode]
    self_rollout: bool = False
    """Whether the step continues from the model's own predictions; the same for all batches of a step."""
    image_size: tuple[int, int] | None = None
    """Height and width of the frames of all batches of a step; None: the model's own."""
    frames: StagedFrames | None = None
    """The observations, ready to be copied to the device; None: they are read from the episodes."""


@dataclass(frozen=True)
class PendingSample:
    """A sample on its way through the pipeline."""

    step: int
    last: bool
    """Whether it is the last of this rank's samples of its step."""
    sample: Sample | None = None
    """None where a rank has no sample in a step."""
    request: Request | None = None
    result: Result | None = None
    bad: tuple[str, ...] = ()
    """Reasons why the clips that it replaces could not be read."""


Step = tuple[list[PendingSample], list[Batch]]
"""This rank's samples of a step, and the batches that are made of them."""


class StepCollator(BaseNode[list[PendingSample]]):
    """Collects the samples of a step. It has no state: a loader restarts at its step."""

    def __init__(self, source: BaseNode[PendingSample]) -> None:
        super().__init__()
        self.source = source

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.source.reset()

    def next(self) -> list[PendingSample]:
        samples = [next(self.source)]
        # A failure ends the step at once: the samples after it may never come.
        while not samples[-1].last and not isinstance(samples[-1].result, Failure):
            samples.append(next(self.source))
        return samples

    def get_state(self) -> dict[str, Any]:
        return {}


class BatchLoader:
    """Iterates over the steps of a stage: each is a list of batches, this rank's part of the step.

    A rank's episodes of a step may have several shapes (clips that end early have fewer rounds), so the
    number of batches differs between ranks and can be 0. A loader is a context manager; `close` ends its
    workers.

    Args:
        sources: sources by name, as in `config.sources`.
        config: workers, prefetching, windows and limits.
        stage: steps, batch size and tasks.
        seed: seed of the order of samples.
        first_step: the step to start at.
        dp_rank: index of this rank's part of every step, of `dp_size`.
        bad: number of bad clips before `first_step`, by source.
        sum_counts: sums bad clips over ranks, so that all ranks count the same; every rank calls it once a
            step. None: this rank's clips are all.
        bookmarks: of all ranks' streams at `first_step`, or None.
        stage_frames: stacks observations for the copy to a device; None leaves that to the step.

    Raises:
        ConfigError: more clips are bad than `data.max_bad_fraction` allows, or a worker was killed or hangs.
    """

    def __init__(
        self,
        sources: dict[str, Source],
        config: DataConfig,
        stage: StageConfig,
        seed: int,
        first_step: int = 0,
        dp_rank: int = 0,
        dp_size: int = 1,
        bad: Mapping[str, int] | None = None,
        sum_counts: SumCounts | None = None,
        bookmarks: Bookmarks | None = None,
        stage_frames: StageFrames | None = None,
    ) -> None:
        self.sources, self.config, self.stage, self.seed = sources, config, stage, seed
        self.stage_frames = stage_frames
        self.dp_rank, self.dp_size, self.sum_counts = dp_rank, dp_size, sum_counts
        for name, source in sources.items():
            if bookmarks and isinstance(source, StreamedSource):
                source.resume(bookmarks.get(name, {}))
        weights = stage_weights(config, stage)
        self.sampler = StepSampler(
            sources,
            weights,
            stage,
            seed,
            config.window,
            config.length_buckets,
            config.buckets,
            bucket_of(config),
        )
        self.sampler.steps_before(first_step)  # cached now: it takes seconds far into a run
        self.step = first_step
        self.active_source = ""
        """The source that was called last."""
        self.bad = Counter(bad or {})
        """Number of bad clips of the stage so far, by source, over all ranks."""
        self.unreadable: list[tuple[str, str]] = []
        """Source of each clip that this rank could not read in the newest step, and the reason."""
        self.causes: Counter[str] = Counter()
        """Clips that this rank could not read, by cause."""
        self.stall_s = 0.0
        """Seconds that the caller waited for batches."""
        self.workers = [Worker(config.timeout_s) for _ in range(config.num_workers)]
        self._node: BaseNode[Step] | None = self._pipeline()

    def _pipeline(self) -> BaseNode[Step]:
        config = self.config
        samples = with_timeout(
            self._samples(self.step), config.timeout_s + SOURCE_GRACE_S, self._source_timeout
        )
        requests: BaseNode[PendingSample] = IterableWrapper(samples)
        if not self.workers:
            samples = Mapper(requests, lambda pending: self._make(pending, make_episode))
            return Mapper(StepCollator(samples), self._collated)
        idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.workers * 2:  # a worker makes one episode while its next request is waiting
            idle.put(worker)

        def make(pending: PendingSample) -> PendingSample:
            worker = idle.get()
            try:
                return self._make(pending, worker.make)
            finally:
                idle.put(worker)

        made = ParallelMapper(requests, make, num_workers=idle.qsize(), method="thread", in_order=True)
        return Prefetcher(Mapper(StepCollator(made), self._collated), prefetch_factor=config.prefetch)

    def _samples(self, first_step: int) -> Iterator[PendingSample]:
        """Yield this rank's samples from a step on."""
        try:
            for step in range(first_step, self.stage.steps):
                samples, rounds = self.sampler.samples(step), self.stage.rounds
                # Every rank computes the costs of all samples of the step, and takes its own share of them:
                # the division needs no communication.
                costs = [self._source(sample).cost(sample.episode, rounds) for sample in samples]
                turns = [sample.turn for sample in samples]
                own = [samples[index] for index in rank_share(costs, self.dp_rank, self.dp_size, turns)]
                # A rank without samples still takes part in the step, with no batches.
                if not own:
                    yield PendingSample(step, last=True)
                for sample in own:
                    request = self._request(sample, sample.episode, step)
                    yield PendingSample(step, sample is own[-1], sample, request)
        except Exception as error:  # would be lost in a thread
            yield PendingSample(self.stage.steps, last=True, result=Failure(error))

    def _request(self, sample: Sample, episode: int, step: int) -> Request:
        recipe = self._source(sample).at(episode)
        task, rounds = self.sampler.task(step), self.stage.rounds
        return Request(recipe, task, self.seed, episode, rounds)

    def _source(self, sample: Sample) -> Source:
        """Return the source of a sample, and record it for the message of a timeout."""
        self.active_source = sample.source
        return self.sources[sample.source]

    def _source_timeout(self) -> PendingSample:
        """Return the end of a pipeline whose source does not respond."""
        error = ConfigError(
            f"data.sources.{self.active_source} did not respond within {self.config.timeout_s:g} s; check "
            "its disk or connection, or raise data.timeout_s."
        )
        return PendingSample(self.stage.steps, last=True, result=Failure(error))

    def _make(self, pending: PendingSample, make: Callable[[Request], Result]) -> PendingSample:
        """Make the episode of a sample, or another one in place of a bad one."""
        sample, request = pending.sample, pending.request
        if sample is None or request is None:
            return pending
        bad: list[str] = []
        # A replacement is drawn from (episode, attempt), so a resumed run replaces the same clips by the same
        # ones.
        while isinstance(result := make(request), BadClip):
            bad.append(result.reason)
            sampler = self.sampler.samplers.get((sample.source, sample.bucket))
            if sampler is None or len(bad) == MAX_ATTEMPTS:
                result = Failure(
                    ConfigError(
                        f"{len(bad)} clips in a row of data.sources.{sample.source} cannot be used; "
                        f"the last: {bad[-1]}"
                    )
                )
                break
            try:
                replacement = sampler.replacement(sample.episode, len(bad))
                request = self._request(sample, replacement, pending.step)
            except Exception as error:  # as in _samples
                result = Failure(error)
                break
        return PendingSample(pending.step, pending.last, sample, result=result, bad=tuple(bad))

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        if self._node is None or self.step >= self.stage.steps:
            self.close()
            raise StopIteration
        began = time.perf_counter()
        try:
            samples, batches = next(self._node)
            self.stall_s += time.perf_counter() - began
            self.step += 1
            self._add_bad(samples)
            self._check_bad_fraction()
            for pending in samples:
                if isinstance(pending.result, Failure):
                    raise pending.result.error
        except BaseException:
            self.close()
            raise
        return batches

    def _add_bad(self, samples: list[PendingSample]) -> None:
        """Log this rank's bad clips of a step, and count the bad clips of all ranks."""
        self.unreadable = [
            (each.sample.source, reason) for each in samples if each.sample for reason in each.bad
        ]
        for source, reason in self.unreadable:
            self.causes[kind := cause(f"{source}: {reason}")] += 1
            count = self.causes[kind]
            if str(count).rstrip("0") == "1":  # 1, 10, 100, ...
                more = f" (the {count}th for this reason)" if count > 1 else ""
                log.warning("Skipped a clip of %s: %s%s", source, reason, more)
        # Counted over all ranks, so that every rank fails in the same step, and none waits for one that has
        # gone.
        counts = Counter(source for source, _ in self.unreadable)
        if self.sum_counts is not None:
            names = sorted(self.sources)
            counts = Counter(dict(zip(names, self.sum_counts([counts[name] for name in names]), strict=True)))
        self.bad += counts  # drops sources without bad clips

    def _check_bad_fraction(self) -> None:
        read = self.step * self.stage.batch_size
        if self.bad.total() > self.config.max_bad_fraction * max(read, MIN_CLIPS):
            source, count = self.bad.most_common(1)[0]
            raise ConfigError(
                f"{self.bad.total()} of {read + self.bad.total()} clips cannot be used, {count} of them of "
                f"data.sources.{source} (the log says why); run `worldmodel data check`, and repair them or "
                "raise data.max_bad_fraction."
            )

    def _collated(self, samples: list[PendingSample]) -> Step:
        batches = self._batches(samples)
        if self.stage_frames is not None:
            batches = [replace(batch, frames=self.stage_frames(batch.episodes)) for batch in batches]
        return samples, batches

    def _batches(self, samples: list[PendingSample]) -> list[Batch]:
        """Group episodes of one shape, at most `microbatch_size` of them; the groups with most rounds first.

        Processes wait for each other in every layer, and one with fewer groups repeats its last. In this
        order their groups are about equally long at every position, and the repeated ones are short.

        Episodes that ask for text may differ in length: texts are packed side by side.
        """
        by_shape: dict[tuple, list[tuple[int, Episode]]] = {}
        for pending in samples:
            if pending.sample is not None and isinstance(episode := pending.result, Episode):
                encoded = episode.encoded.shapes if episode.encoded else ()
                shape: tuple = (
                    len(episode.actions),
                    *(clip.shape for clip in episode.observations),
                    *encoded,
                )
                if episode.prompt is not None:
                    # Texts are packed, so their lengths need not agree; the numbers of observations and of
                    # earlier rounds must.
                    shape = (len(episode.observations), len(episode.actions), bool(encoded))
                by_shape.setdefault(shape, []).append((pending.sample.index, episode))
        step = samples[0].step
        task, self_rollout = self.sampler.task(step), self.sampler.self_rollout(step)
        batches = []
        for rows in by_shape.values():
            size = self.stage.microbatch_size or len(rows)
            for first in range(0, len(rows), size):
                indices, episodes = zip(*rows[first : first + size], strict=True)
                batches.append(
                    Batch(step, task, indices, list(episodes), self_rollout, self.sampler.size(step))
                )
        return sorted(batches, key=lambda batch: -sum(len(each.actions) for each in batch.episodes))

    def state(self) -> dict[str, Any]:
        """Return the arguments with which another loader continues from here.

        Bookmarks of this rank's streams save reading and change nothing.
        """
        return {"first_step": self.step, "bad": dict(self.bad), "bookmarks": self.bookmarks()}

    def bookmarks(self) -> Bookmarks:
        """Return a bookmark of every stream that this rank reads, by source and stream."""
        streamed = {name: each for name, each in self.sources.items() if isinstance(each, StreamedSource)}
        return {name: each.marks(self.sampler.window(name, self.step)) for name, each in streamed.items()}

    def close(self) -> None:
        """End the workers and close the sources."""
        for worker in self.workers:
            worker.close()
        for source in self.sources.values():
            source.close()
        self._node = None  # torchdata's threads end with their nodes

    def __enter__(self) -> "BatchLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_tasks(sources: Mapping[str, Source], config: DataConfig, stage: StageConfig) -> None:
    """Check that every task of a stage is offered by a source that the stage draws from.

    Raises:
        ConfigError: one is not; the message names it.
    """
    offering_sources(sources, stage_weights(config, stage), stage)


def trained_sources(config: DataConfig, stages: Iterable[StageConfig]) -> list[str]:
    """Return the names of the sources that some stage draws from.

    Raises:
        ConfigError: as `stage_weights`.
    """
    drawn = [stage_weights(config, stage) for stage in stages]
    return [name for name in config.sources if any(weights[name] for weights in drawn)]


def batches(
    config: DataConfig,
    model: WorldModelConfig,
    stage: StageConfig,
    seed: int,
    first_step: int = 0,
    dp_rank: int = 0,
    dp_size: int = 1,
    bad: Mapping[str, int] | None = None,
    sum_counts: SumCounts | None = None,
    bookmarks: Bookmarks | None = None,
    stage_frames: StageFrames | None = None,
) -> BatchLoader:
    """Load one stage's batches from `first_step` on, for one of `dp_size` ranks that share every step.

    Step `s` consists of samples `s * batch_size` up to `(s + 1) * batch_size`, whichever rank loads them. For
    the arguments see `BatchLoader`.

    Raises:
        ConfigError: a setting, a source or a task is wrong.
    """
    sources = open_in_buckets(config, model)
    check_filled(sources, config)
    return BatchLoader(
        sources, config, stage, seed, first_step, dp_rank, dp_size, bad, sum_counts, bookmarks, stage_frames
    )
