"""Step caching with generators of diffusers: chunks at different steps in one batch, each by its own rule."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from worldmodel.diffusion.sampler import Chunk, Denoiser
from worldmodel.experiments.step_cache import StepCache
from worldmodel.models.conditioning import Condition

STEPS = (8, 12, 10)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["wan", "ltx", "cog-i2v"])
def test_chunks_in_one_batch_match_those_alone(tiny: SimpleNamespace, kind: str) -> None:
    generator = tiny.generator(kind)
    counted: list[int] = []
    generator.register_forward_hook(lambda _, inputs, __: counted.append(len(inputs[0])))
    channels = generator.transformer.config.out_channels

    def chunks() -> list[Chunk[Condition]]:
        made = []
        for seed, steps in enumerate(STEPS):
            noise, context = (tiny.draw(seed, 1, n, channels, *tiny.GRID) for n in (3, 1))
            given = Condition(tokens=tiny.draw(seed + 9, 1, 7, generator.token_width))
            solver = generator.solver(steps)
            made.append(Chunk(noise, solver, (given,), context, step_cache=StepCache(0.3)))
        return made

    def run(together: list[Chunk[Condition]]) -> tuple[list[Tensor], int]:
        counted.clear()
        denoiser: Denoiser[Condition] = Denoiser(generator)
        for step in range(sum(STEPS)):  # chunk i joins at step 2 i
            denoiser.step([each for each in together[: 1 + step // 2] if not each.finished])
        return [chunk.latents for chunk in together], sum(counted)

    alone = [run([chunk]) for chunk in chunks()]
    made, rows = run(chunks())
    assert rows == sum(each for _, each in alone) < sum(STEPS)
    for (expected,), got in zip((latents for latents, _ in alone), made, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
