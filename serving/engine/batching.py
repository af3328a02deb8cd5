"""The one thread in which the model runs, and batches that form by themselves while it is busy."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


class Compute:
    """Runs work in one thread, in order of arrival: torch then has all cores (or the device) to itself."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")

    async def run(self, work: Callable[..., Result], *args: Any) -> Result:
        """Run `work(*args)` without gradients and return what it returns."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(_no_grad, work, *args))

    def close(self) -> None:
        """Finish what is running and take no more."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _no_grad(work: Callable[..., Result], *args: Any) -> Result:
    with torch.no_grad():
        return work(*args)


class Batcher(Generic[Item, Result]):
    """Collects items while the model is busy and runs all that wait as one batch.

    A caller that is cancelled before its batch begins costs nothing; an error reaches every caller of the
    batch.
    """

    def __init__(self, compute: Compute, run: Callable[[Sequence[Item]], Sequence[Result]]) -> None:
        self._compute, self._run = compute, run
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def __call__(self, item: Item) -> Result:
        """Return the item's own result."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._drain())
        return await future

    async def _drain(self) -> None:
        # Let everyone who is ready in this turn of the loop join the first batch.
        await asyncio.sleep(0)
        while self._waiting:
            batch = [pair for pair in self._waiting if not pair[1].done()]
            self._waiting.clear()
            if not batch:
                continue
            try:
                results = await self._compute.run(self._run, [item for item, _ in batch])
            except Exception as error:  # whatever went wrong belongs to those who wait for it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)
