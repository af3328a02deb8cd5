"""Causal Wan: context does not see the chunk, so that its keys serve all steps, of which there are few."""

from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn

from worldmodel.config import GeneratorConfig
from worldmodel.diffusion.solver import row_generators
from worldmodel.errors import ConfigError
from worldmodel.models.conditioning import Condition

BATCH, CONTEXT, CHUNK, CHANNELS = 2, 2, 3, 16
LEVELS = torch.tensor([[300.0, 600.0, 900.0], [1000.0, 500.0, 20.0]])
FEW_STEPS = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0, "stochastic_sampling": True}


def latents(tiny: Any, seed: int, count: int) -> Tensor:
    return tiny.draw(seed, BATCH, count, CHANNELS, *tiny.GRID)


def setting(tiny: Any, streamed: bool = False, **more: Any) -> tuple[Any, Condition, Tensor, Tensor]:
    """A causal generator in which no part is silent, a condition with a state, context and noisy chunk."""
    generator = tiny.generator("wan-causal", CONTEXT, CHUNK, streamed, state_channels=CHANNELS + 2, **more)
    torch.manual_seed(5)
    nn.init.normal_(generator.network.channels.project.weight, std=0.3)
    if streamed:
        for branch in generator.network.stream.branches:
            nn.init.normal_(branch.out.weight, std=0.5)
    condition = Condition(
        tokens=tiny.draw(6, BATCH, 7, generator.token_width),
        text=tiny.draw(7, BATCH, 6, tiny.TEXT),
        cells=tiny.draw(8, BATCH, tiny.GRID[0] * tiny.GRID[1], CHUNK * 2),
        forecast=latents(tiny, 9, CHUNK),
    )
    return generator, condition, latents(tiny, 3, CONTEXT), latents(tiny, 1, CHUNK)


@pytest.mark.parametrize("streamed", [False, True], ids=["prompt", "stream"])
def test_context_keys_equal_the_pass_over_all_frames(tiny: Any, streamed: bool) -> None:
    generator, condition, context, noisy = setting(tiny, streamed)
    generator.double()
    whole, cache = generator.prefill_chunk(context.double(), noisy.double(), LEVELS.double(), condition)
    past = generator.prefill(context.double(), condition)
    made = generator(noisy.double(), LEVELS.double(), condition, past)
    # Transformers of diffusers convert to fp32 in places, which sums of other sizes round differently.
    torch.testing.assert_close(made, whole, atol=1e-6, rtol=1e-6)
    tokens = CONTEXT * tiny.GRID[0] * tiny.GRID[1] // 4
    for kept, of_all in zip(past.layers, cache.layers, strict=True):
        for part, all_frames in zip(kept, of_all, strict=True):
            torch.testing.assert_close(part, all_frames[:, :, :tokens], atol=1e-6, rtol=1e-6)
    generator.causal = False
    full, _ = generator.prefill_chunk(context.double(), noisy.double(), LEVELS.double(), condition)
    assert (full - whole).abs().max() > 1e-4


@pytest.mark.parametrize("causal", [True, False])
def test_earlier_frames_do_not_depend_on_later_ones(tiny: Any, causal: bool) -> None:
    """Bit for bit: what the transformer gives for the context, while a frame of the chunk changes."""
    generator, condition, context, noisy = setting(tiny, streamed=True)
    generator.causal = causal
    outputs: list[Tensor] = []
    generator.transformer.register_forward_hook(lambda *given: outputs.append(given[-1][0]))
    changed = noisy.clone()
    changed[:, -1] += 1
    for each in (noisy, changed):
        generator.prefill_chunk(context, each, LEVELS, condition)
    first, second = outputs
    assert torch.equal(first[:, :, :CONTEXT], second[:, :, :CONTEXT]) == causal
    assert not torch.allclose(first[:, :, CONTEXT], second[:, :, CONTEXT])  # of the same chunk


def test_frames_of_one_block_are_those_of_the_plain_transformer(tiny: Any) -> None:
    generator, noisy = tiny.generator("wan-causal", CONTEXT, CHUNK), latents(tiny, 1, CHUNK)
    text = tiny.draw(7, BATCH, 6, tiny.TEXT)
    condition = Condition(tokens=text[:, :0], text=text)
    level = torch.tensor([300.0, 900.0])
    past = generator.prefill(noisy[:, :0], condition)
    made = generator(noisy, level[:, None].expand(-1, CHUNK), condition, past)
    plain = tiny.transformer("wan-causal")
    expected = plain(noisy.transpose(1, 2).contiguous(), level, text, return_dict=False)[0]
    assert torch.equal(made.transpose(1, 2), expected)


class Masked(WanAttnProcessor):
    """Diffusers' own attention with a mask over blocks of frames: an independent reference."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def __call__(
        self, attn: Any, x: Tensor, text: Any = None, mask: Any = None, rotary: Any = None
    ) -> Tensor:
        return super().__call__(attn, x, text, self.mask if text is None else None, rotary)


def test_blocks_equal_diffusers_own_attention_with_a_mask(tiny: Any) -> None:
    generator = tiny.generator("wan-causal", CONTEXT, CHUNK)
    context, noisy = latents(tiny, 3, CONTEXT), latents(tiny, 1, CHUNK)
    text = tiny.draw(7, BATCH, 6, tiny.TEXT)
    condition = Condition(tokens=text[:, :0], text=text)
    made = generator(noisy, LEVELS, condition, generator.prefill(context, condition))
    cells = tiny.GRID[0] * tiny.GRID[1] // 4
    block = torch.tensor([0] * CONTEXT + [1] * CHUNK).repeat_interleave(cells)
    plain = tiny.transformer("wan-causal")
    for layer in plain.blocks:
        layer.attn1.set_processor(Masked(block[None] <= block[:, None]))
    timestep = torch.cat([LEVELS.new_zeros(BATCH, CONTEXT), LEVELS], dim=1).repeat_interleave(cells, dim=1)
    frames = torch.cat([context, noisy], dim=1).transpose(1, 2).contiguous()
    expected = plain(frames, timestep, text, return_dict=False)[0].transpose(1, 2)[:, CONTEXT:]
    torch.testing.assert_close(made, expected)


@pytest.mark.parametrize("context", [0, CONTEXT])
def test_training_predicts_what_sampling_does(tiny: Any, context: int) -> None:
    """At a level of its own for every frame, with context frames and without."""
    generator, condition, seen, clean = setting(tiny)
    seen, noise, sigma = seen[:, :context], latents(tiny, 2, CHUNK), torch.tensor([[0.3, 0.6, 0.9]] * BATCH)
    level = generator.path.nearest(sigma)
    noisy = generator.path.add_noise(clean, noise, level)
    taught = generator.training_loss(clean, noise, sigma, condition, seen)
    if context:
        made = generator(noisy, level, condition, generator.prefill(seen, condition))
    else:  # every frame as if all were at its level gives the same keys only where levels are equal
        made, _ = generator.prefill_chunk(seen, noisy, level, condition)
        other = generator(noisy, level, condition, generator.prefill(seen, condition))
        assert not torch.allclose(made, other)
    error = (made - (noise - clean)).pow(2).mean(dim=2)
    torch.testing.assert_close(taught.error, error)


def test_few_steps_are_those_of_self_forcing(tiny: Any) -> None:
    """Its published levels (1000, 750, 500 and 250, shifted by 5), with fresh noise at each."""
    generator, condition, context, noise = setting(tiny, scheduling=FEW_STEPS)
    solver = generator.solver(4)
    timesteps = torch.tensor([solver.timestep(step) for step in range(4)])
    torch.testing.assert_close(timesteps, torch.tensor([1000.0, 937.5, 2500 / 3, 625.0]))
    made = tiny.denoise(generator, [condition], context, noise, 4, 1.0)
    past, x, rows = generator.prefill(context, condition), noise, row_generators(noise)
    sigmas = timesteps / 1000
    for sigma, following in zip(sigmas, [*sigmas[1:], torch.tensor(0.0)], strict=True):
        clean = x - sigma * generator(x, 1000 * sigma.expand(BATCH, CHUNK), condition, past)
        fresh = torch.stack([torch.randn(x.shape[1:], generator=row) for row in rows])
        x = (1 - following) * clean + following * fresh
    torch.testing.assert_close(made, x, atol=1e-4, rtol=1e-4)
    generator.causal = False  # as diffusers spaces the steps of its pipelines
    plain = FlowMatchEulerDiscreteScheduler(shift=5.0)
    plain.set_timesteps(4)
    assert [generator.solver(4).timestep(step) for step in range(4)] == plain.timesteps.tolist()


def test_context_passes_once_for_a_chunk(tiny: Any) -> None:
    frames: dict[bool, list[int]] = {}
    for causal in (True, False):
        generator, condition, context, noise = setting(tiny)
        generator.causal, frames[causal] = causal, []
        generator.transformer.register_forward_pre_hook(
            lambda module, args, given, seen=frames[causal]: seen.append(given["hidden_states"].shape[2]),
            with_kwargs=True,
        )
        tiny.denoise(generator, [condition], context, noise, 4, 1.0)
    assert frames == {True: [CONTEXT] + [CHUNK] * 4, False: [CONTEXT + CHUNK] * 4}


def test_our_own_generator_is_causal_without_saying_so() -> None:
    with pytest.raises(ConfigError, match=r"generator\.causal"):
        GeneratorConfig(causal=True)
