"""The thread that runs the model, and dynamic batching of requests that arrive while it is busy."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


class Compute:
    """Runs functions in one thread in order of arrival, so that one call at a time uses the device."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")

    async def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run `function(*args)` without gradients and return its result."""
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, partial(_no_grad, function, *args)
        )

    def close(self) -> None:
        """Wait for the running call and cancel the queued ones."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _no_grad(function: Callable[..., Result], *args: Any) -> Result:
    with torch.no_grad():
        return function(*args)


class Batcher(Generic[Item, Result]):
    """Collects items while the model is busy and runs all waiting ones as one batch.

    Items whose caller is cancelled before the batch starts are dropped. An error is raised for every caller
    of the batch.
    """

    def __init__(self, compute: Compute, run: Callable[[Sequence[Item]], Sequence[Result]]) -> None:
        self._compute, self._run = compute, run
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
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
            batch = [pair for pair in self._waiting if not pair[1].done()]
            self._waiting.clear()
            if not batch:
                continue
            try:
                results = await self._compute.run(self._run, [item for item, _ in batch])
            except Exception as error:  # raised for every caller of the batch
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)
