"""Generators of diffusers as parts: learning, states, context, chunks in blocks."""

import pytest
import torch
from diffusers import WanPipeline
from torch import nn
from torch.distributed.tensor import DTensor

from worldmodel.batch import take
from worldmodel.config import TrainConfig
from worldmodel.diffusion.swin import window_places
from worldmodel.models.codec.diffusers import DiffusersCodec
from worldmodel.models.conditioning import Condition
from worldmodel.models.generator.diffusers.scheduler import FlowPath, VariancePath
from worldmodel.models.layers import attention
from worldmodel.train import distributed
from worldmodel.train.activations import Offload, apply_policy

KINDS = ["wan", "wan-causal", "wan-i2v", "wan-clip", "ltx", "cog-i2v", "cog1.5-i2v"]
BATCH, CHUNK = 2, 3


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(params=[False, True], ids=["prompt", "stream"])
def streamed(request) -> bool:
    return request.param


def channels(kind: str) -> int:
    return {"wan": 16, "ltx": 8, "cog": 4}[kind.split("-")[0].removesuffix("1.5")]


def make(tiny, kind: str, streamed: bool = False, context: int = 1):
    return tiny.generator(kind, context, 4 - context, streamed, codec=DiffusersCodec(tiny.vae(kind)))


def latents(tiny, kind: str, seed: int, count: int = CHUNK) -> torch.Tensor:
    return tiny.draw(seed, BATCH, count, channels(kind), *tiny.GRID)


def condition(tiny, generator, seed: int = 0, text: bool = True) -> Condition:
    words = tiny.draw(seed + 50, BATCH, 6, tiny.TEXT) if text else None
    return Condition(tokens=tiny.draw(seed, BATCH, 7, generator.token_width), text=words)


def rouse(generator) -> None:
    """Draw the output layers of the stream, which are zero before training."""
    for branch in generator.network.stream.branches:
        nn.init.normal_(branch.out.weight, std=0.5)


@pytest.mark.parametrize("text", [False, True], ids=["alone", "with words"])
def test_loss_has_gradients_for_states_and_weights(tiny, kind, streamed, text):
    generator = make(tiny, kind, streamed).requires_grad_(True)
    given = condition(tiny, generator, text=text)
    given.tokens.requires_grad_(True)
    clean, noise, context = latents(tiny, kind, 1), latents(tiny, kind, 2), latents(tiny, kind, 3, 1)
    sigma = torch.tensor([[0.3, 0.6, 0.9], [1.0, 1.0, 1.0]])
    for rest in (True, False):  # at first a stream is silent: nothing behind its zeros learns
        if streamed and not rest:
            rouse(generator)
        generator.zero_grad()
        given.tokens.grad = None
        taught = generator.training_loss(clean, noise, sigma, given, context)
        assert taught.error.shape == (BATCH, CHUNK, *tiny.GRID)
        assert taught.clean.shape == clean.shape
        taught.error.mean().backward()
        grads = {name: p.grad for name, p in generator.named_parameters() if p.grad is not None}
        assert all(grad.isfinite().all() for grad in grads.values())
        assert any(grad.any() for name, grad in grads.items() if "transformer" in name)
        silent = streamed and rest
        assert bool(given.tokens.grad is not None and given.tokens.grad.any()) == (not silent)
        if streamed:
            moved = {name.rpartition("branches.")[2] for name, grad in grads.items() if grad.any()}
            assert "0.out.weight" in moved
            assert ("0.attention.to_q.weight" in moved) == (not silent)


def test_error_and_implied_latents_follow_from_the_prediction(tiny, kind):
    generator = make(tiny, kind)
    given, context = condition(tiny, generator), latents(tiny, kind, 3, 1)
    clean, noise = latents(tiny, kind, 1), latents(tiny, kind, 2)
    sigma = torch.full((BATCH, CHUNK), 0.7)
    taught = generator.training_loss(clean, noise, sigma, given, context)
    level = generator.path.nearest(sigma)
    noisy = generator.path.add_noise(clean, noise, level)
    prediction = generator(noisy, level, given, generator.prefill(context, given))
    target = generator.path.target(clean, noise, level)
    torch.testing.assert_close(taught.error, (prediction - target).pow(2).mean(dim=2))
    torch.testing.assert_close(generator.path.clean(noisy, target, level), clean, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["ltx", "wan"])
def test_flow_path_equals_the_scheduler(tiny, kind):
    values = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 5.0} if kind == "wan" else {}
    scheduler = tiny.scheduler(kind, **values)
    path, clean, noise = FlowPath(scheduler), latents(tiny, kind, 1), latents(tiny, kind, 2)
    sigma = torch.tensor([[0.1, 0.5, 0.9], [0.0, 0.33, 1.0]])
    level = path.nearest(sigma)
    assert (level / 1000 - sigma).abs().max() < 0.006
    rows = scheduler.scale_noise(clean.flatten(0, 1), level.flatten(), noise.flatten(0, 1))
    torch.testing.assert_close(path.add_noise(clean, noise, level), rows.view_as(clean))


def test_flow_path_of_unipc_equals_the_scheduler(tiny):
    scheduler = tiny.scheduler("wan")
    path, clean, noise = FlowPath(scheduler), latents(tiny, "wan", 1), latents(tiny, "wan", 2)
    level = path.nearest(torch.tensor([[0.1, 0.5, 0.9], [0.2, 0.33, 0.8]]))
    scheduler.set_timesteps(1000)
    rows = scheduler.add_noise(clean.flatten(0, 1), noise.flatten(0, 1), level.flatten().long())
    torch.testing.assert_close(path.add_noise(clean, noise, level), rows.view_as(clean), atol=0.01, rtol=0)


def test_variance_preserving_path_equals_the_scheduler(tiny):
    scheduler = tiny.scheduler("cog")
    path = VariancePath(scheduler)
    sigma = torch.tensor([[0.0, 0.3, 0.7, 1.0]])
    level = path.nearest(sigma).long()
    assert level[0, 3] == 999
    signal = scheduler.alphas_cumprod[level]
    ratio = ((1 - signal) / signal).float()  # of variances, as on the straight path
    torch.testing.assert_close(ratio[:, 1:3], (sigma / (1 - sigma))[:, 1:3] ** 2, rtol=0.05, atol=0)
    assert signal[0, 0] > 0.99


def test_prediction_depends_on_every_input(tiny, kind, streamed):
    generator = make(tiny, kind, streamed)
    if streamed:
        rouse(generator)
    given, context, noisy = condition(tiny, generator), latents(tiny, kind, 3, 1), latents(tiny, kind, 1)
    level = torch.full((BATCH, CHUNK), 500.0)

    def predict(given, context):
        return generator(noisy, level, given, generator.prefill(context, given))

    first = predict(given, context)
    assert first.shape == noisy.shape
    assert torch.equal(predict(given, context), first)
    assert not torch.allclose(predict(condition(tiny, generator, 8), context), first)
    assert not torch.allclose(predict(given, latents(tiny, kind, 4, 1)), first)
    one = slice(1, 2)
    alone = Condition(tokens=given.tokens[one], text=given.text[one])
    single = generator(noisy[one], level[one], alone, generator.prefill(context[one], alone))
    torch.testing.assert_close(single, first[one], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["wan", "wan-causal", "wan-i2v", "ltx", "cog-i2v"])
def test_context_of_several_frames(tiny, kind):
    generator = make(tiny, kind, context=2)
    given, noisy = condition(tiny, generator), latents(tiny, kind, 1, 2)
    level = torch.full((BATCH, 2), 500.0)
    made = []
    for seed in (3, 4):
        context = torch.cat([latents(tiny, kind, seed, 1), latents(tiny, kind, 5, 1)], dim=1)
        made.append(generator(noisy, level, given, generator.prefill(context, given)))
    assert made[0].shape == noisy.shape
    assert not torch.allclose(*made)


@pytest.mark.parametrize("kind", ["wan", "ltx"])
def test_noise_level_per_frame(tiny, kind):
    generator = make(tiny, kind)
    given, context, noisy = condition(tiny, generator), latents(tiny, kind, 3, 1), latents(tiny, kind, 1)
    past = generator.prefill(context, given)
    same = generator(noisy, torch.full((BATCH, 3), 500.0), given, past)
    other = generator(noisy, torch.tensor([[500.0, 500.0, 900.0]]).expand(BATCH, -1), given, past)
    assert not torch.allclose(same[:, 2], other[:, 2])


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_wan_modulates_frames_and_not_tokens(tiny, streamed, again):
    """As with the timestep of every token, which takes as many times the memory as a frame has tokens."""
    generator = make(tiny, "wan", streamed).requires_grad_(True)
    if streamed:
        rouse(generator)
    context, noisy = latents(tiny, "wan", 3, 1), latents(tiny, "wan", 1)
    given, level = condition(tiny, generator), torch.tensor([[300.0, 500.0, 900.0], [10.0, 20.0, 30.0]])
    if again:
        for layer in generator.layers:
            apply_policy(layer, "recompute", Offload(torch.device("cpu")))
    rows, transformer = [], generator.transformer
    transformer.condition_embedder.time_proj.register_forward_hook(
        lambda module, inputs, made: rows.append(made.shape[:-1].numel())
    )
    made = generator(noisy, level, given, generator.prefill(context, given))
    made.square().sum().backward()
    found = {name: p.grad for name, p in generator.network.named_parameters() if p.grad is not None}
    assert rows == [BATCH * (1 + CHUNK)]

    generator.zero_grad()
    frames = torch.cat([context, noisy], dim=1)
    per_frame = torch.cat([level.new_zeros(BATCH, 1), level], dim=1)
    expected = generator.network(
        given.tokens if streamed else None,
        None,
        lambda embedded, tokens: embedded,
        hidden_states=frames.transpose(1, 2).contiguous(),
        timestep=per_frame.repeat_interleave(tiny.GRID[0] * tiny.GRID[1] // 4, dim=1),
        encoder_hidden_states=generator.prompt(given),
    ).transpose(1, 2)[:, 1:]
    assert rows[1:] == [BATCH * (1 + CHUNK) * tiny.GRID[0] * tiny.GRID[1] // 4]
    torch.testing.assert_close(made, expected)
    expected.square().sum().backward()
    for name, parameter in generator.network.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found.pop(name), parameter.grad, msg=name)
    assert not found


def test_activation_checkpointing_keeps_gradients(tiny, kind):
    grads = []
    for again in (False, True):
        generator = make(tiny, kind, streamed=True).requires_grad_(True).train()
        torch.manual_seed(0)
        rouse(generator)
        if again:
            generator.transformer.enable_gradient_checkpointing()
        sigma = torch.full((BATCH, CHUNK), 0.5)
        given = condition(tiny, generator)
        clean, noise, context = latents(tiny, kind, 1), latents(tiny, kind, 2), latents(tiny, kind, 3, 1)
        generator.training_loss(clean, noise, sigma, given, context).error.mean().backward()
        grads.append([p.grad for p in generator.network.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True) if a is not None)


# ---- chunks in blocks ------------------------------------------------------------------------------


def test_one_block_equals_full_attention(tiny):
    generator = make(tiny, "wan")
    given, noisy = condition(tiny, generator), latents(tiny, "wan", 1)
    level = torch.full((BATCH, CHUNK), 700.0)
    past = generator.prefill(latents(tiny, "wan", 3, 1), given)
    plain = generator(noisy, level, given, past)
    torch.testing.assert_close(
        generator(noisy, level, given, past, torch.zeros(CHUNK, dtype=torch.int)), plain
    )
    assert torch.equal(generator(noisy, level, given, past), plain)


def test_blocks_attend_in_one_dtype_under_autocast(tiny, monkeypatch):
    """Norms return fp32 on CUDA; compiled flex attention refuses queries of another dtype than values."""
    dtypes, flex = [], attention._flex

    def noted(query, key, value, *rest):
        dtypes.append({part.dtype for part in (query, key, value)})
        return flex(query, key, value, *rest)

    monkeypatch.setattr(attention, "_flex", noted)
    generator = make(tiny, "wan")
    for block in generator.layers:
        for norm in (block.attn1.norm_q, block.attn1.norm_k):
            norm.register_forward_hook(lambda module, inputs, out: out.float())
    given, noisy = condition(tiny, generator), latents(tiny, "wan", 1)
    past, level = generator.prefill(latents(tiny, "wan", 3, 1), given), torch.full((BATCH, CHUNK), 300.0)
    made = {}
    for kernel in ("flex", "reference"):
        with attention.using(kernel), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            made[kernel] = generator(noisy, level, given, past, torch.tensor([0, 1, 1]))
    assert dtypes == [{torch.bfloat16}] * len(generator.layers)
    torch.testing.assert_close(made["flex"], made["reference"], atol=0.05, rtol=0.05)


def test_blocks_do_not_attend_to_later_ones(tiny):
    generator = make(tiny, "wan")
    given, noisy = condition(tiny, generator), latents(tiny, "wan", 1)
    past, blocks = generator.prefill(latents(tiny, "wan", 3, 1), given), torch.tensor([0, 1, 1])
    level = torch.tensor([[300.0, 800.0, 800.0]]).expand(BATCH, -1)
    first = generator(noisy, level, given, past, blocks)
    changed = noisy.clone()
    changed[:, 2] += 1
    second = generator(changed, level, given, past, blocks)
    assert torch.equal(first[:, :1], second[:, :1])
    assert not torch.allclose(first[:, 1], second[:, 1])


def test_cached_chunk_equals_the_joint_window(tiny):
    """Keys and values of the front chunk are all that the back one needs of it."""
    generator = make(tiny, "wan", streamed=True)
    rouse(generator)
    given, context = condition(tiny, generator), latents(tiny, "wan", 3, 1)
    front, back = latents(tiny, "wan", 1, 2), latents(tiny, "wan", 2, 2)
    levels = torch.tensor([[300.0, 300.0, 900.0, 900.0]]).expand(BATCH, -1)
    joint = generator(
        torch.cat([front, back], dim=1),
        levels,
        given,
        generator.prefill(context, given),
        torch.tensor([0, 0, 1, 1]),
    )
    made, past = generator.prefill_chunk(context, front, levels[:, :2], given)
    assert all(part.shape[0] == BATCH for layer in past.layers for part in layer)
    torch.testing.assert_close(made, joint[:, :2])
    torch.testing.assert_close(generator(back, levels[:, 2:], given, past), joint[:, 2:])


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_training_window_equals_the_sampler(tiny, again):
    """Errors and gradients are those of one pass over the window, also where blocks are computed again."""
    generator = make(tiny, "wan", streamed=True).requires_grad_(True)
    rouse(generator)
    given, context = condition(tiny, generator), latents(tiny, "wan", 3, 1)
    alike = take(given, torch.tensor([0, 0]))
    places, behind = window_places(torch.tensor([[0.7, 0.2]]))
    sigma = generator.sigma_at(places).flatten()[:, None].expand(-1, CHUNK)
    clean, noise = latents(tiny, "wan", 1), latents(tiny, "wan", 2)
    level = generator.path.nearest(sigma)
    noisy = generator.path.add_noise(clean, noise, level)
    joint = generator(
        noisy.flatten(0, 1)[None],
        level.flatten()[None],
        take(given, torch.tensor([0])),
        generator.prefill(context[:1], given),
        torch.tensor([0] * CHUNK + [1] * CHUNK),
    )
    error = (joint.view_as(clean) - generator.path.target(clean, noise, level)).pow(2).mean(dim=2)
    error.mean().backward()
    expected = [p.grad for p in generator.network.parameters()]
    generator.zero_grad()
    if again:
        for layer in generator.layers:
            apply_policy(layer, "recompute", Offload(torch.device("cpu")))
    taught = generator.training_loss(clean, noise, sigma, alike, context, behind.flatten())
    torch.testing.assert_close(taught.error, error)
    taught.error.mean().backward()
    made = [p.grad for p in generator.network.parameters()]
    assert [grad is None for grad in made] == [grad is None for grad in expected]
    for ours, theirs in zip(made, expected, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("kind", ["wan", "wan-causal", "ltx", "cog-i2v"])
def test_branches_are_gathered_and_recomputed_with_their_blocks(tiny, kind):
    """Gradients are those of the whole generator, and a branch runs twice: forward, and once again."""
    generator = make(tiny, kind, streamed=True).requires_grad_(True)
    rouse(generator)
    given = condition(tiny, generator)
    clean, noise, context = latents(tiny, kind, 1), latents(tiny, kind, 2), latents(tiny, kind, 3, 1)
    sigma = torch.tensor([[0.3, 0.6, 0.9], [1.0, 1.0, 1.0]])

    def gradients() -> dict[str, torch.Tensor]:
        generator.training_loss(clean, noise, sigma, given, context).error.mean().backward()
        found = {name: p.grad for name, p in generator.network.named_parameters() if p.grad is not None}
        return {name: distributed.full_tensor(grad).clone() for name, grad in found.items()}

    expected = gradients()
    generator.zero_grad()
    calls, gathered = [], []
    branches = generator.network.stream.branches
    for branch in branches:
        branch.register_forward_hook(lambda *args: calls.append(args))
    config = TrainConfig(precision="fp32")
    mesh = distributed.init(config)
    try:
        stacks, offload = distributed.layer_stacks(generator), Offload(mesh.device)
        assert [len(group) for group in stacks[0]] == [2] * len(branches)
        for layer, _ in stacks[0]:
            apply_policy(layer, "recompute", offload)
        distributed.shard_layers(stacks, mesh, config.precision)
        distributed.fully_shard(generator.network, mesh=mesh.fsdp)
        found = gradients()
        gathered = [p for p in branches.parameters() if not isinstance(p, DTensor)]
    finally:
        distributed.shutdown()
    assert not gathered
    assert len(calls) == 2 * len(branches)
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], msg=name)


def test_step_sigmas_are_where_the_sampler_calls_the_model(tiny, kind):
    """`training_loss` at one of them is at that step's timestep."""
    generator = make(tiny, kind)
    for steps in (1, 2, 5):
        solver = generator.solver(steps)
        called = torch.tensor([solver.timestep(step) for step in range(steps)])
        assert called.isfinite().all()
        levels = generator.path.nearest(torch.tensor([generator.step_sigmas(steps)]))[0]
        assert (levels - called).abs().max() <= 1


def test_solvers_tell_whether_their_steps_add_noise(tiny):
    """`distill` refuses a teacher that does."""
    dpm = {"_class_name": "CogVideoXDPMScheduler", "prediction_type": "v_prediction"}
    euler = {"_class_name": "FlowMatchEulerDiscreteScheduler", "stochastic_sampling": True}
    assert tiny.generator("cog-i2v", scheduling=dpm).solver(3).adds_noise
    assert tiny.generator("wan", scheduling=euler).solver(3).adds_noise
    assert not any(tiny.generator(kind).solver(3).adds_noise for kind in ("cog-i2v", "wan", "ltx"))


@pytest.mark.parametrize("shift", [3.0, 5.0])
def test_training_timesteps_cover_the_sampler(tiny, shift):
    """A chunk's level at an index of the schedule is that of the sampler, up to one timestep."""
    values = tiny.WanGenerator.scheduler_default | {"flow_shift": shift}
    generator = tiny.generator("wan", scheduling=values)
    solver = generator.solver(50)
    places = 1 - torch.arange(50)[None] / 50
    levels = generator.path.nearest(generator.sigma_at(places))[0]
    visited = torch.tensor([solver.timestep(step) for step in range(50)])
    assert (levels - visited).abs().max() <= 3
    half = 1000 * shift * 0.5 / (1 + (shift - 1) * 0.5)
    assert abs(float(levels[25]) - half) <= 2


# ---- Wan with a transformer for high and one for low noise -----------------------------------------


@pytest.mark.parametrize("guidance", [1.0, 4.0], ids=["plain", "guided"])
@pytest.mark.parametrize("streamed", [False, True], ids=["prompt", "stream"])
def test_two_transformers_switch_as_in_the_pipeline(tiny, streamed, guidance):
    generator = tiny.generator("wan", 0, 3, streamed)
    generator.set_second(tiny.transformer("wan", seed=7), 0.8)
    noise, texts = latents(tiny, "wan", 0), (tiny.draw(1, 2, 8, tiny.TEXT), tiny.draw(2, 2, 8, tiny.TEXT))
    ours = tiny.denoise(generator, tiny.conditions(generator, *texts), noise[:, :0], noise, 5, guidance)
    pipeline = WanPipeline(
        None,
        None,
        tiny.vae("wan"),
        tiny.scheduler("wan"),
        tiny.transformer("wan"),
        tiny.transformer("wan", seed=7),
        boundary_ratio=0.8,
    )
    pipeline.set_progress_bar_config(disable=True)
    theirs = pipeline(
        prompt_embeds=texts[0],
        negative_prompt_embeds=texts[1],
        height=32,
        width=32,
        num_frames=9,
        num_inference_steps=5,
        guidance_scale=guidance,
        latents=noise.transpose(1, 2).contiguous(),
        output_type="latent",
    ).frames
    assert torch.equal(ours.transpose(1, 2), theirs)


def test_batch_with_both_transformers(tiny):
    generator = make(tiny, "wan")
    generator.set_second(tiny.transformer("wan", seed=7), 0.8)
    given, noisy, context = condition(tiny, generator), latents(tiny, "wan", 1), latents(tiny, "wan", 3, 1)
    both = generator(
        noisy, torch.tensor([[900.0] * 3, [100.0] * 3]), given, generator.prefill(context, given)
    )
    for row, level in enumerate((900.0, 100.0)):
        one = slice(row, row + 1)
        alone = Condition(tokens=given.tokens[one], text=given.text[one])
        made = generator(noisy[one], torch.full((1, 3), level), alone, generator.prefill(context[one], alone))
        torch.testing.assert_close(made, both[one])
