"""One denoising loop for all live worlds: new work joins at the next step, finished work leaves."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from worldmodel.diffusion.sampler import Solver
from worldmodel.models.conditioning import Condition, stack
from worldmodel.models.generator.base import Past
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.engine.batching import Compute

Progress = Callable[[int, int], None]
"""Told (steps done, steps in all) after every step."""


@dataclass(eq=False)
class Work:
    """One chunk on its way from noise to data, at its own noise level and step."""

    latents: Float[Tensor, "1 t c h w"]
    solver: Solver
    conditions: tuple[Condition, ...]
    """What is conditioned on; with guidance the empty condition comes second."""
    guidance_scale: float
    starts: tuple[Past, ...]
    """What the generator keeps of the context frames, under each condition."""
    done: asyncio.Future[Tensor]
    on_progress: Progress | None = None
    step: int = 0
    serial: int = field(default_factory=itertools.count().__next__)
    """Tells works apart for ever, as addresses do not."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Works of one shape can share a batch."""
        return (*self.latents.shape, *self.starts[0][0][0].shape[1:])


@dataclass
class Occupancy:
    """How full the batches were."""

    steps: int = 0
    rows: int = 0
    last_rows: int = 0
    cancelled: int = 0


class Denoiser:
    """Denoises chunks of many worlds together, step by step.

    Seeds, numbers of steps, guidance and lengths may all differ; every chunk comes out as it would alone, up
    to rounding. A cancelled chunk leaves before the next step. Above `max_batch` live chunks take turns.
    """

    def __init__(self, model: WorldModel, compute: Compute, max_batch: int = 16) -> None:
        self.model, self._compute, self.max_batch = model, compute, max_batch
        self.occupancy = Occupancy()
        self._live: list[Work] = []
        self._loop: asyncio.Task[None] | None = None
        self._stacked: tuple[tuple[int, ...], Past] | None = None

    async def denoise(
        self,
        condition: Condition,
        context: Float[Tensor, "1 s c h w"],
        noise: Float[Tensor, "1 t c h w"],
        num_inference_steps: int,
        guidance_scale: float = 1.0,
        on_progress: Progress | None = None,
    ) -> Float[Tensor, "1 t c h w"]:
        """Generate one chunk's latents from noise, as `WorldModel.denoise` does."""
        conditions, starts = await self._compute.run(self._prepare, condition, context, guidance_scale)
        work = Work(
            latents=noise,
            solver=self.model.generator.solver(num_inference_steps),
            conditions=conditions,
            guidance_scale=guidance_scale,
            starts=starts,
            done=asyncio.get_running_loop().create_future(),
            on_progress=on_progress,
        )
        self._live.append(work)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        return await work.done

    def _prepare(
        self, condition: Condition, context: Tensor, guidance_scale: float
    ) -> tuple[tuple[Condition, ...], tuple[Past, ...]]:
        guided = guidance_scale != 1.0
        conditions = (condition, self.model.null_condition(context)) if guided else (condition,)
        return conditions, tuple(self.model.generator.start(context, each) for each in conditions)

    async def _run(self) -> None:
        while self._leave():
            batch = self._batch()
            try:
                await self._compute.run(self._advance, batch)
            except Exception as error:  # belongs to those who wait for these chunks
                for work in batch:
                    if not work.done.done():
                        work.done.set_exception(error)
                continue
            for work in batch:
                work.step += 1
                if work.on_progress is not None and not work.done.done():
                    work.on_progress(work.step, work.solver.num_steps)
                if work.step == work.solver.num_steps and not work.done.done():
                    work.done.set_result(work.latents)

    def _leave(self) -> bool:
        """Let go of finished and cancelled work; tell whether any is left."""
        self.occupancy.cancelled += sum(work.done.cancelled() for work in self._live)
        self._live = [work for work in self._live if not work.done.done()]
        return bool(self._live)

    def _batch(self) -> list[Work]:
        """Take works of the oldest one's shape, and put them behind those that had no turn."""
        shape = self._live[0].shape
        batch = [work for work in self._live if work.shape == shape][: self.max_batch]
        if len(batch) < len(self._live):
            chosen = {work.serial for work in batch}
            self._live = [work for work in self._live if work.serial not in chosen] + batch
        return batch

    def _advance(self, batch: Sequence[Work]) -> None:
        """Take one step of every work, in one pass of the generator."""
        owners = [work for work in batch for _ in work.conditions]
        latents = torch.cat([work.latents for work in owners])
        levels = [work.solver.level(work.step) for work in owners]
        level = latents.new_tensor(levels)[:, None].expand(-1, latents.shape[1])
        condition = stack([each for work in batch for each in work.conditions])
        predictions = self.model.generator(latents, level, condition, self._past(batch))
        first = 0
        for work in batch:
            full = predictions[first : first + 1]
            if len(work.conditions) == 2:
                empty = predictions[first + 1 : first + 2]
                full = empty + work.guidance_scale * (full - empty)
            first += len(work.conditions)
            work.latents = work.solver.step(work.step, full, work.latents)
        self.occupancy.steps += 1
        self.occupancy.rows += len(batch)
        self.occupancy.last_rows = len(batch)

    def _past(self, batch: Sequence[Work]) -> Past:
        """Stack what is kept of the context frames; steps of the same works share the copy."""
        names = tuple(work.serial for work in batch)
        if self._stacked is None or self._stacked[0] != names:
            layers = zip(*(start for work in batch for start in work.starts), strict=True)
            past = [tuple(torch.cat(tensors) for tensors in zip(*layer, strict=True)) for layer in layers]
            self._stacked = (names, past)
        return self._stacked[1]
