"""The thread that runs the model, and dynamic batching of requests that arrive while it is busy."""

import asyncio
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

PREPARE, PREDICT, CONDITION, DENOISE = range(4)
"""Stages of a round. Earlier ones go first, so that worlds which are behind join the batches of others."""
HEAD_START_S = 0.25
"""Time by which a stage may overtake the next one; beyond it, calls run in order of arrival."""

CLOSED = "the thread that runs the model is closed"


class Compute:
    """Runs calls in one thread, so that one at a time uses the device: earlier stages first, then by age."""

    def __init__(self, head_start_s: float = HEAD_START_S) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._head_start_s, self._order, self._lock = head_start_s, itertools.count(), threading.Lock()
        self._calls: list[tuple[float, int, Future[Any], Callable[[], Any]]] = []
        self._closed = False

    async def run(self, function: Callable[..., Result], *args: Any, stage: int = PREPARE) -> Result:
        """Run `function(*args)` without gradients and return its result.

        Raises:
            RuntimeError: the thread is closed.
        """
        if self._closed:
            raise RuntimeError(CLOSED)
        future: Future[Result] = Future()
        due = time.monotonic() + stage * self._head_start_s
        with self._lock:
            heapq.heappush(self._calls, (due, next(self._order), future, partial(function, *args)))
        self._pool.submit(self._run_next)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Wait for the running call; queued and later ones fail."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        while self._calls:
            _, _, future, _ = self._calls.pop()
            if future.set_running_or_notify_cancel():
                future.set_exception(RuntimeError(CLOSED))

    def _run_next(self) -> None:
        with self._lock:
            _, _, future, call = heapq.heappop(self._calls)
        if not future.set_running_or_notify_cancel():
            return
        try:
            with torch.no_grad():
                result = call()
        except BaseException as error:  # raised for the caller
            future.set_exception(error)
        else:
            future.set_result(result)


class Batcher(Generic[Item, Result]):
    """Collects items and runs those that wait when the thread gets to them as one batch.

    Items whose caller is cancelled before that are dropped. An error is raised for every caller of the batch;
    one that is returned as a result, for the caller of its item.
    """

    def __init__(
        self,
        compute: Compute,
        run: Callable[[Sequence[Item]], Sequence[Result | Exception]],
        stage: int,
        max_batch: int = 64,
    ) -> None:
        self._compute, self._function, self._stage, self._max_batch = compute, run, stage, max_batch
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()  # shared with the thread
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self, item: Item) -> Result:
        """Return the result for one item."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._drain())
        return await future

    async def _drain(self) -> None:
        # Callers that are ready in this iteration of the event loop join the first batch.
        await asyncio.sleep(0)
        while self._waiting:
            futures: list[asyncio.Future[Result]] = []
            results: Sequence[Result | Exception]
            try:
                results = await self._compute.run(self._run, futures, stage=self._stage)
            except Exception as error:  # raised for every caller of the batch
                if not futures:  # the thread is closed
                    futures = [future for _, future in self._waiting]
                    self._waiting.clear()
                results = [error] * len(futures)
            for future, result in zip(futures, results, strict=True):
                if future.done():
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _run(self, futures: list[asyncio.Future[Result]]) -> Sequence[Result | Exception]:
        """Run the waiting items, in the thread; their futures are added to `futures`."""
        items: list[Item] = []
        while self._waiting and len(items) < self._max_batch:
            item, future = self._waiting.popleft()
            if not future.done():
                items.append(item)
                futures.append(future)
        return self._function(items) if items else []
