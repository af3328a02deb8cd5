"""States as channels: a second patch embedding beside the one of a pretrained transformer."""

from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor

from worldmodel.models.codec.diffusers import DiffusersCodec
from worldmodel.models.conditioning import Condition
from worldmodel.models.generator.diffusers.state_channels import as_channels

KINDS = ["wan", "wan-causal", "wan-i2v", "wan-clip", "ltx", "cog-i2v", "cog1.5-i2v"]
BATCH, CHUNK, FEATURES = 2, 3, 2
EMBEDDINGS = {"wan": "patch_embedding", "ltx": "proj_in", "cog": "patch_embed.proj"}


def setting(tiny: Any, kind: str, streamed: bool = False) -> tuple[Any, dict[str, Tensor], Condition]:
    """A generator that reads states, the latents of a clip, and a condition with a state."""
    codec = DiffusersCodec(tiny.vae(kind))
    channels = codec.latent_channels
    generator = tiny.generator(kind, 1, CHUNK, streamed, codec=codec, state_channels=channels + FEATURES)
    given = {
        name: tiny.draw(seed, BATCH, count, channels, *tiny.GRID)
        for seed, (name, count) in enumerate({"context": 1, "latents": CHUNK, "forecast": CHUNK}.items())
    }
    condition = Condition(
        tokens=tiny.draw(7, BATCH, 7, generator.token_width),
        text=tiny.draw(8, BATCH, 6, tiny.TEXT),
        cells=tiny.draw(9, BATCH, tiny.GRID[0] * tiny.GRID[1], CHUNK * FEATURES),
        forecast=given["forecast"],
    )
    return generator, given, condition


@torch.no_grad()
def predict(generator: Any, given: dict[str, Tensor], condition: Condition) -> Tensor:
    timestep = torch.full((BATCH, CHUNK), 500.0)
    return generator(given["latents"], timestep, condition, generator.prefill(given["context"], condition))


def rouse(generator: Any) -> Tensor:
    """Draw the weights of the channels, which are zero at first."""
    torch.manual_seed(5)
    return torch.nn.init.normal_(generator.network.channels.project.weight, std=0.3)


@pytest.mark.parametrize("streamed", [False, True], ids=["prompt", "stream"])
@pytest.mark.parametrize("kind", KINDS)
def test_at_first_and_without_a_state_nothing_changes(tiny: Any, kind: str, streamed: bool) -> None:
    generator, given, condition = setting(tiny, kind, streamed)
    plain = tiny.generator(kind, 1, CHUNK, streamed, codec=DiffusersCodec(tiny.vae(kind)))
    plain.load_state_dict(generator.state_dict(), strict=False)
    expected = predict(plain, given, condition)
    assert torch.equal(predict(generator, given, condition), expected)
    rouse(generator)
    assert not torch.allclose(predict(generator, given, condition), expected)
    nothing = Condition(
        tokens=condition.tokens,
        text=condition.text,
        cells=torch.zeros_like(condition.cells),
        forecast=torch.zeros_like(condition.forecast),
    )
    assert torch.equal(predict(generator, given, nothing), expected)


@pytest.mark.parametrize("kind", ["wan", "wan-i2v", "ltx", "cog-i2v", "cog1.5-i2v"])
def test_channels_are_those_of_a_transformer_with_a_wider_input(tiny: Any, kind: str) -> None:
    """The same function as a patch embedding that reads latents and state together."""
    generator, given, condition = setting(tiny, kind)
    weight, transformer = rouse(generator), generator.transformer
    calls: list[dict[str, Any]] = []
    handle = transformer.register_forward_pre_hook(
        lambda module, args, inputs: calls.append(inputs), with_kwargs=True
    )
    made: list[Tensor] = []
    output = transformer.register_forward_hook(lambda module, args, result: made.append(result[0]))
    predict(generator, given, condition)
    handle.remove()
    output.remove()

    name = EMBEDDINGS[tiny.family(kind)]
    own = transformer.get_submodule(name)
    extra = generator.state_channels
    wide = tiny.transformer(kind, in_channels=transformer.config.in_channels + extra)
    weights = dict(transformer.state_dict())
    frames, rows, columns = generator.network.channels.patch
    parts = {"f": frames, "p": rows, "q": columns}
    if isinstance(own, torch.nn.Conv3d):
        added = rearrange(weight, "d (f p q k) -> d k f p q", **parts)
    elif isinstance(own, torch.nn.Conv2d):
        added = rearrange(weight, "d (f p q k) -> d (f k) p q", **parts)
    else:  # each input of the linear layer is a channel, then frames, rows and columns of its patch
        added = rearrange(weight, "d (f p q k) -> d (k f p q)", **parts)
    weights[f"{name}.weight"] = torch.cat([own.weight, added], dim=1)
    wide.load_state_dict(weights)
    (inputs,) = calls
    if kind == "wan":  # ours modulates frames; a plain call takes the timestep of every token
        cells = tiny.GRID[0] * tiny.GRID[1] // 4
        level = inputs["timestep"].unflatten(0, (len(inputs["hidden_states"]), -1))
        inputs["timestep"] = level.repeat_interleave(cells, dim=1)
    state = as_channels(1 + CHUNK, condition.forecast, condition.cells)
    # The order in which each family's transformer takes latents, and where their channels are.
    layout, dim = {
        "wan": ("b t k h w -> b k t h w", 1),
        "ltx": ("b t k h w -> b (t h w) k", 2),
        "cog": ("b t k h w -> b t k h w", 2),
    }[tiny.family(kind)]
    together = torch.cat([inputs["hidden_states"], rearrange(state, layout)], dim=dim)
    with torch.no_grad():
        expected = wide(**inputs | {"hidden_states": together})[0]
    torch.testing.assert_close(made[0], expected, atol=2e-5, rtol=1e-4)


def test_features_are_on_the_cells_that_they_are_about(tiny: Any) -> None:
    forecast = torch.zeros(1, CHUNK, 4, 2, 3)
    cells = torch.zeros(1, 6, CHUNK, FEATURES)
    cells[0, 4, 1, 1] = 1  # row 1, column 1, the second frame, the second feature
    made = as_channels(CHUNK + 2, forecast, cells.flatten(2))
    assert made.shape == (1, CHUNK + 2, 4 + FEATURES, 2, 3)
    assert made.nonzero().tolist() == [[0, 3, 5, 1, 1]]


@pytest.mark.parametrize("kind", ["wan", "ltx", "cog-i2v"])
def test_state_and_channels_learn_from_the_generators_loss(tiny: Any, kind: str) -> None:
    generator, given, condition = setting(tiny, kind)
    generator.requires_grad_(True)
    condition.cells.requires_grad_(True)
    for awake in (False, True):
        if awake:
            with torch.no_grad():
                rouse(generator)
        generator.zero_grad()
        condition.cells.grad = None
        sigma = torch.full((BATCH, CHUNK), 0.6)
        noise = torch.randn_like(given["latents"])
        loss = generator.training_loss(given["latents"], noise, sigma, condition, given["context"])
        loss.error.mean().backward()
        assert generator.network.channels.project.weight.grad.any()
        assert bool(condition.cells.grad.any()) == awake


def test_both_transformers_of_wan_read_the_state(tiny: Any) -> None:
    generator, given, condition = setting(tiny, "wan")
    generator.set_second(tiny.transformer("wan", seed=1), 0.5)

    def made(level: float) -> Tensor:
        past = generator.prefill(given["context"], condition)
        with torch.no_grad():
            return generator(given["latents"], torch.full((BATCH, CHUNK), level), condition, past)

    before = [made(level) for level in (900.0, 100.0)]
    for network in generator.networks:
        torch.nn.init.normal_(network.channels.project.weight, std=0.3)
    after = [made(level) for level in (900.0, 100.0)]
    assert not torch.allclose(before[0], after[0])
    assert not torch.allclose(before[1], after[1])
