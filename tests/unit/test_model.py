"""The six verbs: shapes, causality, caches, and comparison with independent computations."""

import copy
from collections.abc import Callable

import pytest
import torch
from denoising import denoise
from einops import rearrange, repeat
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from worldmodel.actions import Action
from worldmodel.diffusion.sampler import Chunk
from worldmodel.models import text
from worldmodel.models.conditioning import Condition, choose
from worldmodel.models.layers import attention
from worldmodel.models.layers.attention import attend, causal_mask
from worldmodel.models.vision.adapter import Observation
from worldmodel.models.world_model import WorldModel

CELLS, CHANNELS, CHUNK = 4, 4, 4
ACTIONS = [
    [Action("the red ball moves left"), Action(keys=("left",)), Action(), Action(vector=(0.5, -1.0, 2.0))],
    [Action(), Action("the blue box grows"), Action("wait", keys=("right",)), Action("it jumps")],
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def context() -> Tensor:
    """Two episodes of four rounds: `[b, r, s, c, h, w]`."""
    return torch.randn(2, 4, 1, CHANNELS, CELLS, CELLS)


def some_condition(model: WorldModel, batch: int = 2) -> tuple[Condition, Tensor]:
    context = torch.randn(batch, 1, CHANNELS, CELLS, CELLS)
    states = torch.randn(batch, CELLS**2, model.backbone.width)
    return model.condition(model.read_state(states, context), context), context


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


# The verbs


def test_shapes_of_the_six_verbs(model: WorldModel) -> None:
    width = model.backbone.width
    latents = model.codec.encode(torch.zeros(2, 8, 3, 32, 32))
    assert latents.shape == (2, CHUNK, CHANNELS, CELLS, CELLS)
    vision = model.encode_observation(Observation(latents))
    assert vision.tokens.shape == (2, CHUNK * 4, width)
    assert vision.cells.shape == (2, CHUNK, CELLS**2, width)
    actions = model.encode_action([Action("the red ball moves left"), Action()]).tokens
    assert [each.shape for each in actions] == [(32, width)] * 2
    embeds = torch.cat([vision.tokens, torch.stack(actions), vision.cells[:, 0]], dim=1)
    states = model.backbone(embeds)[:, -16:]
    condition = model.condition(model.read_state(states, latents[:, -1:]), latents[:, -1:])
    assert condition.forecast.shape == latents.shape
    assert condition.tokens.shape == condition.cells.shape == (2, 16, 48)
    made = denoise(model, condition, latents[:, -1:], torch.randn_like(latents), num_inference_steps=2)
    assert made.shape == latents.shape
    pixels = model.decode(made)
    assert pixels.shape == (2, 8, 3, 32, 32)
    assert pixels.abs().max() <= 1


def test_a_long_action_takes_more_slots_and_leaves_others_alone(model: WorldModel, context: Tensor) -> None:
    long = Action(" ".join(["ball"] * 40))
    tall, short = model.encode_action([long, Action()]).tokens
    assert len(tall) % 32 == 0
    assert len(tall) > len(short) == 32
    assert torch.equal(short[:-1], model.action.blank.expand_as(short[:-1]))
    assert torch.equal(short[-1], model.action.marker)
    mixed = [[long, *ACTIONS[0][1:]], ACTIONS[1]]
    together = model(context, mixed).hidden
    for row, actions in enumerate(mixed):
        close(together[row : row + 1], model(context[row : row + 1], [actions]).hidden)


def test_one_pass_over_the_rounds_equals_the_rounds_one_by_one(model: WorldModel, context: Tensor) -> None:
    together = model(context, ACTIONS)
    forecast = rearrange(together.condition.forecast, "(b r) t c h w -> b r t c h w", r=4)
    cache = model.backbone.new_cache()
    for index in range(4):
        now = [episode[index] for episode in ACTIONS]
        seen, taken = model.encode_observation(Observation(context[:, index])), model.encode_action(now)
        embeds = torch.cat([seen.tokens, torch.stack(taken.tokens), seen.queries], dim=1)
        states = model.backbone(embeds, cache)[:, -model.config.num_queries :]
        close(states, together.hidden[:, index])
        close(model.read_state(states, context[:, index]).forecast, forecast[:, index])
    assert not torch.allclose(forecast[:, 0], forecast[:, 1], atol=0.01)


def test_later_rounds_do_not_reach_back(model: WorldModel, context: Tensor) -> None:
    before = model(context, ACTIONS).hidden
    changed = [[*ACTIONS[0][:2], Action("explode"), ACTIONS[0][3]], ACTIONS[1]]
    after = model(context, changed).hidden
    assert torch.equal(before[:, :2], after[:, :2])
    assert torch.equal(before[1], after[1])
    assert (before[0, 2:] - after[0, 2:]).abs().amax(dim=(1, 2)).min() > 1e-3


def test_text_is_greedy_decoding_of_its_own_prefix(model: WorldModel) -> None:
    seen = Observation(torch.randn(2, 1, CHANNELS, CELLS, CELLS))
    together = model.generate_text(seen, "describe", max_tokens=12)
    alone = [model.generate_text(row, "describe", max_tokens=12)[0] for row in seen.unstack()]
    assert together == alone


def test_labels_of_text_sequences_follow_the_answer(model: WorldModel) -> None:
    seen = [Observation(torch.randn(1, frames, CHANNELS, CELLS, CELLS)) for frames in (1, 3)]
    answers = ["a red ball", "two"]
    rows = text.sequences(model, seen, ["what is it", None], answers)
    for (embeds, labels), answer in zip(rows, answers, strict=True):
        assert embeds.shape[:1] == labels.shape
        assert labels[labels >= 0].tolist() == [*model.backbone.token_ids(answer), model.backbone.end]
        start = int((labels >= 0).nonzero()[0])
        assert torch.equal(embeds[start], model.answer_marker)


# The backbone, against transformers' own eager attention


@pytest.fixture
def eager(model: WorldModel) -> tuple[WorldModel, torch.nn.Module]:
    """The tiny model in fp64, and its backbone as transformers builds it with eager attention."""
    model = copy.deepcopy(model).double()
    other = AutoModelForCausalLM.from_config(
        copy.deepcopy(model.backbone.model.config),  # a shared one would make ours eager too
        attn_implementation="eager",
    )
    assert model.backbone.model.config._attn_implementation == attention.NAME
    other.load_state_dict(model.backbone.model.state_dict())
    return model, other.double().eval()


def test_backbone_equals_transformers_eager(eager: tuple[WorldModel, torch.nn.Module]) -> None:
    model, other = eager
    embeds = torch.randn(2, 19, model.backbone.width, dtype=torch.float64)
    hidden = model.backbone(embeds)
    expected = other(inputs_embeds=embeds, output_hidden_states=True)
    close(hidden, expected.hidden_states[-1], 1e-6)
    close(model.backbone.logits(hidden), expected.logits, 1e-6)


@pytest.mark.parametrize("cut", [1, 7, 18])
def test_backbone_with_a_cache_equals_transformers_without(
    eager: tuple[WorldModel, torch.nn.Module], cut: int
) -> None:
    model, other = eager
    embeds = torch.randn(2, 19, model.backbone.width, dtype=torch.float64)
    cache = model.backbone.new_cache()
    parts = [model.backbone(part, cache) for part in embeds.split([cut, 19 - cut], dim=1)]
    expected = other(inputs_embeds=embeds, output_hidden_states=True).hidden_states[-1]
    close(torch.cat(parts, dim=1), expected, 1e-6)
    assert cache.get_seq_length() == 19


def test_greedy_text_equals_generate(eager: tuple[WorldModel, torch.nn.Module]) -> None:
    model, other = eager
    prefix = torch.randn(3, 9, model.backbone.width, dtype=torch.float64)
    ours = model.backbone.decode_text(prefix, model.backbone.new_cache(), max_tokens=15)
    ids = other.generate(
        inputs_embeds=prefix,
        attention_mask=torch.ones(3, 9, dtype=torch.long),
        max_new_tokens=15,
        do_sample=False,
        past_key_values=DynamicCache(config=other.config),
    )
    theirs = [model.backbone.tokenizer.decode(row, skip_special_tokens=True).strip() for row in ids]
    assert ours == theirs
    assert any(ours)


# Attention


def reference(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention by its formula, in fp64, every query head with its own copy of the keys."""
    query, key, value = query.double(), key.double(), value.double()
    copies = query.shape[1] // key.shape[1]
    key, value = (repeat(part, "b g m d -> b (g copies) m d", copies=copies) for part in (key, value))
    scores = torch.einsum("bknd,bkmd->bknm", query, key) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("bknm,bkmd->bknd", scores.softmax(dim=-1), value)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("masked", [True, False])
def test_attend_equals_the_formula(
    dtype: torch.dtype, tolerance: float, key_heads: int, masked: bool
) -> None:
    query = torch.randn(2, 4, 5, 16).to(dtype)
    key, value = (torch.randn(2, key_heads, 9, 16).to(dtype) for _ in range(2))
    mask = causal_mask(5, 9, query.device) if masked else None
    out = attend(query, key, value, mask)
    assert out.dtype == dtype
    close(out.double(), reference(query, key, value, mask), tolerance)


def test_attend_in_bf16_gives_the_gradients_of_the_formula() -> None:
    parts = [torch.randn(1, heads, 6, 8).bfloat16().requires_grad_() for heads in (4, 2, 2)]
    mask = causal_mask(6, 6, torch.device("cpu"))
    attend(*parts, mask).float().pow(2).sum().backward()
    exact = [part.detach().double().requires_grad_() for part in parts]
    reference(*exact, mask).pow(2).sum().backward()
    for part, truth in zip(parts, exact, strict=True):
        assert part.grad is not None
        assert truth.grad is not None
        assert (part.grad.double() - truth.grad).norm() < 0.03 * truth.grad.norm()


def test_causal_mask_is_the_lower_corner() -> None:
    cpu = torch.device("cpu")
    assert causal_mask(1, 7, cpu) is None
    mask = causal_mask(3, 5, cpu)
    assert mask is not None
    assert mask.tolist() == [[True] * 3 + [False] * 2, [True] * 4 + [False], [True] * 5]
    square = causal_mask(4, 4, cpu)
    assert square is not None
    assert torch.equal(square, torch.ones(4, 4, dtype=torch.bool).tril())


# The codec


def test_codec_codes_every_group_of_frames_alone(model: WorldModel) -> None:
    frames = torch.rand(1, 8, 3, 32, 32) * 2 - 1
    changed = frames.clone()
    changed[:, 5] = 0
    before, after = model.codec.encode(frames), model.codec.encode(changed)
    same = [torch.equal(before[:, index], after[:, index]) for index in range(CHUNK)]
    assert same == [True, True, False, True]
    close(torch.cat([model.codec.encode(part) for part in frames.split(2, dim=1)], dim=1), before)


def test_an_image_is_a_repeated_frame(model: WorldModel) -> None:
    image = torch.rand(2, 1, 3, 32, 32) * 2 - 1
    assert torch.equal(model.codec.encode(image), model.codec.encode(image.expand(-1, 2, -1, -1, -1)))
    odd = torch.cat([image, image.flip(-1), image.flip(-2)], dim=1)
    close(model.codec.encode(odd)[:, -1:], model.codec.encode(odd[:, -1:]))


def test_codec_scale_standardises_what_it_was_set_from(make_model: Callable[..., WorldModel]) -> None:
    codec = make_model(1).codec
    frames = torch.rand(4, 8, 3, 32, 32) * 2 - 1
    mean, _ = codec.posterior(frames)
    codec.set_scale(mean.mean(dim=(0, 1, 3, 4)), mean.std(dim=(0, 1, 3, 4)))
    latents = codec.encode(frames)
    close(latents.mean(dim=(0, 1, 3, 4)), torch.zeros(CHANNELS), 1e-4)
    close(latents.std(dim=(0, 1, 3, 4)), torch.ones(CHANNELS), 1e-4)
    close(codec.decode(latents), codec.reconstruct(mean), 1e-4)


# The generator


def test_context_cache_equals_the_pass_over_all_frames(model: WorldModel) -> None:
    condition, _ = some_condition(model)
    context = torch.randn(2, 2, CHANNELS, CELLS, CELLS)
    latents = torch.randn(2, CHUNK, CHANNELS, CELLS, CELLS)
    sigma = torch.rand(2, CHUNK) * 0.8 + 0.2
    cached = model.generator(latents, sigma, condition, model.generator.prefill(context, condition))
    whole, _ = model.generator.velocity(
        torch.cat([context, latents], dim=1),
        torch.cat([torch.zeros(2, 2), sigma], dim=1),
        torch.cat([context, condition.forecast], dim=1),
        condition,
        blocks=torch.tensor([0, 0] + [1] * CHUNK),
        first_frame=-2,
    )
    close(cached, whole[:, 2:])
    assert not torch.allclose(
        cached, model.generator.velocity(latents, sigma, condition.forecast, condition)[0], atol=1e-3
    )


def test_earlier_blocks_do_not_see_later_ones(model: WorldModel) -> None:
    condition, _ = some_condition(model)
    latents = torch.randn(2, CHUNK, CHANNELS, CELLS, CELLS)
    sigma = torch.full((2, CHUNK), 0.5)
    blocks = torch.tensor([0, 0, 1, 1])

    def velocity(latents: Tensor, sigma: Tensor) -> Tensor:
        return model.generator.velocity(latents, sigma, condition.forecast, condition, blocks=blocks)[0]

    before = velocity(latents, sigma)
    latents[:, 3] += 1
    sigma[:, 3] = 0.9
    after = velocity(latents, sigma)
    close(before[:, :2], after[:, :2], 1e-6)
    assert not torch.allclose(before[:, 2], after[:, 2], atol=1e-4)


def test_a_frame_is_judged_at_its_own_noise_level(model: WorldModel) -> None:
    condition, _ = some_condition(model)
    latents = torch.randn(2, CHUNK, CHANNELS, CELLS, CELLS)
    levels = torch.tensor([[0.1, 0.4, 0.7, 1.0]]).expand(2, -1)
    each_alone = torch.arange(CHUNK)

    def velocity(sigma: Tensor) -> Tensor:
        return model.generator.velocity(latents, sigma, condition.forecast, condition, blocks=each_alone)[0]

    mixed = velocity(levels)
    for frame in range(CHUNK):
        # Frames up to this one at their levels, those behind at any other: they cannot be seen from here.
        sigma = levels.clone()
        sigma[:, frame + 1 :] = 0.33
        close(velocity(sigma)[:, frame], mixed[:, frame], 1e-4)
    first = velocity(torch.full((2, CHUNK), 0.1))[:, 0]
    close(first, mixed[:, 0], 1e-4)


def test_velocity_points_from_the_clean_frame_that_the_network_sees(model: WorldModel) -> None:
    """With a silent network the velocity is that of the forecast; so one Euler step lands on it."""
    condition, context = some_condition(model)
    silent = copy.deepcopy(model)
    torch.nn.init.zeros_(silent.generator.project.weight)
    torch.nn.init.zeros_(silent.generator.project.bias)
    for steps in (1, 3):
        made = denoise(silent, condition, context, torch.randn_like(condition.forecast), steps)
        close(made, condition.forecast, 1e-4)


# Guidance


def test_guidance_is_the_formula(model: WorldModel) -> None:
    condition, context = some_condition(model)
    noise = torch.randn_like(condition.forecast)
    scale = 2.5
    empty = model.condition_adapter.null(context)

    def velocity(which: Condition) -> Tensor:
        past = model.generator.prefill(context, which)
        return model.generator(noise, torch.ones(2, CHUNK), which, past)

    full, without = velocity(condition), velocity(empty)
    by_hand = noise - (without + scale * (full - without))
    close(denoise(model, condition, context, noise, 1, guidance_scale=scale), by_hand)


def test_guidance_of_one_is_no_guidance(model: WorldModel) -> None:
    condition, context = some_condition(model)
    noise = torch.randn_like(condition.forecast)
    plain = denoise(model, condition, context, noise, 2)
    close(denoise(model, condition, context, noise, 2, guidance_scale=1.0 + 1e-7), plain)
    close(denoise(model, condition, context, noise, 2, guidance_scale=1.0), plain, 0)


def test_guidance_extrapolates_in_every_step(model: WorldModel) -> None:
    condition, context = some_condition(model)
    noise, solver, scale = torch.randn_like(condition.forecast), model.generator.solver(4), 2.5
    empty, by_hand, passes = model.condition_adapter.null(context), noise, []
    for step in range(4):
        timestep = torch.full((2, CHUNK), solver.timestep(step))
        full, without = (
            model.generator(by_hand, timestep, which, model.generator.prefill(context, which))
            for which in (condition, empty)
        )
        by_hand = solver.step(step, without + scale * (full - without), by_hand)
    hook = model.generator.register_forward_hook(lambda *_: passes.append(1))
    chunk = Chunk(noise, solver, (condition, empty), context, scale)
    close(model.denoise([chunk])[0], by_hand)
    hook.remove()
    assert len(passes) == 8


def test_choose_takes_whole_samples(model: WorldModel) -> None:
    condition, context = some_condition(model)
    empty = model.condition_adapter.null(context)
    mixed = choose(torch.tensor([True, False]), condition, empty)
    for name in ("tokens", "pooled", "cells", "forecast"):
        assert torch.equal(getattr(mixed, name)[0], getattr(condition, name)[0])
        assert torch.equal(getattr(mixed, name)[1], getattr(empty, name)[1])
