"""Generator folders: saving, loading by this library and by diffusers, and errors."""

import json
from dataclasses import replace

import diffusers
import pytest
import torch
from torch import nn

from worldmodel.config import (
    CodecConfig,
    ConditionAdapterConfig,
    GeneratorConfig,
    VisionConfig,
    WorldModelConfig,
)
from worldmodel.errors import ConfigError, ModelError
from worldmodel.models.codec.diffusers import DiffusersCodec
from worldmodel.models.conditioning import Condition
from worldmodel.models.generator.diffusers.families import build_generator

CHANNELS = {"wan": 16, "ltx": 8, "cog": 4}
FAMILIES = {"wan": "wan", "wan-i2v": "wan", "wan-clip": "wan", "ltx": "ltx", "cog": "cog", "cog-i2v": "cog"}


def config(tiny, kind: str, condition: str = "stream", text: bool = False, **generator) -> WorldModelConfig:
    """A world model's config around a tiny transformer with random weights, or around `generator`."""
    values = generator or {"architecture": dict(tiny.TRANSFORMERS[kind])}
    return WorldModelConfig(
        codec=CodecConfig(
            image_size=32,
            temporal_factor=4,
            latent_channels=CHANNELS[FAMILIES[kind]],
            architecture=dict(tiny.VAES[FAMILIES[kind]]),
        ),
        vision=VisionConfig(architecture={"model_type": "siglip_vision_model"}),
        condition_adapter=ConditionAdapterConfig(kind=condition, text=text),
        generator=GeneratorConfig(**values),
        queries=4,
        chunk_frames=12,
    )


def predict(tiny, generator, seed: int = 0) -> torch.Tensor:
    """One prediction that needs every weight there is."""
    channels = generator.transformer.config.out_channels
    tokens = tiny.draw(seed, 1, 7, generator.token_width)
    given = Condition(tokens=tokens, text=tiny.draw(seed + 1, 1, 6, tiny.TEXT))
    context, noisy = (tiny.draw(s, 1, n, channels, 4, 4) for s, n in ((2, 1), (3, 3)))
    past = generator.prefill(context, given)
    with torch.no_grad():
        return torch.cat(
            [generator(noisy, torch.full((1, 3), level), given, past) for level in (100.0, 900.0)]
        )


def rouse(generator) -> None:
    for name, parameter in generator.named_parameters():
        if name.endswith("out.weight"):
            nn.init.normal_(parameter, std=0.5)


@pytest.mark.parametrize("kind", ["wan", "wan-i2v", "wan-clip", "ltx", "cog-i2v"])
def test_save_and_load(tiny, tmp_path, kind):
    settings = config(tiny, kind)
    codec = DiffusersCodec.from_config(settings.codec)
    made = build_generator(settings, codec=codec)
    rouse(made)
    if kind == "wan":
        made.set_second(tiny.transformer("wan", seed=7), 0.5)
        rouse(made)
    made.save_pretrained(tmp_path, torch.float32)
    loaded = build_generator(settings, tmp_path, codec)
    assert {*loaded.state_dict()} == {*made.state_dict()}
    assert torch.equal(predict(tiny, loaded), predict(tiny, made))
    theirs = type(made.transformer).from_pretrained(tmp_path)  # the folder is that of a diffusers transformer
    own = made.transformer.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in theirs.state_dict().items())
    scheduler = getattr(diffusers, type(made.scheduler).__name__)
    written, kept = (
        {name: value for name, value in each.config.items() if not name.startswith("_")}
        for each in (scheduler.from_pretrained(tmp_path / "scheduler"), made.scheduler)
    )
    assert written == kept


def test_saved_weights_are_bf16_and_the_model_is_unchanged(tiny, tmp_path):
    made = build_generator(config(tiny, "ltx"))
    rouse(made)
    before = predict(tiny, made)
    made.save_pretrained(tmp_path)
    assert torch.equal(predict(tiny, made), before)
    loaded = build_generator(config(tiny, "ltx"), tmp_path)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, made.state_dict()[name].bfloat16().float()), name


@pytest.mark.parametrize("kind", ["wan", "ltx", "cog"])
@torch.no_grad()
def test_load_pipeline_folder(tiny, pipeline, tmp_path, kind):
    folder, theirs = pipeline(kind)
    settings = config(tiny, kind, "prompt", text=True, pretrained=str(folder))
    made = build_generator(settings)
    codec = DiffusersCodec.from_pretrained(folder)
    own = theirs.vae.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in codec.vae.state_dict().items())
    texts = ["the red ball rolls to the left", ""]
    lengths = {"wan": 512, "ltx": 128, "cog": 16}
    embeds, *more = theirs.encode_prompt(
        texts, do_classifier_free_guidance=False, max_sequence_length=lengths[kind]
    )
    if kind == "ltx":  # padding is skipped by a mask there, by zeros here
        mask = more[0] if more[0].dim() == 2 else more[1]
        embeds = embeds * mask[..., None]
        assert 0 < mask.sum() < mask.numel()
    assert torch.equal(made.encode_text(texts), embeds)
    made.save_pretrained(tmp_path / "generator", torch.float32)
    again = build_generator(settings, tmp_path / "generator")
    assert torch.equal(again.encode_text(texts), embeds)
    assert torch.equal(predict(tiny, again), predict(tiny, made))
    assert all(not parameter.requires_grad for parameter in again.text_encoder.parameters())


def test_transformer_folder_has_the_default_scheduler(tiny, pipeline):
    folder, _ = pipeline("wan")
    settings = config(tiny, "wan", "prompt", pretrained=str(folder / "transformer"))
    assert build_generator(settings).scheduler.config.flow_shift == 3.0
    with pytest.raises(ModelError, match="text_encoder"):
        build_generator(replace(settings, condition_adapter=ConditionAdapterConfig(kind="prompt", text=True)))


def test_load_pipeline_of_two_transformers(tiny, pipeline):
    folder, _ = pipeline("wan", transformer_2=tiny.transformer("wan", seed=7), boundary_ratio=0.9)
    made = build_generator(config(tiny, "wan", pretrained=str(folder)))
    assert made.network_2 is not None
    assert made.boundary_ratio == 0.9
    assert made.network_2.stream is not None


def test_mismatched_folders(tiny, pipeline, tmp_path):
    settings = config(tiny, "wan")
    with pytest.raises(ModelError, match="generator folder"):
        build_generator(settings, tmp_path / "missing")
    folder, _ = pipeline("wan")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "StableDiffusionPipeline"}))
    with pytest.raises(ModelError, match="StableDiffusionPipeline"):
        build_generator(settings, folder)
    (folder / "model_index.json").write_text(json.dumps(index))
    place = folder / "transformer" / "config.json"
    values = json.loads(place.read_text())
    place.write_text(json.dumps(values | {"_class_name": "FluxTransformer2DModel"}))
    with pytest.raises(ModelError, match="FluxTransformer2DModel"):
        build_generator(settings, folder)
    place.write_text(json.dumps(values | {"num_layers": 3}))
    with pytest.raises(ModelError, match=r"config\.json"):
        build_generator(settings, folder)
    place.write_text(json.dumps(values | {"ffn_dim": 64}))
    with pytest.raises(ModelError, match=r"config\.json at 'blocks\.0\.ffn"):
        build_generator(settings, folder)


def test_mismatched_state_cross_attention(tiny, tmp_path):
    settings = config(tiny, "wan")
    made = build_generator(settings)
    made.save_pretrained(tmp_path, torch.float32)
    with pytest.raises(ModelError, match=r"condition_adapter\.kind"):
        build_generator(replace(settings, condition_adapter=ConditionAdapterConfig(kind="prompt")), tmp_path)
    (tmp_path / "stream.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="damaged"):
        build_generator(settings, tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("cog", {}, "image-to-video"),
        ("wan", {"image_dim": 8}, "image_encoder"),
        ("wan-clip", {"image_dim": 8}, "width 8.*width 20"),
        ("wan-clip", {"image_encoder": {"layers": 2, "hidden_size": 7}}, "generator.architecture"),
        ("wan-clip", {"image_encoder": 7}, "cannot be built"),
        ("wan-clip", {"in_channels": 16}, "image_dim"),
        ("wan-clip", {"pos_embed_seq_len": 34}, "pos_embed_seq_len"),
        ("wan", {"patch_size": (2, 2, 2)}, "patch_size"),
        ("wan", {"in_channels": 33}, "takes 36"),
        ("ltx", {"patch_size": 2}, "single latent cells"),
        ("cog-i2v", {"patch_size_t": 3}, "4 latent frames"),
        ("cog-i2v", {"use_learned_positional_embeddings": True, "sample_width": 8}, "learned positions"),
        ("wan", {"num_headz": 2}, "num_headz"),
        ("wan", {"_class_name": "UNet2DModel"}, "use one of WanTransformer3DModel"),
    ],
)
def test_unsupported_transformers(tiny, kind, changes, sentence):
    settings = config(tiny, kind, architecture=tiny.TRANSFORMERS[kind] | changes)
    with pytest.raises(ConfigError, match=sentence):
        build_generator(settings)


@pytest.mark.parametrize(
    ("kind", "values", "sentence"),
    [
        ("wan", {"_class_name": "DDIMScheduler"}, "use one of UniPCMultistepScheduler"),
        ("wan", {"_class_name": "UniPCMultistepScheduler"}, "use_flow_sigmas"),
        ("cog-i2v", {"_class_name": "CogVideoXDDIMScheduler"}, "v_prediction"),
    ],
)
def test_unsupported_schedulers(tiny, kind, values, sentence):
    settings = config(tiny, kind, architecture=dict(tiny.TRANSFORMERS[kind]), scheduler=values)
    with pytest.raises(ModelError, match=sentence):
        build_generator(settings)


def test_text_requires_a_text_encoder(tiny):
    with pytest.raises(ConfigError, match="text encoder"):
        build_generator(config(tiny, "wan", text=True))


def test_unsupported_number_of_steps(tiny):
    with pytest.raises(ConfigError, match="num_inference_steps is 2000"):
        tiny.generator("cog-i2v").solver(2000)


@pytest.mark.parametrize("kind", ["wan", "wan-i2v", "wan-clip", "ltx", "cog-i2v"])
@pytest.mark.parametrize("condition", ["prompt", "stream"])
def test_generator_on_the_meta_device(tiny, kind, condition):
    settings = config(tiny, kind, condition)
    with torch.device("meta"):
        made = build_generator(settings, codec=DiffusersCodec.from_config(settings.codec))
    assert all(parameter.is_meta for parameter in made.parameters())
    assert made.solver(3).num_steps == 3
    assert len(made.layers) == 2
    assert (
        made.width == made.transformer.config.num_attention_heads * made.transformer.config.attention_head_dim
    )


# ---- weights in bf16 -------------------------------------------------------------------------------


def halved(tiny, kind: str) -> WorldModelConfig:
    """The same config with generator and codec in bf16."""
    settings = config(tiny, kind)
    return replace(
        settings,
        generator=replace(settings.generator, dtype="bf16"),
        codec=replace(settings.codec, dtype="bf16"),
    )


@pytest.mark.parametrize("kind", ["wan", "ltx", "cog-i2v"])
def test_bf16_weights(tiny, tmp_path, kind):
    """Loaded weights equal those that diffusers loads, bit for bit, and outputs are close to fp32."""
    full = build_generator(config(tiny, kind))
    rouse(full)
    full.save_pretrained(tmp_path / "full", torch.float32)
    half = build_generator(halved(tiny, kind), tmp_path / "full")
    theirs = type(full.transformer).from_pretrained(tmp_path / "full", torch_dtype=torch.bfloat16)
    own = half.transformer.state_dict()
    for name, tensor in theirs.state_dict().items():
        assert own[name].dtype == tensor.dtype
        assert torch.equal(own[name], tensor), name
    kept = {name for name, tensor in own.items() if tensor.dtype == torch.float32}
    assert bool(kept) == (kind == "wan")
    assert all("norm" in name or "time_embedder" in name or "scale_shift_table" in name for name in kept)
    assert {p.dtype for p in half.network.stream.parameters()} == {torch.bfloat16}
    exact, rounded = predict(tiny, full), predict(tiny, half)
    assert rounded.dtype == exact.dtype
    assert rounded.isfinite().all()
    error = float((rounded - exact).norm() / exact.norm())
    assert 0 < error < 0.02, error  # 0.006 to 0.009 measured, over families and seeds
    half.save_pretrained(tmp_path / "half")
    again = build_generator(halved(tiny, kind), tmp_path / "half")
    for name, tensor in half.state_dict().items():
        assert again.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(again.state_dict()[name], tensor), name
    assert torch.equal(predict(tiny, again), rounded)


@pytest.mark.parametrize("kind", ["wan", "ltx", "cog"])
def test_bf16_codec(tiny, tmp_path, kind):
    torch.manual_seed(0)
    full = DiffusersCodec.from_config(config(tiny, kind).codec)
    full.save_pretrained(tmp_path / "full", torch.float32)
    half = DiffusersCodec.from_config(halved(tiny, kind).codec, tmp_path / "full")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert torch.equal(half.mean, full.mean)
    assert torch.equal(half.scale, full.scale)
    frames = tiny.draw(0, 1, 5, 3, 32, 32).clamp(-1, 1)
    with torch.no_grad():
        latents = full.encode(frames)
        for ours, theirs in ((half.encode(frames), latents), (half.decode(latents), full.decode(latents))):
            assert ours.dtype == torch.float32
            assert float((ours - theirs).norm() / theirs.norm()) < 0.05  # 0.001 to 0.020 measured
    half.save_pretrained(tmp_path / "half")
    again = DiffusersCodec.from_config(halved(tiny, kind).codec, tmp_path / "half")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), half.parameters(), strict=True))


def test_bf16_weights_of_two_transformers(tiny, tmp_path):
    made = build_generator(config(tiny, "wan"))
    made.set_second(tiny.transformer("wan", seed=7), 0.5)
    made.save_pretrained(tmp_path)
    loaded = build_generator(halved(tiny, "wan"), tmp_path)
    assert loaded.network_2.transformer.dtype == torch.bfloat16
    assert {p.dtype for p in loaded.network_2.stream.parameters()} == {torch.bfloat16}
    assert predict(tiny, loaded).dtype == torch.float32


def test_unsupported_dtype(tiny):
    with pytest.raises(ConfigError, match="fp8"):
        build_generator(config(tiny, "wan", architecture=dict(tiny.WAN), dtype="fp8"))
    with pytest.raises(ConfigError, match=r"generator\.dtype .*bf16"):
        GeneratorConfig(dtype="bf16")
    with pytest.raises(ConfigError, match=r"codec\.dtype .*bf16"):
        CodecConfig(dtype="bf16")
