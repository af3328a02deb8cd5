"""The denoising loop, for single chunks, batches, guidance and overlapping chunks.

`WorldModel.denoise` runs chunks to their end. In a server, chunks join and leave between steps.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from worldmodel import batch
from worldmodel.diffusion.solver import Solver
from worldmodel.diffusion.swin import ChunkTrace, half

C = TypeVar("C")
"""The generator's condition."""
Given = TypeVar("Given", contravariant=True)


@runtime_checkable
class ChunkGenerator(Protocol[Given]):
    """The methods of a video generator that the loop calls."""

    def prefill(self, context: Tensor, condition: Given) -> Any:
        """Return the cache of context frames, which end where the chunk begins."""
        ...

    def prefill_chunk(
        self, context: Tensor, latents: Tensor, timestep: Tensor, condition: Given
    ) -> tuple[Tensor, Any]:
        """Predict a noisy chunk after its context; return also the cache of both."""
        ...

    def __call__(self, latents: Tensor, timestep: Tensor, condition: Given, cache: Any) -> Tensor:
        """Predict at one timestep per frame."""
        ...


@runtime_checkable
class StepCache(Protocol):
    """What decides in which steps a prediction is reused; each chunk has its own (`make_step_cache`)."""

    def decide(self, latents: Float[Tensor, "b t c h w"], last: bool) -> Bool[Tensor, " b"]:
        """Return the rows whose prediction the next step needs, on the CPU; `last` if no step follows it."""
        ...

    def complete(
        self, latents: Float[Tensor, "b t c h w"], computed: Float[Tensor, "n t c h w"]
    ) -> Float[Tensor, "b t c h w"]:
        """Return the predictions of all rows: the computed ones, and those that are reused."""
        ...


@dataclass(eq=False)
class Chunk(Generic[C]):
    """A chunk (or a batch of chunks that started together) between noise and data."""

    latents: Float[Tensor, "b t c h w"]
    solver: Solver
    conditions: tuple[C, ...]
    """The condition; with guidance the unconditional one comes second."""
    context: Float[Tensor, "b s c h w"]
    guidance_scale: float = 1.0
    overlapping: bool = False
    """Whether the next chunk will follow this one's trace (sampler: swin)."""
    previous: ChunkTrace[C] | None = None
    """The trace that this one follows in its first half."""
    step_cache: StepCache | None = None
    """Which steps reuse an earlier prediction; None computes all."""
    step: int = 0
    caches: tuple[Any, ...] = ()
    """Caches of the context, one per condition; filled before the first step."""
    serial: int = field(default_factory=itertools.count().__next__)
    """Unique id (unlike `id()`, never reused)."""
    seen: list[tuple[Tensor, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.overlapping:
            half(self.solver.num_steps)
        if self.previous and not self.previous.fits(self.solver.num_steps, len(self.conditions)):
            self.previous = None

    @property
    def finished(self) -> bool:
        """Whether the latents are data."""
        return self.step >= self.solver.num_steps

    @property
    def follows(self) -> bool:
        """Whether this step attends to the noisy chunk before instead of the context frames."""
        return self.previous is not None and self.step < half(self.solver.num_steps)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Chunks of one shape can share a pass of the generator."""
        return batch.shapes((self.latents, self.context, self.conditions[0])), self.follows

    @property
    def trace(self) -> ChunkTrace[C] | None:
        """The trace for the next chunk; None unless chunks overlap."""
        if not self.overlapping:
            return None
        latents, timesteps = zip(*self.seen, strict=True)
        return ChunkTrace(self.context, self.conditions, latents, timesteps)

    def needed(self) -> Bool[Tensor, " b"]:
        """Return the rows whose prediction this step needs, on the CPU."""
        if self.step_cache is None:
            return torch.ones(len(self.latents), dtype=torch.bool)
        return self.step_cache.decide(self.latents, last=self.step == self.solver.num_steps - 1)

    def advance(self, predictions: Sequence[Float[Tensor, "n t c h w"]]) -> None:
        """Take one step, given the predictions of the needed rows under each of its conditions.

        Guidance extrapolates away from the unconditional one (Ho & Salimans 2022, arXiv:2207.12598, eq. 6).
        """
        prediction, *unconditional = predictions
        if unconditional:
            # Scale 1 is the conditional prediction; above, the difference that the condition makes is
            # exaggerated.
            prediction = unconditional[0] + self.guidance_scale * (prediction - unconditional[0])
        if self.step_cache is not None:
            prediction = self.step_cache.complete(self.latents, prediction)
        if self.overlapping and self.step >= half(self.solver.num_steps):
            self.seen.append((self.latents, self.solver.timestep(self.step)))
        self.latents = self.solver.step(self.step, prediction, self.latents)
        self.step += 1


class Denoiser(Generic[C]):
    """Advances chunks step by step; steps, guidance and noise levels may differ from chunk to chunk.

    Each chunk comes out as if it were denoised alone, up to rounding.
    """

    def __init__(self, generator: ChunkGenerator[C]) -> None:
        self.generator = generator
        # By branch: the chunks of the last step, and their stacked conditions and caches. They change only
        # when a chunk joins or leaves; copying the keys and values of all context frames in every step would
        # cost more than the step.
        self._stacked: dict[int, tuple[tuple[int, ...], C, Any]] = {}

    def step(self, chunks: Sequence[Chunk[C]]) -> None:
        """Advance every chunk by one step of its solver; chunks of one shape share a pass."""
        groups: dict[tuple[Any, ...], list[Chunk[C]]] = {}
        for chunk in chunks:
            # Chunks at different steps share a pass: the generator takes a noise level per frame.
            groups.setdefault(chunk.shape, []).append(chunk)
        for group in groups.values():
            self._prefill([chunk for chunk in group if not chunk.caches])
            needed = [chunk.needed() for chunk in group]
            predictions: list[list[Tensor]] = [[] for _ in group]
            for branch in range(max(len(chunk.conditions) for chunk in group)):
                rows = [row for row, chunk in enumerate(group) if len(chunk.conditions) > branch]
                parts = self._predict([group[row] for row in rows], branch, [needed[row] for row in rows])
                for row, part in zip(rows, parts, strict=True):
                    predictions[row].append(part)
            for chunk, given in zip(group, predictions, strict=True):
                chunk.advance(given)

    def _predict(
        self, chunks: Sequence[Chunk[C]], branch: int, needed: Sequence[Bool[Tensor, " b"]]
    ) -> Sequence[Tensor]:
        """Return the predictions of the needed rows of each chunk."""
        latents, rows = batch.stack([chunk.latents for chunk in chunks]), torch.cat(list(needed))
        if not rows.any():
            return [chunk.latents[:0] for chunk in chunks]
        timestep = _timesteps(latents, [(c.latents, c.solver.timestep(c.step)) for c in chunks])
        inputs = latents, timestep, *self._conditions(chunks, branch)
        if not rows.all():
            inputs = batch.take(inputs, rows.nonzero()[:, 0].to(latents.device))
        return self.generator(*inputs).split([int(each.sum()) for each in needed])

    def _prefill(self, chunks: Sequence[Chunk[C]]) -> None:
        """Fill the caches of the context frames, of chunks that start together in one pass."""
        sizes = [len(chunk.context) for chunk in chunks]
        for branch in range(max((len(chunk.conditions) for chunk in chunks), default=0)):
            chosen = [chunk for chunk in chunks if len(chunk.conditions) > branch]
            context = batch.stack([chunk.context for chunk in chosen])
            cache = self.generator.prefill(
                context, batch.stack([chunk.conditions[branch] for chunk in chosen])
            )
            sizes = [len(chunk.context) for chunk in chosen]
            for chunk, own in zip(chosen, batch.split(cache, sizes), strict=True):
                chunk.caches = (*chunk.caches, own)

    def _conditions(self, chunks: Sequence[Chunk[C]], branch: int) -> tuple[C, Any]:
        """Stack the conditions and caches of chunks; steps of the same chunks share the copy."""
        if chunks[0].follows:
            condition = batch.stack([chunk.conditions[branch] for chunk in chunks])
            return condition, self._previous(chunks, branch)
        serials = tuple(chunk.serial for chunk in chunks)
        known = self._stacked.get(branch)
        if known is None or known[0] != serials:
            condition = batch.stack([chunk.conditions[branch] for chunk in chunks])
            known = serials, condition, batch.stack([chunk.caches[branch] for chunk in chunks])
            self._stacked[branch] = known
        return known[1], known[2]

    def _previous(self, chunks: Sequence[Chunk[C]], branch: int) -> Any:
        """Return the caches of the noisy chunks that these ones follow at their present steps."""
        traces = [(chunk.previous, chunk.step) for chunk in chunks if chunk.previous is not None]
        latents = batch.stack([trace.latents[step] for trace, step in traces])
        timestep = _timesteps(
            latents, [(trace.latents[step], trace.timesteps[step]) for trace, step in traces]
        )
        condition = batch.stack([trace.conditions[branch] for trace, _ in traces])
        context = batch.stack([trace.context for trace, _ in traces])
        return self.generator.prefill_chunk(context, latents, timestep, condition)[1]


def _timesteps(like: Tensor, parts: Sequence[tuple[Tensor, float]]) -> Float[Tensor, "b t"]:
    """Return one timestep per frame, equal for all frames of a chunk."""
    return torch.cat([like.new_full(latents.shape[:2], timestep) for latents, timestep in parts])
