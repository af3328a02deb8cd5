"""World models of other libraries' parts: each trains, saves, loads, plays."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from architectures import DECODER, QWEN_VL, SIGLIP
from denoising import denoise
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerBase

from worldmodel.actions import Action
from worldmodel.config import (
    ActionConfig,
    BackboneConfig,
    CodecConfig,
    ConditionAdapterConfig,
    DataConfig,
    GeneratorConfig,
    ImageSize,
    SourceConfig,
    StageConfig,
    TrainConfig,
    TrainedConfig,
    ValidationConfig,
    VisionConfig,
    WorldModelConfig,
)
from worldmodel.data.loader import Batch
from worldmodel.episodes import Episode
from worldmodel.errors import ConfigError, InputError
from worldmodel.experiments.distillation import DistillationObjective
from worldmodel.media.tensors import to_tensor
from worldmodel.models import lora
from worldmodel.models.world_model import WorldModel
from worldmodel.train import finetune, tokenizer
from worldmodel.train.checkpoint import export
from worldmodel.train.episodes import encode_rounds
from worldmodel.train.objectives.base import SampleRng
from worldmodel.train.objectives.registry import OBJECTIVES
from worldmodel.train.trainer import freeze

SIZE, CHUNK = (16, 32), 8
WORDS = ("it goes left", "everything around explodes and vanishes at once")
BACKBONES = {name: DECODER | {"model_type": name} for name in ("qwen2", "qwen3", "llama", "gemma", "mistral")}
ENCODERS: dict[str, dict[str, Any]] = {
    "latents": {},
    "siglip": SIGLIP,
    "clip": SIGLIP | {"model_type": "clip_vision_model"},
    "dinov2": {name: value for name, value in SIGLIP.items() if name != "intermediate_size"}
    | {"model_type": "dinov2"},
    "qwen2_5_vl": QWEN_VL,
}
GENERATORS = [
    ("wan", "stream"),
    ("wan", "prompt"),
    ("wan-i2v", "prompt"),
    ("ltx", "stream"),
    ("ltx", "prompt"),
]
GENERATORS += [("cog-i2v", "prompt"), ("cog-i2v", "stream"), ("wan-causal", "stream")]
PAIRS = [
    *((backbone, "siglip", *GENERATORS[index]) for index, backbone in enumerate(BACKBONES)),
    *(("qwen3", encoder, "wan", "stream") for encoder in ENCODERS),
    *(("qwen2", "clip", *each) for each in GENERATORS[5:]),
    *(("qwen2", "siglip", "wan-clip", kind) for kind in ("prompt", "stream")),
]

FAST_PAIRS = len(BACKBONES)
"""How many of them are tested in `make test`: every backbone, before another generator each."""


@pytest.mark.parametrize(("generator", "kind"), [("wan", "prompt"), ("ltx", "stream"), ("cog-i2v", "prompt")])
def test_zero_steps_show_the_forecast_without_the_generator(
    make: Callable[..., WorldModel], generator: str, kind: str
) -> None:
    model = make("qwen3", "siglip", generator, kind).eval()
    session = model.session(num_inference_steps=0)
    start = batch_of().episodes[0].observations[0]
    session.reset(start)
    context = session.state.context
    frames = session.step(WORDS[0]).frames
    assert frames.shape == (CHUNK, *SIZE, 3)
    # Before training the forecast is the last frame and a small bias.
    latents = session.state.latents
    assert model.state is not None
    bias = model.state.to_latents.bias.view(latents.shape[1], -1, 1, 1)
    torch.testing.assert_close(latents, context[:, -1:] + bias)


@pytest.fixture
def make(tiny: SimpleNamespace, tokenizer: PreTrainedTokenizerBase) -> Callable[..., WorldModel]:
    """Make a world model of the named parts, with random weights."""

    def make(
        backbone: str,
        encoder: str,
        generator: str,
        kind: str,
        image_size: ImageSize = SIZE,
        wide: bool = False,
        dropout: float = 0.0,
        causal: bool = False,
        **more: Any,
    ) -> WorldModel:
        vae = tiny.VAES[tiny.family(generator)]
        channels = vae.get("z_dim") or vae["latent_channels"]
        transformer = dict(tiny.TRANSFORMERS[generator]) | (tiny.wider(generator) if wide else {})
        # Weights as large as this distinguish sentences, as those of a trained language model do.
        decoder = BACKBONES[backbone] | ({"initializer_range": 0.2} if wide else {})
        config = WorldModelConfig(
            codec=CodecConfig(
                image_size=image_size, temporal_factor=4, latent_channels=channels, architecture=dict(vae)
            ),
            backbone=BackboneConfig(architecture=decoder),
            vision=VisionConfig(architecture=ENCODERS[encoder], max_frames=4, width=32, num_blocks=1),
            action=ActionConfig(text={"max_tokens": 64}, keys=("left", "right")),
            condition_adapter=ConditionAdapterConfig(
                kind=kind, width=32, num_layers=1, num_heads=2, num_tokens=6
            ),
            generator=GeneratorConfig(
                architecture=transformer,
                condition_dropout=dropout,
                causal=causal or generator == "wan-causal",
            ),
            queries=0 if encoder == "latents" else 8,
            chunk_frames=CHUNK,
            **more,
        )
        torch.manual_seed(0)
        return WorldModel.from_config(config, tokenizer)

    return make


def batch_of(size: tuple[int, int] = SIZE) -> Batch:
    """Two clips that begin alike and go two ways, each by its own words."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, 255, (1, *size, 3), dtype=np.uint8)
    return two_ways(first, rng.integers(0, 255, (2, CHUNK, *size, 3), dtype=np.uint8))


def coloured() -> Batch:
    """Two clips of 16 x 16 pixels, each of four colours that stay: as many as its frames have cells."""
    colours = np.random.default_rng(0).integers(0, 255, (3, 1, 2, 2, 3), dtype=np.uint8)
    first, *clips = colours.repeat(8, axis=-3).repeat(8, axis=-2)
    return two_ways(first, np.stack(clips).repeat(CHUNK, axis=1))


def two_ways(first: np.ndarray, clips: np.ndarray) -> Batch:
    """Put two clips behind one first frame."""
    episodes = [
        Episode(words, (first, clip), (Action(text=words),)) for words, clip in zip(WORDS, clips, strict=True)
    ]
    return Batch(step=0, task="rounds", indices=(0, 1), episodes=episodes, self_rollout=False)


@torch.no_grad()
def standardise(model: WorldModel, batch: Batch) -> None:
    """Give an untrained autoencoder what training would: latents of unit variance in which clips differ."""
    vae = model.codec.vae
    last_part = getattr(vae, "quant_conv", None) or vae.encoder
    last = [each for each in last_part.modules() if isinstance(each, torch.nn.Conv3d)][-1]
    for name, parameter in vae.encoder.named_parameters():
        if name.endswith("bias"):  # random ones drown what is in a clip
            parameter.zero_()

    def latents() -> torch.Tensor:
        return encode_rounds(model, batch).target[:, 0].transpose(1, 2)  # [b c t h w]

    last.weight *= 1.4 / (latents()[0] - latents()[1]).std()
    before = latents().mean(dim=(0, 2, 3, 4))
    assert last.bias is not None
    last.bias += 1
    last.bias[: len(before)] -= 1 + before / (latents().mean(dim=(0, 2, 3, 4)) - before)


def loss_of(model: WorldModel, objective: Any, batch: Batch, seed: int = 0) -> torch.Tensor:
    """Return the loss of one step, as the trainer adds it up; all episodes meet the same noise."""
    chance = SampleRng([(seed,)] * len(batch.episodes))
    with torch.no_grad():
        prepared = objective.prepare(model, batch, chance)
    sums = objective(model, prepared)
    terms = [
        objective.weights[name] / prepared.counts[name] * value
        for name, value in sums.items()
        if name in objective.weights and prepared.counts[name]  # some labels are of the shapes world alone
    ]
    return torch.stack(terms).sum()


@pytest.mark.parametrize(
    ("backbone", "encoder", "generator", "kind"),
    [*PAIRS[:FAST_PAIRS], *(pytest.param(*each, marks=pytest.mark.slow) for each in PAIRS[FAST_PAIRS:])],
)
def test_train_save_load_and_roll_out(
    make: Callable[..., WorldModel], tmp_path: Path, backbone: str, encoder: str, generator: str, kind: str
) -> None:
    model = make(backbone, encoder, generator, kind)
    train = {name: TrainedConfig() for name in ("action", "queries", "condition_adapter", "generator")}
    if encoder != "latents":
        train["vision.adapter"] = TrainedConfig()
    freeze(model, StageConfig(objective="generator", train=train, tasks={"rounds": 1.0}))
    objective = OBJECTIVES["generator"](model)
    loss = loss_of(model, objective, batch_of())
    loss.backward()
    assert torch.isfinite(loss)
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    assert all(name.startswith(tuple(train)) and ".image_encoder." not in name for name in moved)
    assert any(name.startswith("generator.") for name in moved)
    if kind == "prompt":  # a stream's output starts at zero, and so what comes before it does not move yet
        assert any(name.startswith("condition_adapter.") for name in moved)

    folder = model.eval().requires_grad_(False).save_pretrained(tmp_path / "model")
    loaded = WorldModel.from_pretrained(folder)
    again = WorldModel.from_pretrained(loaded.save_pretrained(tmp_path / "again"))
    before, once, twice = model.state_dict(), loaded.state_dict(), again.state_dict()
    assert before.keys() == once.keys() == twice.keys()
    for name, tensor in once.items():  # our own parts and the language model are kept in bf16
        assert torch.equal(tensor, before[name]) or torch.equal(tensor, before[name].bfloat16().float()), name
        assert torch.equal(tensor, twice[name]), name
    session, twin = (
        loaded.session(seed=3, num_inference_steps=2),
        again.session(seed=3, num_inference_steps=2),
    )
    image = batch_of().episodes[0].observations[0]
    for each in (session, twin):
        each.reset(image)
    for _ in range(2):
        frames = session.step(WORDS[0]).frames
        assert frames.shape == (CHUNK, *SIZE, 3)
        assert np.array_equal(frames, twin.step(WORDS[0]).frames)
    assert isinstance(session.describe(), str)
    session.infer_action().check(model.config.action)
    fork = session.fork()
    assert np.array_equal(fork.step(WORDS[1]).frames, session.step(WORDS[1]).frames)


@pytest.mark.parametrize(
    ("generator", "kind"),
    [("wan", "stream"), ("wan-clip", "stream"), ("ltx", "prompt"), ("cog-i2v", "stream")],
)
def test_lora_on_bf16_weights(
    make: Callable[..., WorldModel],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    generator: str,
    kind: str,
) -> None:
    config = make("qwen3", "siglip", generator, kind).config
    parts = {
        name: replace(getattr(config, name), dtype="bf16") for name in ("backbone", "generator", "codec")
    }
    torch.manual_seed(0)
    model = WorldModel.from_config(replace(config, **parts), tokenizer)
    train = {"condition_adapter": TrainedConfig(), "generator.network": TrainedConfig(lora_rank=2)}
    lora.add(model, train)
    freeze(model, StageConfig(objective="generator", train=train, tasks={"rounds": 1.0}))
    loss = loss_of(model, OBJECTIVES["generator"](model), batch_of())
    loss.backward()
    assert bool(loss.isfinite())
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    added = [p for name, p in learned.items() if ".lora_" in name]
    assert added and all(p.dtype == torch.float32 for p in added)
    assert any(p.grad is not None and bool(p.grad.any()) for p in added)
    channels = learned["generator.network.channels.project.weight"]  # trained whole: they begin as zeros
    assert channels.dtype == torch.float32 and channels.grad is not None and bool(channels.grad.any())
    assert not any("channels" in name and ".lora_" in name for name in learned)
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in learned.values())
    lora.merge(model)
    folder = model.eval().requires_grad_(False).save_pretrained(tmp_path / "model")
    loaded = WorldModel.from_pretrained(folder)
    held = loaded.state_dict()
    for name, tensor in model.state_dict().items():
        if name.startswith(("backbone.", "generator.", "codec.")):
            assert held[name].dtype == tensor.dtype, name
            assert torch.equal(held[name], tensor), name
    session = loaded.session(num_inference_steps=2)
    session.reset(batch_of().episodes[0].observations[0])
    assert session.step(WORDS[0]).frames.shape == (CHUNK, *SIZE, 3)


def test_single_frames_of_a_causal_codec_are_not_decoded(make: Callable[..., WorldModel]) -> None:
    model = make("qwen3", "siglip", "wan", "stream")
    objective = OBJECTIVES["state"](model)
    objective.weights = {**objective.weights, "forecast_pixel": 0.3}
    with pytest.raises(ConfigError, match="forecast_pixel"):
        objective.prepare(model, batch_of(), SampleRng([(0,), (1,)]))


def test_every_component_is_read_by_its_library(make: Callable[..., WorldModel], tmp_path: Path) -> None:
    folder = make("qwen2", "siglip", "wan", "stream").save_pretrained(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(folder / "backbone")
    AutoModel.from_pretrained(folder / "vision" / "encoder")
    diffusers.WanTransformer3DModel.from_pretrained(folder / "generator")
    diffusers.AutoencoderKLWan.from_pretrained(folder / "codec")
    diffusers.UniPCMultistepScheduler.from_pretrained(folder / "generator" / "scheduler")


@pytest.mark.parametrize(
    ("generator", "kind"),
    [GENERATORS[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in GENERATORS[1:])],
)
def test_fewer_steps_are_learned_from_more(
    make: Callable[..., WorldModel], generator: str, kind: str
) -> None:
    model, batch = make("qwen3", "siglip", generator, kind, num_inference_steps=1), batch_of()
    freeze(model, StageConfig(train={"generator": TrainedConfig()}, tasks={"rounds": 1.0}))
    objective: Any = DistillationObjective(model, teacher_steps=3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    with torch.no_grad():
        taught = objective.teach(model, objective.prepare(model, batch, SampleRng([(0,), (1,)])))
    target, noise, context = (getattr(taught.content, name) for name in ("target", "noise", "context"))
    assert target.shape == noise.shape and not target.isnan().any()

    @torch.no_grad()
    def distance() -> float:
        actions = [episode.actions for episode in batch.episodes]
        condition = model(context, actions, taught.content.frames).condition
        made = denoise(model, condition, context[:, 0], noise[:, 0], num_inference_steps=1)
        return float((made - target[:, 0]).pow(2).mean())

    before = distance()
    for _ in range(12):
        loss = objective(model, taught)["flow"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert distance() < before


@torch.no_grad()
def separates(model: WorldModel, batch: Batch) -> bool:
    """Return whether two words make two clips of one noise, far apart and each nearer to its own."""
    rounds = encode_rounds(model, batch)
    prediction = model(rounds.context, [episode.actions for episode in batch.episodes], rounds.frames)
    noise = torch.randn(1, *model.config.latent_shape, generator=torch.Generator().manual_seed(11))
    context = rounds.context[:, 0]
    made = denoise(model, prediction.condition, context, noise.repeat(2, 1, 1, 1, 1), num_inference_steps=4)
    true = rounds.target[:, 0]
    apart = (true[0] - true[1]).norm()
    margins = [(made[row] - true[1 - row]).norm() - (made[row] - true[row]).norm() for row in range(2)]
    return bool((made[0] - made[1]).norm() > apart / 2 and min(margins) > 0)


@pytest.mark.slow
@pytest.mark.parametrize(("generator", "kind"), [*GENERATORS, ("wan-clip", "stream")])
def test_overfit_two_clips_that_differ_in_text(
    make: Callable[..., WorldModel], generator: str, kind: str
) -> None:
    model, batch = make("qwen3", "siglip", generator, kind, image_size=16, wide=True), coloured()
    standardise(model, batch)
    names = (
        "backbone",
        "vision.adapter",
        "action",
        "queries",
        "state",
        "condition_adapter",
        "generator",
    )
    freeze(model, StageConfig(train={n: TrainedConfig() for n in names}, tasks={"rounds": 1.0}))
    objective = OBJECTIVES["generator"](model)
    moving = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(moving, lr=1e-3, weight_decay=0.0)
    before = float(loss_of(model, objective, batch).detach())
    assert not separates(model, batch)
    for step in range(600):  # every other step behind noise that is met again, the rest behind new noise
        if step % 50 == 0 and step >= 100 and separates(model, batch):
            break
        loss = loss_of(model, objective, batch, step if step % 2 else step % 8)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(moving, 1.0)
        optimizer.step()
    assert float(loss_of(model, objective, batch).detach()) < before / 10
    assert separates(model, batch)


@pytest.mark.parametrize(("generator", "kind"), [("wan", "stream"), ("ltx", "prompt"), ("cog-i2v", "prompt")])
@pytest.mark.parametrize("component", ["generator", "generator.network"])
def test_a_pipeline_of_diffusers_loads_the_lora_of_a_generator(
    make: Callable[..., WorldModel],
    pipeline: Callable[..., tuple[Path, Any]],
    tmp_path: Path,
    generator: str,
    kind: str,
    component: str,
) -> None:
    _, pipe = pipeline(generator.split("-")[0])
    model = make("qwen3", "siglip", generator, kind)
    train = {component: TrainedConfig(lora_rank=3, lora_alpha=12)}
    network = model.generator.network
    network.transformer.load_state_dict(pipe.transformer.state_dict())
    lora.add(model, train)
    torch.manual_seed(1)
    for name, parameter in network.transformer.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.2)
    lora.save(model, train, tmp_path / "adapters")
    lora.merge(model)
    before = {name: tensor.clone() for name, tensor in pipe.transformer.state_dict().items()}
    pipe.load_lora_weights(tmp_path / "adapters" / component)
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    expected = network.transformer.state_dict()
    found = pipe.transformer.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-4)
    moved = [name for name, tensor in found.items() if not torch.equal(tensor, before[name])]
    assert len(moved) > 10


@pytest.mark.parametrize(("generator", "encoder"), [("wan", "siglip"), ("wan", "latents"), ("ltx", "clip")])
def test_start_from_text(make: Callable[..., WorldModel], generator: str, encoder: str) -> None:
    model = make("qwen3", encoder, generator, "prompt", dropout=0.1)
    clip = batch_of().episodes[0].observations[1]
    episode = Episode(WORDS[0], (clip[:0], clip), (Action(text=WORDS[0]),))
    batch = Batch(step=0, task="imagine", indices=(0,), episodes=[episode], self_rollout=False)
    beginning = model.codec.frames_before(model.config.chunk_latents)
    rounds = encode_rounds(model, batch)
    assert rounds.context.shape[2] == 0
    assert torch.equal(rounds.target[:, 0], model.codec.encode(to_tensor([clip[:beginning]])))
    assert rounds.changed.all()
    loss = loss_of(model, OBJECTIVES["generator"](model), batch)
    loss.backward()
    assert torch.isfinite(loss)

    session = model.eval().session(num_inference_steps=2, guidance_scale=2.0)
    begun = session.reset(text=WORDS[0])
    assert begun.shape == (beginning, *SIZE, 3)
    assert session.step(WORDS[1]).frames.shape == (CHUNK, *SIZE, 3)
    assert not np.array_equal(session.reset(text=WORDS[1]), begun)


@pytest.mark.parametrize("generator", ["wan-i2v", "wan-clip", "cog-i2v"])
def test_generator_that_requires_an_image_cannot_start_from_text(
    make: Callable[..., WorldModel], generator: str
) -> None:
    session = make("qwen3", "siglip", generator, "prompt").session(num_inference_steps=2)
    with pytest.raises(InputError, match="image"):
        session.reset(text=WORDS[0])


def windows_of(batch: Batch) -> Batch:
    """Add a second round to every episode: back to its first observation, by another sentence."""
    episodes = []
    for episode in batch.episodes:
        first, clip = episode.observations
        back = Action(text="it goes back")
        episodes.append(
            replace(episode, observations=(first, clip, clip[::-1].copy()), actions=(*episode.actions, back))
        )
    return replace(batch, episodes=episodes)


@pytest.mark.slow
def test_overfit_two_clips_with_overlapping_chunks(make: Callable[..., WorldModel]) -> None:
    model = make("qwen3", "siglip", "wan", "stream", sampler="swin", num_inference_steps=2)
    batch = windows_of(batch_of())
    standardise(model, batch)
    names = (
        "backbone",
        "vision.adapter",
        "action",
        "queries",
        "state",
        "condition_adapter",
        "generator",
    )
    freeze(model, StageConfig(train={n: TrainedConfig() for n in names}, tasks={"rounds": 1.0}))
    objective = OBJECTIVES["generator"](model)
    moving = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(moving, lr=5e-3, weight_decay=0.0)
    losses = []
    for step in range(60):
        loss = loss_of(model, objective, batch, step % 4)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(moving, 1.0)
        assert bool(norm.isfinite())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-4:]) < sum(losses[:4]) / 2


@pytest.mark.parametrize("generator", ["wan-i2v", "ltx", "cog-i2v"])
@pytest.mark.parametrize(
    ("setting", "values"),
    [("sampler: swin", {"sampler": "swin", "num_inference_steps": 2}), ("causal: true", {"causal": True})],
    ids=["overlapping", "causal"],
)
def test_generator_without_levels_per_frame(
    make: Callable[..., WorldModel], generator: str, setting: str, values: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=setting):
        make("qwen3", "siglip", generator, "prompt", **values)


def test_generator_without_image_conditioning(make: Callable[..., WorldModel]) -> None:
    with pytest.raises(ConfigError, match="image"):
        make("qwen3", "siglip", "cog", "prompt")


@pytest.mark.parametrize("objective_name", ["prompt", "prompt_kl"])
@pytest.mark.parametrize(("steps", "share"), [(8, 1.0), pytest.param(100, 0.25, marks=pytest.mark.slow)])
def test_states_align_with_text_features(
    tiny: SimpleNamespace,
    pipeline: Callable[..., tuple[Path, Any]],
    tokenizer: PreTrainedTokenizerBase,
    objective_name: str,
    steps: int,
    share: float,
) -> None:
    folder, _ = pipeline("wan")
    config = WorldModelConfig(
        codec=CodecConfig(image_size=32, temporal_factor=4, latent_channels=16, pretrained=str(folder)),
        backbone=BackboneConfig(architecture=BACKBONES["qwen3"]),
        vision=VisionConfig(architecture=ENCODERS["siglip"], max_frames=2),
        action=ActionConfig(text={"max_tokens": 64}),
        condition_adapter=ConditionAdapterConfig(
            kind="prompt", width=32, num_layers=1, num_heads=2, num_tokens=6
        ),
        generator=GeneratorConfig(pretrained=str(folder)),
        queries=8,
        chunk_frames=CHUNK,
    )
    torch.manual_seed(0)
    model, batch = WorldModel.from_config(config, tokenizer), batch_of(size=(32, 32))
    objective = OBJECTIVES[objective_name](model)
    train = {name: TrainedConfig() for name in ("queries", "condition_adapter", "action")}
    freeze(model, StageConfig(train=train, tasks={"rounds": 1.0}))
    moving = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(moving, lr=5e-3)
    losses = []
    for _ in range(steps):
        loss = loss_of(model, objective, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] * share
    encoder = model.generator.get_submodule("text_encoder")
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


def test_text_alignment_requires_a_text_encoder(make: Callable[..., WorldModel]) -> None:
    with pytest.raises(ConfigError, match=r"generator\.pretrained"):
        OBJECTIVES["prompt"](make("qwen3", "siglip", "wan", "prompt"))
    with pytest.raises(ConfigError, match=r"condition_adapter\.kind"):
        OBJECTIVES["prompt"](make("qwen3", "siglip", "wan", "stream"))


@pytest.mark.slow
@pytest.mark.parametrize(("generator", "sampler"), [("wan", "chunk"), ("wan", "swin"), ("wan-clip", "chunk")])
def test_run_trains_exports_and_rolls_out(
    make: Callable[..., WorldModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    generator: str,
    sampler: str,
) -> None:
    monkeypatch.setattr(tokenizer, "NUM_DOCUMENTS", 400)
    model = make("qwen2", "siglip", generator, "stream", sampler=sampler, num_inference_steps=2).config
    model = replace(model, codec=replace(model.codec, image_size=64))  # the shapes world's
    train = {name: TrainedConfig() for name in ("vision.adapter", "action", "queries", "condition_adapter")}
    train |= {"backbone": TrainedConfig(lora_rank=2), "generator.network": TrainedConfig(lr=1e-4)}
    if sampler == "swin":
        model = replace(model, generator=replace(model.generator, dtype="bf16"))
        train["generator.network"] = TrainedConfig(lora_rank=2)
    stage = StageConfig(
        objective="joint",
        steps=4,
        batch_size=2,
        muon_lr=0.0,
        self_rollout=(0.5, 0.5),
        tasks={"rounds": 0.7, "describe": 0.3},
        train=train,
    )
    config = TrainConfig(
        model=model,
        stages={"joint": stage},
        data=DataConfig({"shapes": SourceConfig("shapes")}),
        run_dir=str(tmp_path / "run"),
        log_every=1,
        validation=ValidationConfig(codec_frames=16),
    )
    made = finetune.train(config)
    session = WorldModel.from_pretrained(made).session(num_inference_steps=2)
    session.reset(np.zeros((64, 64, 3), np.uint8))
    assert session.step("the red ball jumps").frames.shape == (CHUNK, 64, 64, 3)
    checkpoint = sorted((tmp_path / "run" / "checkpoints").glob("0*"))[-1]
    adapters = export.export_adapters(checkpoint, tmp_path / "adapters")
    by_rank = {name for name, how in train.items() if how.lora_rank}
    assert {each.name for each in adapters.iterdir()} == {*by_rank, "trained.safetensors"}
    if sampler == "swin":
        whole = replace(stage, train={"generator.network": TrainedConfig()})
        config = replace(config, stages={"whole": whole}, run_dir=str(tmp_path / "whole"))
        with pytest.raises(ConfigError, match="bf16"):
            finetune.train(config)
