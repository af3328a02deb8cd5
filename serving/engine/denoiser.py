"""The denoising loop of a server: chunks of all worlds join and leave between steps."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeAlias

from worldmodel.diffusion.sampler import Chunk, Denoiser
from worldmodel.models.adapters import Adapters
from worldmodel.models.conditioning import Condition
from worldmodel.models.generator.base import VideoGenerator
from worldmodel.serving.engine.batching import DENOISE, Again, Batcher, Compute
from worldmodel.serving.engine.generator_processes import GeneratorProcesses

Progress = Callable[[int, int], None]
"""Called with (finished steps, all steps) after every step."""
Steps: TypeAlias = tuple[Chunk[Condition], str | None, Progress | None]
"""A chunk in the loop, its adapter, and what its progress is told."""


@dataclass
class Occupancy:
    """Statistics of the batches."""

    steps: int = 0
    rows: int = 0
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
        self._processes = processes
        self.occupancy = Occupancy()
        self._chunks: tuple[Chunk[Condition], ...] = ()  # replaced as a whole, since the thread reads it
        self._steps: Batcher[Steps, int] = Batcher(
            compute, self._step, DENOISE, max_batch, lambda item: (item[1], item[0].shape), _report
        )

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
        steps: Steps = chunk, adapter, on_progress
        self._chunks = (*self._chunks, chunk)
        try:
            _report(steps, await self._steps(steps))
        except asyncio.CancelledError:
            self.occupancy.cancelled += 1
            raise
        finally:
            self._chunks = tuple(each for each in self._chunks if each is not chunk)

    def _step(self, batch: Sequence[Steps]) -> list[int | Again]:
        """Denoise chunks that can share a pass by one step, in the thread."""
        chunks, adapter, shared = [chunk for chunk, *_ in batch], batch[0][1], nullcontext()
        if self._processes is not None:
            shared = self._processes.step(chunks, adapter, self._chunks)
        with self._adapters.using(adapter), shared:
            self._denoiser.step(chunks)
        self.occupancy.steps += 1
        self.occupancy.rows += len(chunks)
        return [chunk.step if chunk.finished else Again(chunk.step) for chunk in chunks]


def _report(steps: Steps, done: int) -> None:
    chunk, _, on_progress = steps
    if on_progress is not None:
        on_progress(done, chunk.solver.num_steps)
