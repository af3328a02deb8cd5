"""One denoising loop for all live worlds: new work joins at the next step, finished work leaves."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from worldmodel.diffusion.sampler import euler_step
from worldmodel.diffusion.schedule import sampling_sigmas
from worldmodel.models.condition import Condition, stack
from worldmodel.models.dit import KeyValue
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.compute import Compute

Progress = Callable[[int, int], None]
"""Told (steps done, steps in all) after every step."""


@dataclass(eq=False)
class Work:
    """One chunk on its way from noise to data, at its own noise level and step."""

    latents: Float[Tensor, "1 t c h w"]
    sigmas: Float[Tensor, " s"]
    conditions: tuple[Condition, ...]
    """What is conditioned on; with guidance the empty condition comes second."""
    guidance_scale: float
    caches: tuple[list[KeyValue], ...]
    """Keys and values of the context frames under each condition."""
    done: asyncio.Future[Tensor]
    on_progress: Progress | None = None
    step: int = 0
    serial: int = field(default_factory=itertools.count().__next__)
    """Tells works apart for ever, as addresses do not."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Works of one shape can share a batch."""
        return (*self.latents.shape, self.caches[0][0][0].shape[2])


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
        self._stacked: tuple[tuple[int, ...], list[KeyValue]] | None = None

    async def denoise(
        self,
        condition: Condition,
        context: Float[Tensor, "1 c h w"],
        noise: Float[Tensor, "1 t c h w"],
        num_inference_steps: int,
        guidance_scale: float = 1.0,
        on_progress: Progress | None = None,
    ) -> Float[Tensor, "1 t c h w"]:
        """Generate one chunk's latents from noise, as `WorldModel.denoise` does."""
        conditions, caches = await self._compute.run(self._prepare, condition, context, guidance_scale)
        work = Work(
            latents=noise,
            sigmas=sampling_sigmas(num_inference_steps).to(noise),
            conditions=conditions,
            guidance_scale=guidance_scale,
            caches=caches,
            done=asyncio.get_running_loop().create_future(),
            on_progress=on_progress,
        )
        self._live.append(work)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        return await work.done

    def _prepare(
        self, condition: Condition, context: Tensor, guidance_scale: float
    ) -> tuple[tuple[Condition, ...], tuple[list[KeyValue], ...]]:
        guided = guidance_scale != 1.0
        conditions = (condition, self.model.adapter.null(context)) if guided else (condition,)
        caches = tuple(self.model.generator.context_cache(context[:, None], each) for each in conditions)
        return conditions, caches

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
                    work.on_progress(work.step, len(work.sigmas) - 1)
                if work.step == len(work.sigmas) - 1 and not work.done.done():
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
        """Take one Euler step of every work, in one pass of the generator."""
        owners = [work for work in batch for _ in work.conditions]
        latents = torch.cat([work.latents for work in owners])
        frames = latents.shape[1]
        sigma = torch.stack([work.sigmas[work.step].expand(frames) for work in owners])
        condition = stack([each for work in batch for each in work.conditions])
        velocity, _ = self.model.generator(
            latents, sigma, condition.forecast, condition, past=self._past(batch)
        )
        first = 0
        for work in batch:
            full = velocity[first : first + 1]
            if len(work.conditions) == 2:
                empty = velocity[first + 1 : first + 2]
                full = empty + work.guidance_scale * (full - empty)
            first += len(work.conditions)
            now, after = (level.expand(1, frames) for level in work.sigmas[work.step : work.step + 2])
            work.latents = euler_step(lambda *_, given=full: given, work.latents, now, after)
        self.occupancy.steps += 1
        self.occupancy.rows += len(batch)
        self.occupancy.last_rows = len(batch)

    def _past(self, batch: Sequence[Work]) -> list[KeyValue]:
        """Stack the context frames' keys and values; steps of the same works share the copy."""
        names = tuple(work.serial for work in batch)
        if self._stacked is None or self._stacked[0] != names:
            layers = zip(*(cache for work in batch for cache in work.caches), strict=True)
            pairs = [
                (torch.cat([keys for keys, _ in layer]), torch.cat([values for _, values in layer]))
                for layer in layers
            ]
            self._stacked = (names, pairs)
        return self._stacked[1]
