"""The scheduler of all calls to the model: one thread, fair shares of its time, and batches.

A call belongs to a flow, that is to a key and a purpose (`serving.engine.shares`). The flow that has had the
least time goes first. Its call is joined by others that can share a batch: those of flows which have had
about as little, in turn, and more of them if that makes no flow wait noticeably longer.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from worldmodel.errors import WorldModelError
from worldmodel.serving.engine.shares import WEIGHTS, Asker, Flow, Purpose, current_asker

Item = TypeVar("Item")
Result = TypeVar("Result")

PREPARE, PREDICT, CONDITION, DENOISE = range(4)
"""Stages of a round. Earlier ones go first, so that worlds which are behind join the batches of others."""
HEAD_START_S = 0.25
"""Time by which a stage may overtake the next one; beyond it, calls of a flow run in order of arrival."""
CREDIT_S = 0.0625
"""Virtual time that a flow without calls saves at most; it goes first until it has used that."""
SLACK_S = 0.03
"""Virtual time by which flows may differ and count as even; without it, one key that pauses for a moment
would keep all others from sharing batches."""
BATCH_S, BATCH_FACTOR = 0.05, 1.25
"""Jobs that are not owed make a batch at most this long if all are of one flow, or longer by this factor."""
MEMORY = 0.3
"""Weight of the newest duration in the mean of a kind of batch."""
MAX_KINDS = 256
"""Kinds of batches whose duration is remembered: clients choose numbers that make new ones."""

CLOSE_TIMEOUT_S = 5.0
CLOSED = "the thread that runs the model is closed"


@dataclass(frozen=True)
class Again:
    """Result of a job that goes on: it stays in the queue, and its `Batcher` reports `progress`."""

    progress: Any


@dataclass(eq=False)
class _Job:
    """One call, and the future that its caller awaits."""

    batcher: "Batcher[Any, Any]"
    item: Any
    asker: Asker
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    stage: int
    order: int = 0
    due: float = 0.0
    group: Hashable = None


class Compute:
    """Runs calls in one thread, so that one at a time uses the device, and divides its time fairly.

    Args:
        head_start_s: Time by which a stage may overtake the next one.
        weight_of: Weight of a key; one of weight 2 gets twice the time of one of weight 1.
        used: Called in the thread with the key, the purpose and the seconds of what has run.
    """

    def __init__(
        self,
        head_start_s: float = HEAD_START_S,
        weight_of: Callable[[str], float] = lambda key: 1.0,
        used: Callable[[str, Purpose, float], None] = lambda key, purpose, seconds: None,
    ) -> None:
        self.weight_of, self.used = weight_of, used
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._head_start_s, self._order = head_start_s, itertools.count()
        self._arrived = threading.Condition()
        self._flows: dict[tuple[str, Purpose], Flow] = {}  # guarded by the condition, as is all below
        self._virtual_s = 0.0
        """Virtual time of the flow that was served last."""
        self._working = self.closed = False
        self._running: tuple[float, list[_Job]] | None = None
        self._calls: Batcher[Callable[[], Any], Any] = Batcher(self, lambda calls: [calls[0]()], PREPARE, 1)
        self.num_failed = 0
        """Calls that failed otherwise than by an error of their input."""

    @property
    def running_s(self) -> float:
        """Seconds for which the call that runs has run; 0 between calls."""
        running = self._running  # the thread may end it at any moment
        return 0.0 if running is None else time.monotonic() - running[0]

    async def run(self, function: Callable[..., Result], *args: Any, stage: int = PREPARE) -> Result:
        """Run `function(*args)` without gradients and return its result.

        Raises:
            RuntimeError: the thread is closed.
        """
        return await self.submit(self._calls, partial(function, *args), stage)

    def submit(self, batcher: "Batcher[Item, Result]", item: Item, stage: int) -> asyncio.Future[Result]:
        """Queue a job of the current task, and return the future of its result.

        Raises:
            RuntimeError: the thread is closed.
        """
        loop = asyncio.get_running_loop()
        job = _Job(batcher, item, current_asker(), loop, loop.create_future(), stage)
        with self._arrived:
            if self.closed:
                raise RuntimeError(CLOSED)
            self._put(job)
            self._arrived.notify()
            if not self._working:
                self._working = True
                # Callers that are ready in this iteration of the event loop join the first batch.
                loop.call_soon(self._begin)
        return job.future

    def _begin(self) -> None:
        with suppress(RuntimeError):  # it was closed meanwhile
            self._pool.submit(self._work)

    def close(self) -> None:
        """Wait for the running call, for `CLOSE_TIMEOUT_S` at most; queued and later ones fail."""
        self._fail(RuntimeError(CLOSED))
        until = time.monotonic() + CLOSE_TIMEOUT_S
        while self._running is not None and time.monotonic() < until:
            time.sleep(0.005)

    def abandon(self, error: Exception) -> None:
        """Close without waiting: all callers get `error`, also the one of a call that never returns."""
        running = self._running
        self._fail(error)
        if running is not None:
            _deliver([(job, error) for job in running[1]])

    def _fail(self, error: Exception) -> None:
        """Let all jobs that wait, and all later ones, fail."""
        with self._arrived:
            self.closed = True
            jobs = [job for flow in self._flows.values() for job in flow.jobs]
            self._flows.clear()
            self._arrived.notify()
        _deliver([(job, error) for job in jobs])
        self._pool.shutdown(wait=False)

    # ---- the queue; the caller holds the condition ------------------------------------------------------

    def _put(self, job: _Job) -> None:
        now, asker = time.monotonic(), job.asker
        job.order, job.group = next(self._order), job.batcher.group(job.item)
        # A due time instead of a fixed priority: a call that has waited long enough is due before all new
        # ones, so a stream of new worlds (PREPARE) cannot keep the others from denoising.
        job.due = now + job.stage * self._head_start_s
        flow = self._flows.get((asker.key, asker.purpose))
        if flow is None:
            self._flows = {name: each for name, each in self._flows.items() if each.recent(now)}
            flow = self._flows[asker.key, asker.purpose] = Flow(asker.key, asker.purpose)
        if not flow.jobs:
            flow.weight = self._weight(flow, now)
            flow.virtual_s = max(flow.virtual_s, self._virtual_s - CREDIT_S)
        flow.active_at = now
        flow.askers.add(asker)
        flow.jobs.append(job)

    def _weight(self, flow: Flow, now: float) -> float:
        """Return the weight of a flow; all of one key together have that of its largest."""
        own = WEIGHTS[flow.purpose]
        others = [
            WEIGHTS[each.purpose]
            for each in self._flows.values()
            if each.key == flow.key and each is not flow and each.recent(now)
        ]
        return self.weight_of(flow.key) * own * max(own, *others, 0.0) / (own + sum(others))

    def _next(self) -> list[_Job]:
        """Take the jobs of the next batch, and wait for one that is owed its turn and follows at once."""
        while True:
            now = time.monotonic()
            for flow in self._flows.values():
                flow.jobs = [job for job in flow.jobs if not job.future.done()]  # their callers are gone
            waiting = [flow for flow in self._flows.values() if flow.jobs]
            if not waiting:
                return []
            first = min(waiting, key=lambda flow: (flow.virtual_s, flow.jobs[0].order))
            wait_s = max(
                (
                    flow.follows_within_s(now)
                    for flow in self._flows.values()
                    if not flow.jobs and flow.virtual_s < first.virtual_s
                ),
                default=0.0,
            )
            if wait_s <= 0:
                break
            self._arrived.wait(wait_s)
        self._virtual_s = first.virtual_s
        batch = self._fill(first, [flow for flow in self._flows.values() if flow.recent(now)])
        for flow in waiting:
            flow.jobs = [job for job in flow.jobs if job not in batch]
        return batch

    def _fill(self, first: Flow, flows: Sequence[Flow]) -> list[_Job]:
        """Return jobs of the flow whose turn it is, and those of others that join it."""
        head = min(first.jobs, key=_urgency)
        batcher = head.batcher
        fitting = {
            flow: sorted(
                (job for job in flow.jobs if job.batcher is batcher and job.group == head.group), key=_urgency
            )
            for flow in flows
        }
        fitting[first].remove(head)
        batch, row_s = [head], batcher.seconds(head.group, 1)
        behind = {flow: flow.virtual_s for flow in flows}
        behind[first] += row_s / first.weight
        while len(batch) < batcher.max_batch and any(fitting.values()):
            flow = min((flow for flow in flows if fitting[flow]), key=behind.__getitem__)
            owed = behind[flow] <= min(behind.values()) + SLACK_S
            if not owed:
                limit_s = max(BATCH_FACTOR * row_s, BATCH_S if flow is first else 0.0)
                if batcher.seconds(head.group, len(batch) + 1) > limit_s:
                    break
            batch.append(fitting[flow].pop(0))
            behind[flow] += row_s / flow.weight
        return batch

    # ---- the thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Run calls until there are none."""
        while True:
            with self._arrived:
                batch = [] if self.closed else self._next()
                if not batch:
                    self._working = False
                    return
                self._running = time.monotonic(), batch
            self._run(batch)

    def _run(self, batch: list[_Job]) -> None:
        """Run a batch in the thread, and tell its callers."""
        batcher, began = batch[0].batcher, time.monotonic()
        results: Sequence[Any]
        try:
            with torch.no_grad():
                results = batcher.function([job.item for job in batch])
        except BaseException as error:  # raised for the callers; the thread must live on
            self.num_failed += not isinstance(error, WorldModelError)
            results = [error] * len(batch)
        took_s = time.monotonic() - began
        batcher.record(batch[0].group, len(batch), took_s)
        outcomes = list(zip(batch, results, strict=True))
        with self._arrived:
            self._running = None
            self._charge(batch, took_s / len(batch))
            for number, (job, result) in enumerate(outcomes):
                if isinstance(result, Again) and not job.future.done():
                    if self.closed:
                        outcomes[number] = job, RuntimeError(CLOSED)
                    else:
                        self._put(job)
        _deliver(outcomes)

    def _charge(self, batch: Sequence[_Job], seconds: float) -> None:
        now = time.monotonic()
        for job in batch:
            asker = job.asker
            asker.served_at = now
            self.used(asker.key, asker.purpose, seconds)
            if (flow := self._flows.get((asker.key, asker.purpose))) is not None:
                flow.virtual_s += seconds / flow.weight
                flow.active_at = now


def _urgency(job: _Job) -> tuple[float, int]:
    return job.due, job.order


def _deliver(outcomes: Sequence[tuple[_Job, Any]]) -> None:
    """Pass outcomes to the event loops of their callers, each of which is woken once."""
    for loop in dict.fromkeys(job.loop for job, _ in outcomes):
        with suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(_settle, [each for each in outcomes if each[0].loop is loop])


def _settle(outcomes: Sequence[tuple[_Job, Any]]) -> None:
    for job, result in outcomes:
        if job.future.done():  # its caller was cancelled while it ran, or it was abandoned
            continue
        if isinstance(result, Again):
            job.batcher.report(job.item, result.progress)
        elif isinstance(result, BaseException):
            job.future.set_exception(result)
        else:
            job.future.set_result(result)


@dataclass(eq=False)
class Batcher(Generic[Item, Result]):
    """One kind of call, of which those that wait when the thread gets to them run as one batch.

    Items whose caller is cancelled before that are dropped. An error is raised for every caller of the batch;
    one that is returned as a result, for the caller of its item.

    Args:
        compute: Where it runs.
        function: Called with the items of a batch; returns a result, an error or `Again` for each.
        stage: Stage of a round.
        max_batch: Largest batch.
        group: Items for which this is equal can share a batch.
        report: Called in the event loop with an item that goes on, and its progress.
    """

    compute: Compute
    function: Callable[[Sequence[Item]], Sequence[Any]]
    stage: int
    max_batch: int = 64
    group: Callable[[Item], Hashable] = lambda item: None
    report: Callable[[Item, Any], None] = lambda item, progress: None
    _seconds: dict[tuple[Hashable, int], float] = field(default_factory=dict)
    """Mean duration of a batch by its group and size."""

    async def __call__(self, item: Item) -> Result:
        """Return the result for one item."""
        return await self.compute.submit(self, item, self.stage)

    def record(self, group: Hashable, size: int, seconds: float) -> None:
        """Note the duration of a batch."""
        mean = self._seconds.pop((group, size), seconds)
        if len(self._seconds) >= MAX_KINDS:
            self._seconds.pop(next(iter(self._seconds)))  # the one that was not seen for longest
        self._seconds[group, size] = mean + MEMORY * (seconds - mean)

    def seconds(self, group: Hashable, size: int) -> float:
        """Return the expected duration of a batch, in proportion to the nearest size that is known."""
        sizes = [known for other, known in self._seconds if other == group]
        if not sizes:
            return 0.0
        nearest = min(sizes, key=lambda known: abs(known - size))
        return self._seconds[group, nearest] * size / nearest
