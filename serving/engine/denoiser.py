"""The denoising loop of a server: chunks of all worlds join and leave between steps."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from worldmodel.diffusion.sampler import Chunk, Denoiser
from worldmodel.models.adapters import Adapters
from worldmodel.models.conditioning import Condition
from worldmodel.models.generator.base import VideoGenerator
from worldmodel.serving.engine.batching import DENOISE, Compute
from worldmodel.serving.engine.generator_processes import GeneratorProcesses

Progress = Callable[[int, int], None]
"""Called with (finished steps, all steps) after every step."""


@dataclass(eq=False)
class Job:
    """A chunk in the loop, and the future that its caller awaits."""

    chunk: Chunk[Condition]
    done: asyncio.Future[None]
    on_progress: Progress | None = None
    adapter: str | None = None

    @property
    def batch(self) -> tuple[Any, ...]:
        """Jobs for which this is equal can share a pass of the generator."""
        return self.adapter, self.chunk.shape


@dataclass
class Occupancy:
    """Statistics of the batches."""

    steps: int = 0
    rows: int = 0
    last_rows: int = 0
    cancelled: int = 0


class DenoisingLoop:
    """Denoises chunks of many worlds in batches, step by step.

    Seeds, numbers of steps, guidance and lengths may differ; the result of a chunk is that of denoising it
    alone, up to rounding. A cancelled chunk is dropped before the next step. Above `max_batch` chunks take
    turns.
    """

    def __init__(
        self,
        generator: VideoGenerator,
        compute: Compute,
        max_batch: int = 16,
        adapters: Adapters | None = None,
        processes: GeneratorProcesses | None = None,
    ) -> None:
        self._denoiser: Denoiser[Condition] = Denoiser(generator)
        self._adapters = adapters or Adapters(generator)
        self._compute, self._processes, self.max_batch = compute, processes, max_batch
        self.occupancy = Occupancy()
        self._jobs: list[Job] = []  # shared with the thread
        self._lock = threading.Lock()
        self._loop: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """Whether it can still denoise; failed processes never recover."""
        return self._processes is None or self._processes.alive

    def close(self) -> None:
        """End the processes that share the generator."""
        if self._processes is not None:
            self._processes.close()

    async def run(
        self, chunk: Chunk[Condition], on_progress: Progress | None = None, adapter: str | None = None
    ) -> None:
        """Denoise a chunk to its end, in place."""
        if chunk.finished:
            return
        job = Job(chunk, asyncio.get_running_loop().create_future(), on_progress, adapter)
        with self._lock:
            self._jobs.append(job)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        await job.done

    async def _run(self) -> None:
        while self._jobs:
            jobs: list[Job] = []
            try:
                await self._compute.run(self._step, jobs, stage=DENOISE)
            except Exception as error:  # raised for the callers of these chunks
                failed = jobs or self._jobs  # without a batch, the thread is closed
                self._jobs = [job for job in self._jobs if job not in failed]
                for job in failed:
                    if not job.done.done():
                        job.done.set_exception(error)
                continue
            for job in jobs:
                if job.done.done():
                    continue
                if job.on_progress is not None:
                    job.on_progress(job.chunk.step, job.chunk.solver.num_steps)
                if job.chunk.finished:
                    job.done.set_result(None)

    def _step(self, jobs: list[Job]) -> None:
        """Choose a batch and denoise it by one step, in the thread; its jobs are added to `jobs`."""
        with self._lock:
            self.occupancy.cancelled += sum(job.done.cancelled() for job in self._jobs)
            self._jobs = [job for job in self._jobs if not (job.done.done() or job.chunk.finished)]
            jobs += self._next_batch()
        if jobs:
            chunks, adapter, shared = [job.chunk for job in jobs], jobs[0].adapter, nullcontext()
            if self._processes is not None:
                shared = self._processes.step(chunks, adapter, [job.chunk for job in self._jobs])
            with self._adapters.using(adapter), shared:
                self._denoiser.step(chunks)
            self.occupancy.steps += 1
            self.occupancy.rows += len(jobs)
            self.occupancy.last_rows = len(jobs)

    def _next_batch(self) -> list[Job]:
        """Take jobs that can share a pass with the oldest, and move them to the end of the queue."""
        if not self._jobs:
            return []
        batch = self._jobs[0].batch
        jobs = [job for job in self._jobs if job.batch == batch][: self.max_batch]
        if len(jobs) < len(self._jobs):
            chosen = {job.chunk.serial for job in jobs}
            self._jobs = [job for job in self._jobs if job.chunk.serial not in chosen] + jobs
        return jobs
