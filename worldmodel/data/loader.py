"""Streams of training batches: the same in every run, on any number of processes, from any step on.

The order is a function of (seed, step) (see order.py), so the state of a stream is that step, and how many
clips could not be used before it. Episodes are read beside the training by processes that can be lost without
a hang (see worker.py): decoding in threads would slow the training's own Python, and the procedural world is
Python itself (benchmarks/loading.py).
This is the only file that imports torchdata; its nodes carry the pipeline

    IterableWrapper ─► ParallelMapper (asks the workers, in order) ─► Steps ─► Prefetcher
"""

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchdata.nodes import BaseNode, IterableWrapper, Mapper, ParallelMapper, Prefetcher

from worldmodel.config import DataConfig, StageConfig, WorldModelConfig
from worldmodel.data.sampler import Plan, Sample, share
from worldmodel.data.sources import Source, open_sources
from worldmodel.data.worker import Answer, Bad, Failure, Request, Worker, answer, patient
from worldmodel.errors import ConfigError
from worldmodel.types import Episode

MAX_ATTEMPTS = 20
"""Bad clips in a row, in place of one sample, before the run fails."""
GRACE = 200
"""Clips before the share of bad ones is taken at its word."""
MANNERS_S = 5.0
"""A source that itself notices that nothing comes can say more, and is given the time."""

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


@dataclass(frozen=True)
class Asked:
    """A sample on its way through the pipeline."""

    step: int
    last: bool
    """Whether it is the last of this rank's samples of its step."""
    sample: Sample | None = None
    """None where a rank has no sample in a step."""
    request: Request | None = None
    result: Answer | None = None
    bad: tuple[str, ...] = ()
    """Why the clips that it should have been could not be read."""


class Steps(BaseNode[list[Asked]]):
    """Collects the samples of a step. Its state says nothing: a stream starts again at its step."""

    def __init__(self, source: BaseNode[Asked]) -> None:
        super().__init__()
        self.source = source

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.source.reset()

    def next(self) -> list[Asked]:
        asked = [next(self.source)]
        while not asked[-1].last and not isinstance(asked[-1].result, Failure):
            asked.append(next(self.source))
        return asked

    def get_state(self) -> dict[str, Any]:
        return {}


class Stream:
    """Iterates over steps: each is a list of batches, this rank's part of the step.

    A rank's episodes of a step may have several shapes (clips that end early have fewer rounds), so the
    number of batches differs between ranks and can be 0. A stream is a context manager; `close` ends its
    workers.

    Args:
        first_step: where to start.
        dp_rank: which part of every step is this rank's, of `dp_size`.
        bad: how many clips could not be used before that step, by source.

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
    ) -> None:
        self.sources, self.config, self.stage, self.seed = sources, config, stage, seed
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.plan = Plan(sources, stage_weights(config, stage), stage, seed, config.window)
        self.plan.steps_before(first_step)  # counted now: far into a run it takes seconds
        self.step = first_step
        self.asking = ""
        """The source that was last asked for a clip."""
        self.bad = Counter(bad or {})
        """Clips of the stage that could not be used so far, by source: of this rank and what `hear` told."""
        self.left_out: list[tuple[str, str]] = []
        """Source of each clip that this rank could not use in the newest step, and why."""
        self.named: set[str] = set()
        self.stall_s = 0.0
        """Seconds that the caller has waited for batches."""
        self.workers = [Worker(config.timeout_s) for _ in range(config.num_workers)]
        self._node: BaseNode[list[Asked]] | None = self._pipeline()

    def _pipeline(self) -> BaseNode[list[Asked]]:
        config = self.config
        samples = patient(self._samples(self.step), config.timeout_s + MANNERS_S, self._late)
        requests: BaseNode[Asked] = IterableWrapper(samples)
        if not self.workers:
            return Steps(Mapper(requests, lambda asked: self._answered(asked, answer)))
        idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.workers * 2:  # one episode is made, and the next already asked for
            idle.put(worker)

        def ask(asked: Asked) -> Asked:
            worker = idle.get()
            try:
                return self._answered(asked, worker.ask)
            finally:
                idle.put(worker)

        asking = ParallelMapper(requests, ask, num_workers=idle.qsize(), method="thread", in_order=True)
        return Prefetcher(Steps(asking), prefetch_factor=config.prefetch)

    def _samples(self, first_step: int) -> Iterator[Asked]:
        """Yield this rank's samples from a step on."""
        try:
            for step in range(first_step, self.stage.steps):
                samples, rounds = self.plan.samples(step), self.stage.rounds
                costs = [self._asked(sample).cost(sample.episode, rounds) for sample in samples]
                mine = [samples[place] for place in share(costs, self.dp_rank, self.dp_size)]
                if not mine:
                    yield Asked(step, last=True)
                for sample in mine:
                    yield Asked(step, sample is mine[-1], sample, self._request(sample, sample.episode, step))
        except Exception as error:  # here it would be lost in a thread
            yield Asked(self.stage.steps, last=True, result=Failure(error))

    def _request(self, sample: Sample, episode: int, step: int) -> Request:
        recipe = self._asked(sample).at(episode)
        return Request(recipe, self.plan.task(step), self.seed, episode, self.stage.rounds)

    def _asked(self, sample: Sample) -> Source:
        """Return the source of a sample, and remember that it was asked."""
        self.asking = sample.source
        return self.sources[sample.source]

    def _late(self) -> Asked:
        """End the stream because a source does not answer."""
        error = ConfigError(
            f"data.sources.{self.asking} has not said for {self.config.timeout_s:g} s where a clip is; "
            "check its disk or connection, or raise data.timeout_s."
        )
        return Asked(self.stage.steps, last=True, result=Failure(error))

    def _answered(self, asked: Asked, ask: Callable[[Request], Answer]) -> Asked:
        """Have the episode of a sample made, or another in place of a bad one."""
        sample, request = asked.sample, asked.request
        if sample is None or request is None:
            return asked
        bad: list[str] = []
        while isinstance(result := ask(request), Bad):
            bad.append(result.reason)
            order = self.plan.orders.get(sample.source)
            if order is None or len(bad) == MAX_ATTEMPTS:
                result = Failure(
                    ConfigError(
                        f"{len(bad)} clips in a row of data.sources.{sample.source} cannot be used; "
                        f"the last: {bad[-1]}"
                    )
                )
                break
            try:
                request = self._request(sample, order.replacement(sample.episode, len(bad)), asked.step)
            except Exception as error:  # as in _samples
                result = Failure(error)
                break
        return Asked(asked.step, asked.last, sample, result=result, bad=tuple(bad))

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        if self._node is None or self.step >= self.stage.steps:
            self.close()
            raise StopIteration
        began = time.perf_counter()
        try:
            step = next(self._node)
            self.stall_s += time.perf_counter() - began
            self.step += 1
            self._check(step)
        except BaseException:
            self.close()
            raise
        return self._batches(step)

    def _check(self, step: list[Asked]) -> None:
        """Count and name this rank's bad clips of a step; raise what must end the run."""
        self.left_out = [(each.sample.source, why) for each in step if each.sample for why in each.bad]
        for source, reason in self.left_out:
            if reason not in self.named:
                log.warning("A clip of %s is left out: %s", source, reason)
            self.named.add(reason)
        self.bad.update(source for source, _ in self.left_out)
        self._judge()
        for asked in step:
            if isinstance(asked.result, Failure):
                raise asked.result.error

    def hear(self, bad: Mapping[str, int]) -> None:
        """Count the clips that all ranks together could not use in the newest step, instead of this rank's.

        Raises:
            ConfigError: they are too many, over all ranks and since the stage began.
        """
        self.bad = self.bad - Counter(source for source, _ in self.left_out) + Counter(bad)
        self._judge()

    def _judge(self) -> None:
        """Refuse more bad clips than the run may have."""
        read = self.step * self.stage.batch_size
        if self.bad.total() > self.config.max_bad_fraction * max(read, GRACE):
            source, count = self.bad.most_common(1)[0]
            raise ConfigError(
                f"{self.bad.total()} of {read} clips cannot be used, {count} of them of "
                f"data.sources.{source} (the log names each); mend them or raise data.max_bad_fraction."
            )

    def _batches(self, step: list[Asked]) -> list[Batch]:
        """Put episodes of one shape together, at most `microbatch_size` of them.

        Episodes that ask for text may differ in length: texts are packed side by side.
        """
        by_shape: dict[tuple, list[tuple[int, Episode]]] = {}
        for asked in step:
            if asked.sample is not None and isinstance(episode := asked.result, Episode):
                shape: tuple = (len(episode.actions), *(clip.shape for clip in episode.observations))
                if episode.prompt is not None:
                    shape = (len(episode.observations),)
                by_shape.setdefault(shape, []).append((asked.sample.index, episode))
        number = step[0].step
        task, self_rollout = self.plan.task(number), self.plan.self_rollout(number)
        batches = []
        for rows in by_shape.values():
            size = self.stage.microbatch_size or len(rows)
            for first in range(0, len(rows), size):
                indices, episodes = zip(*rows[first : first + size], strict=True)
                batches.append(Batch(number, task, indices, list(episodes), self_rollout))
        return batches

    def state(self) -> dict[str, Any]:
        """Return where the stream stands: arguments of one that goes on from here."""
        return {"first_step": self.step, "bad": dict(self.bad)}

    def close(self) -> None:
        """End the workers; the stream is over."""
        for worker in self.workers:
            worker.close()
        for source in self.sources.values():
            source.close()
        self._node = None  # torchdata's threads end with their nodes

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def stage_weights(config: DataConfig, stage: StageConfig) -> dict[str, float]:
    """Return the weight of every source in a stage.

    Raises:
        ConfigError: the stage names a source that the data does not have.
    """
    if unknown := sorted(set(stage.sources) - set(config.sources)):
        raise ConfigError(
            f"A stage draws from {unknown[0]!r}, which is not in data.sources ({', '.join(config.sources)})."
        )
    return {
        name: stage.sources.get(name, 0.0) if stage.sources else source.weight
        for name, source in config.sources.items()
    }


def batches(
    config: DataConfig,
    model: WorldModelConfig,
    stage: StageConfig,
    seed: int,
    first_step: int = 0,
    dp_rank: int = 0,
    dp_size: int = 1,
    bad: Mapping[str, int] | None = None,
) -> Stream:
    """Stream one stage's batches from `first_step` on, for one of `dp_size` ranks that share every step.

    Step `s` is made of samples `s * batch_size` up to `(s + 1) * batch_size`, whoever takes them.

    Raises:
        ConfigError: a setting, a source or a task is wrong.
    """
    return Stream(open_sources(config, model), config, stage, seed, first_step, dp_rank, dp_size, bad)
