"""Live worlds of one server: every round passes the engine, the denoising loop and the codec, many at once.

The round itself is the library's (`worldmodel.rollout`): what a session does alone, worlds here do together.
"""

import asyncio
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from worldmodel.diffusion.swin import Trail
from worldmodel.errors import InputError
from worldmodel.media.tensors import to_frames, to_tensor
from worldmodel.models.backbone.prefix_cache import History
from worldmodel.models.conditioning import Condition, unstack
from worldmodel.models.vision.adapter import Observation
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.session import (
    Snapshot,
    advance,
    begin,
    both,
    generate,
    imagined,
    look,
    memory_frames,
    newest,
    noise_of_round,
    prompt,
)
from worldmodel.serving.engine.batching import Batcher, Compute
from worldmodel.serving.engine.denoiser import Denoiser, Progress
from worldmodel.serving.engine.local import Engine, LocalEngine, known
from worldmodel.types import WHAT_HAPPENED, Action

MAX_TEXT_TOKENS = 96
"""Longest text that a world says, as in `WorldModel.read`."""
MAX_STEPS = 64
"""Most denoising steps that a client may ask for."""


@dataclass(frozen=True)
class Settings:
    """How one world is generated."""

    seed: int
    num_inference_steps: int
    guidance_scale: float
    adapter: str | None


class WorldService:
    """A model, its engine and its denoising loop, and the worlds that live on them."""

    def __init__(
        self,
        model: WorldModel,
        engine: Engine | None = None,
        *,
        compute: Compute | None = None,
        max_batch: int = 16,
        max_rounds: int = 10_000,
        max_snapshots: int = 16,
    ) -> None:
        self.model = model.eval()
        self.compute = compute or Compute()
        self.engine: Engine = engine or LocalEngine(model.backbone, self.compute)
        self.denoiser = Denoiser(model, self.compute, max_batch)
        self.worlds: dict[str, World] = {}
        self.max_rounds, self.max_snapshots = max_rounds, max_snapshots
        self._condition = Batcher(self.compute, self._conditions)
        self._advance = Batcher(self.compute, self._advanced)

    async def start(
        self,
        frames: np.ndarray | None = None,
        *,
        text: str | None = None,
        seed: int = 0,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        adapter: str | None = None,
    ) -> "World":
        """Start a world from frames (uint8 `[t, h, w, 3]`, the model's size) or from a description.

        Raises:
            InputError: neither or both are given, or a setting is out of range.
        """
        settings = self.settings(seed, num_inference_steps, guidance_scale, adapter)
        world = World(self, settings, await self.first(settings, frames, text))
        self.worlds[world.id] = world
        return world

    def settings(
        self,
        seed: int = 0,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        adapter: str | None = None,
    ) -> Settings:
        """Fill what was left out from the model's config.

        Raises:
            InputError: a setting is out of range, or there is no such adapter.
        """
        config = self.model.config
        steps = config.num_inference_steps if num_inference_steps is None else num_inference_steps
        guidance = config.guidance_scale if guidance_scale is None else guidance_scale
        if not 1 <= steps <= MAX_STEPS:
            raise InputError(f"num_inference_steps is {steps}; use 1 to {MAX_STEPS}.")
        if not math.isfinite(guidance) or abs(guidance) > 100:
            raise InputError(f"guidance_scale is {guidance}; use a number up to 100, 1 for no guidance.")
        if not 0 <= seed < 2**63:
            raise InputError(f"seed is {seed}; use 0 to 2^63 - 1.")
        return Settings(seed, steps, guidance, known(adapter, self.engine.adapters))

    def sweep(self, idle_s: float) -> list[str]:
        """Close worlds that nobody has used for so long; returns their names."""
        idle = [name for name, world in self.worlds.items() if world.idle_s > idle_s]
        for name in idle:
            self.worlds[name].close()
        return idle

    def stats(self) -> dict[str, float]:
        """Return numbers worth watching."""
        occupancy = self.denoiser.occupancy
        return {
            "worlds": len(self.worlds),
            "denoising_steps": occupancy.steps,
            "denoising_rows": occupancy.rows,
            "denoising_batch": occupancy.last_rows,
            "cancelled": occupancy.cancelled,
            **self.engine.stats(),
        }

    async def close(self) -> None:
        """End all worlds and give back what the engine holds."""
        for world in list(self.worlds.values()):
            world.close()
        await self.engine.close()
        self.compute.close()

    # ---- one round, as `Session` plays it ------------------------------------------------------------

    async def generate(
        self,
        settings: Settings,
        history: History,
        context: Float[Tensor, "1 s c h w"],
        action: Action,
        index: int,
        on_progress: Progress | None,
        trail: Trail[Condition] | None = None,
    ) -> tuple[Float[Tensor, "1 t c h w"], Trail[Condition] | None]:
        """Predict the state and generate the latents of a round; chunks that overlap are not batched."""
        states = await self.engine.states(history, self.model.config.num_queries, settings.adapter)
        condition = await self._condition((states[None].to(context), context, action))
        how = settings.num_inference_steps, settings.guidance_scale
        if self.model.config.sampler == "swin":
            draws = [(settings.seed, index)]
            return await self.compute.run(generate, self.model, condition, context, draws, *how, trail)
        noise = noise_of_round(settings.seed, index, self.model.latent_shape)[None].to(context)
        return await self.denoiser.denoise(condition, context, noise, *how, on_progress), None

    async def advance(
        self,
        now: Snapshot,
        action: Action,
        history: History,
        latents: Float[Tensor, "1 t c h w"],
        trail: Trail[Condition] | None,
    ) -> Snapshot:
        """Decode the latents of a round and return the moment after it."""
        return await self._advance((now, action, history, latents, trail))

    async def read(self, observation: Observation, asked: str, adapter: str | None) -> str:
        """Say something about an observation."""
        ((prefix, _),) = await self.compute.run(self.model.read_rows, [observation], [asked])
        return await self.engine.text(prefix, MAX_TEXT_TOKENS, adapter)

    async def first(self, settings: Settings, frames: np.ndarray | None, text: str | None) -> Snapshot:
        """Return the moment a world begins with, seen in frames or imagined from a text."""
        if (frames is None) == (text is None):
            raise InputError("A world starts from one thing: give an image, a video, or a text.")
        if frames is not None:
            return await self.compute.run(self._begin, frames[-memory_frames(self.model.config) :])
        action, nothing = Action.of(text), self.model.nothing(1)
        embeds = await self.compute.run(self.model.round_embeds, nothing, [action])
        latents, _ = await self.generate(settings, (embeds[0],), nothing.latents.detach(), action, -1, None)
        return await self.compute.run(imagined, self.model, latents)

    def _begin(self, frames: np.ndarray) -> Snapshot:
        pixels = to_tensor([frames]).to(self.model.unseen.device)
        return begin(self.model, self.model.observe(pixels).latents, frames)

    def _conditions(self, rows: Sequence[tuple[Tensor, Tensor, Action]]) -> list[Condition]:
        states, contexts, actions = zip(*rows, strict=True)
        return unstack(self.model.condition(torch.cat(states), torch.cat(contexts), actions))

    def _advanced(
        self, rows: Sequence[tuple[Snapshot, Action, History, Tensor, Trail[Condition] | None]]
    ) -> list[Snapshot]:
        latents, contexts = torch.cat([row[3] for row in rows]), torch.cat([row[0].context for row in rows])
        clips = [to_frames(clip) for clip in self.model.decode(latents, contexts)]
        return [
            advance(self.model, now, action, history, made, frames, trail)
            for (now, action, history, made, trail), frames in zip(rows, clips, strict=True)
        ]


class World:
    """One live rollout; its calls wait for each other, and one that fails or is cancelled changes nothing."""

    def __init__(self, service: WorldService, settings: Settings, now: Snapshot) -> None:
        self.id = f"world-{secrets.token_urlsafe(16)}"
        self.settings = settings
        self._idle_since, self._users = time.monotonic(), 0
        self._service, self._now = service, now
        self._snapshots: OrderedDict[str, Snapshot] = OrderedDict()
        self._lock = asyncio.Lock()

    @property
    def idle_s(self) -> float:
        """Seconds since somebody used it."""
        return 0.0 if self._users else time.monotonic() - self._idle_since

    @property
    def round(self) -> int:
        """Rounds played so far."""
        return self._now.round

    @property
    def last_frames(self) -> np.ndarray:
        """Frames of the newest observation, uint8 `[t, h, w, 3]`."""
        return self._now.clips[-1]

    @property
    def snapshots(self) -> tuple[str, ...]:
        """Names of the kept moments, oldest first."""
        return tuple(self._snapshots)

    async def step(
        self, action: "str | Action | Mapping[str, Any] | None" = None, on_progress: Progress | None = None
    ) -> np.ndarray:
        """Play one round and return its frames, uint8 `[t, h, w, 3]`; None lets time pass.

        Raises:
            InputError: the model does not take such an action, or the world has reached its last round.
        """
        act = Action.of(action)
        async with self._used():
            service, now = self._service, self._now
            if now.round >= service.max_rounds:
                raise InputError(
                    f"This world has played {now.round} rounds, the most allowed; reset it or start another."
                )
            history = await service.compute.run(look, service.model, now, act)
            latents, trail = await service.generate(
                self.settings, history, now.context, act, now.round, on_progress, now.trail
            )
            after = await service.advance(now, act, history, latents, trail)
            # What was shown is the client's to keep: a world holds what the model can look back on.
            self._now = replace(after, clips=after.clips[-2:], actions=())
            return self.last_frames

    async def reset(self, frames: np.ndarray | None = None, *, text: str | None = None) -> np.ndarray:
        """Start anew under the same name; returns the first observation.

        Raises:
            InputError: neither or both are given.
        """
        async with self._used():
            self._now = await self._service.first(self.settings, frames, text)
            self._snapshots.clear()
            return self.last_frames

    async def describe(self, question: str | None = None) -> str:
        """Say what is seen now, or answer a question about it."""
        asked = prompt(question)
        async with self._used():
            service = self._service
            return await service.read(newest(service.model, self._now), asked, self.settings.adapter)

    async def infer_action(self) -> str:
        """Say in words which action led from the observation before to the one seen now.

        Raises:
            InputError: there is only one observation so far.
        """
        async with self._used():
            service = self._service
            return await service.read(both(service.model, self._now), WHAT_HAPPENED, self.settings.adapter)

    def fork(self) -> "World":
        """Return a second world that goes its own way from here."""
        other = World(self._service, self.settings, self._now)
        self._service.worlds[other.id] = other
        return other

    def snapshot(self) -> str:
        """Keep this moment under a name; above the limit the oldest one is forgotten."""
        name = f"snapshot-{secrets.token_urlsafe(8)}"
        self._snapshots[name] = self._now
        while len(self._snapshots) > self._service.max_snapshots:
            self._snapshots.popitem(last=False)
        return name

    def restore(self, name: str) -> None:
        """Go back to a kept moment.

        Raises:
            InputError: there is no such moment.
        """
        if name not in self._snapshots:
            raise InputError(f"This world keeps no snapshot {name!r}; take one first, or use a newer one.")
        self._now = self._snapshots[name]

    def close(self) -> None:
        """End the world; what it held is free."""
        self._service.worlds.pop(self.id, None)
        self._snapshots.clear()

    @asynccontextmanager
    async def _used(self) -> AsyncIterator[None]:
        """Wait for one's turn; a world in use is not idle."""
        self._users += 1
        try:
            async with self._lock:
                yield
        finally:
            self._users -= 1
            self._idle_since = time.monotonic()
