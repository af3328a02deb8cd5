"""Tiny video models of diffusers: the real classes, with random weights."""

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import TEXT, WAN, WAN_VAE
from torch import Tensor

pytest.importorskip("diffusers", reason="diffusers is not installed: openworldmodel[diffusers]")

import diffusers
from transformers import PreTrainedTokenizerBase, T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from worldmodel.batch import stack
from worldmodel.diffusion.sampler import Chunk, Denoiser
from worldmodel.models.codec.autoencoder import VideoCodec
from worldmodel.models.conditioning import Condition
from worldmodel.models.generator.diffusers import clip_encoder
from worldmodel.models.generator.diffusers.base import Clip, DiffusersGenerator
from worldmodel.models.generator.diffusers.cogvideox import CogVideoXGenerator
from worldmodel.models.generator.diffusers.ltx import LTXGenerator
from worldmodel.models.generator.diffusers.wan import WanGenerator
from worldmodel.models.vision.vit import PatchEncoder

LTX: dict[str, Any] = {
    "_class_name": "LTXVideoTransformer3DModel",
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "cross_attention_dim": 24,
    "num_layers": 2,
    "caption_channels": TEXT,
}
COG: dict[str, Any] = {
    "_class_name": "CogVideoXTransformer3DModel",
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": TEXT,
    "num_layers": 2,
    "sample_width": 10,
    "sample_height": 6,
    "sample_frames": 9,
    "max_text_seq_length": 16,
}
CLIP: dict[str, Any] = {
    "hidden_size": 20,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "wan": WAN,
    "wan-causal": WAN,
    "wan-i2v": WAN | {"in_channels": 36},
    "wan-clip": WAN | {"in_channels": 36, "image_dim": 20, "added_kv_proj_dim": 24, "image_encoder": CLIP},
    "ltx": LTX,
    "cog": COG,
    "cog-i2v": COG | {"in_channels": 8, "use_rotary_positional_embeddings": True},
    "cog1.5-i2v": COG
    | {"in_channels": 8, "use_rotary_positional_embeddings": True, "patch_size_t": 2, "ofs_embed_dim": 8},
}
VAES: dict[str, dict[str, Any]] = {
    "wan": WAN_VAE,
    "ltx": {
        "_class_name": "AutoencoderKLLTXVideo",
        "latent_channels": 8,
        "block_out_channels": (8, 8, 8, 8),
        "decoder_block_out_channels": (8, 8, 8, 8),
        "layers_per_block": (1, 1, 1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1, 1),
        "spatio_temporal_scaling": (True, True, False, False),
        "decoder_spatio_temporal_scaling": (True, True, False, False),
        "decoder_inject_noise": (False,) * 5,
        "patch_size": 2,
    },
    "cog": {
        "_class_name": "AutoencoderKLCogVideoX",
        "block_out_channels": (8, 8, 8, 8),
        "latent_channels": 4,
        "layers_per_block": 1,
        "norm_num_groups": 2,
    },
}
ORIGINAL_NAMES = [
    (r"condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
    (r"condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
    (r"condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
    (r"condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
    (r"condition_embedder\.time_proj", "time_projection.1"),
    (r"^scale_shift_table", "head.modulation"),
    (r"^proj_out", "head.head"),
    (r"\.scale_shift_table", ".modulation"),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_out\.0\.", ".o."),
    (r"\.to_([qkv])\.", r".\1."),
    (r"\.ffn\.net\.0\.proj", ".ffn.0"),
    (r"\.ffn\.net\.2", ".ffn.2"),
    (r"\.norm2\.", ".norm3."),
]
"""Patterns of names in diffusers, and what stands there in Wan's repository (`wan/modules/model.py`)."""
FACTORS = {"wan": (4, 8), "ltx": (4, 8), "cog": (4, 8)}
"""Of time and space."""
CLASSES = {"wan": WanGenerator, "ltx": LTXGenerator, "cog": CogVideoXGenerator}
GRID = (4, 8)
"""Rows and columns of latent cells."""


def wider(kind: str) -> dict[str, Any]:
    """Return what makes a transformer wide enough to see through noise."""
    heads = {"num_attention_heads": 4, "attention_head_dim": 16 if family(kind) == "cog" else 24}
    image = {"added_kv_proj_dim": 96} if kind == "wan-clip" else {}
    rest = {"wan": {"ffn_dim": 192} | image, "ltx": {"cross_attention_dim": 96}, "cog": {}}
    return heads | rest[family(kind)]


def build(arguments: dict[str, Any], seed: int = 0, **more: Any) -> Any:
    """Make a model of diffusers from its arguments."""
    arguments = arguments | more
    torch.manual_seed(seed)
    return getattr(diffusers, arguments.pop("_class_name"))(**arguments).eval()


def transformer(kind: str, **more: Any) -> Any:
    """Make a transformer of one of the kinds of `TRANSFORMERS`."""
    return build({name: x for name, x in TRANSFORMERS[kind].items() if name != "image_encoder"}, **more)


def original_names(transformer: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return the weights of a transformer in the names of Wan's repository."""
    made = {}
    for name, weight in transformer.state_dict().items():
        for pattern, there in ORIGINAL_NAMES:
            name = re.sub(pattern, there, name)
        made[prefix + name] = weight
    return made


def image_encoder(kind: str) -> PatchEncoder | None:
    """Make the image encoder of a kind that reads one."""
    torch.manual_seed(2)
    described = TRANSFORMERS[kind].get("image_encoder")
    frame = tuple(side * FACTORS[family(kind)][1] for side in GRID)
    return described and clip_encoder.describe(described, frame)


def vae(kind: str, **more: Any) -> Any:
    """Make the autoencoder that goes with a kind of transformer."""
    return build(VAES[family(kind)], 1, **more)


def family(kind: str) -> str:
    """Return the family of a kind."""
    return kind.split("-")[0].removesuffix("1.5")


def scheduler(kind: str, **values: Any) -> Any:
    """Make the scheduler of a kind, or the one that `values` describe."""
    return CLASSES[family(kind)].read_scheduler(values)


def generator(
    kind: str,
    context: int = 1,
    chunk: int = 3,
    streamed: bool = False,
    codec: VideoCodec | None = None,
    scheduling: dict[str, Any] | None = None,
    fps: int = 16,
    state_channels: int = 0,
) -> DiffusersGenerator:
    """Make a generator around `transformer(kind)`."""
    time, space = FACTORS[family(kind)]
    clip = Clip(context, chunk, GRID, temporal_factor=time, spatial_factor=space, fps=fps)
    made = CLASSES[family(kind)](
        transformer(kind),
        scheduler(kind, **(scheduling or {})),
        clip,
        streamed,
        codec=codec,
        image_encoder=image_encoder(kind),
        state_channels=state_channels,
    )
    made.causal = kind == "wan-causal"
    return made.eval().requires_grad_(False)


def draw(seed: int, *shape: int) -> Tensor:
    """Draw normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def conditions(generator: DiffusersGenerator, *texts: Tensor) -> list[Condition]:
    """Return texts as conditions; with a stream there are states beside them."""
    if generator.network.stream is None:
        return [Condition(tokens=text[:, :0], text=text) for text in texts]
    states = [draw(seed, len(text), 7, generator.token_width) for seed, text in enumerate(texts)]
    return [Condition(tokens=each, text=text) for each, text in zip(states, texts, strict=True)]


def denoise(
    generator: DiffusersGenerator,
    conditions: Sequence[Condition],
    context: Tensor,
    noise: Tensor,
    num_inference_steps: int,
    guidance_scale: float,
) -> Tensor:
    """Denoise a chunk as a world model does; the last condition is the null one."""
    used = (conditions[0],) if guidance_scale == 1 else (conditions[0], conditions[-1])
    chunk = Chunk(noise, generator.solver(num_inference_steps), used, context, guidance_scale)
    denoiser = Denoiser(generator)
    with torch.no_grad():
        while not chunk.finished:
            denoiser.step([chunk])
    return chunk.latents


def denoise_at_once(
    generator: DiffusersGenerator,
    given: Sequence[Condition],
    context: Tensor,
    noise: Tensor,
    num_inference_steps: int,
    guidance_scale: float,
) -> Tensor:
    """Denoise with the null condition and the true one in one batch, as some pipelines do.

    A matrix product on a CPU may round differently in a larger batch, so that bits can only be compared
    between loops that batch alike.
    """
    if guidance_scale == 1:
        return denoise(generator, given, context, noise, num_inference_steps, guidance_scale)
    both = stack([given[1], given[0]])
    solver, latents = generator.solver(num_inference_steps), noise
    with torch.no_grad():
        past = generator.prefill(torch.cat([context, context]), both)
        for step in range(solver.num_steps):
            level = noise.new_full((2 * len(noise), noise.shape[1]), solver.timestep(step))
            empty, full = generator(torch.cat([latents, latents]), level, both, past).chunk(2)
            latents = solver.step(step, empty + guidance_scale * (full - empty), latents)
    return latents


@pytest.fixture(scope="session")
def tiny() -> SimpleNamespace:
    """Makers of tiny models, and what tests do with them."""
    return SimpleNamespace(**{name: value for name, value in globals().items() if not name.startswith("_")})


@pytest.fixture
def pipeline(tiny: SimpleNamespace, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Callable[..., Any]:
    """Write a whole pipeline's folder, as one would fetch it."""

    def write(kind: str, **more: Any) -> tuple[Path, diffusers.DiffusionPipeline]:
        torch.manual_seed(3)
        sizes = {"d_model": tiny.TEXT, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        sizes |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        if kind == "wan":
            encoder = UMT5EncoderModel(UMT5Config(**sizes)).eval()
            args = (tokenizer, encoder, tiny.vae(kind), tiny.scheduler(kind), tiny.transformer(kind))
            made = diffusers.WanPipeline(*args, **more)
        elif kind == "wan-clip":
            made = diffusers.WanImageToVideoPipeline(
                tokenizer,
                UMT5EncoderModel(UMT5Config(**sizes)).eval(),
                tiny.vae(kind),
                tiny.scheduler(kind),
                CLIPImageProcessorPil(
                    size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, **more
                ),
                tiny.image_encoder(kind).model,
                tiny.transformer(kind),
            )
        else:
            encoder = T5EncoderModel(T5Config(**sizes)).eval()
            made = (diffusers.LTXPipeline if kind == "ltx" else diffusers.CogVideoXPipeline)(
                scheduler=tiny.scheduler(kind),
                vae=tiny.vae(kind),
                text_encoder=encoder,
                tokenizer=tokenizer,
                transformer=tiny.transformer("ltx" if kind == "ltx" else "cog-i2v"),
            )
        made.save_pretrained(tmp_path / "pipeline")
        return tmp_path / "pipeline", made

    return write


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the seconds of every step of the presets, as a table."""
    rows: dict[str, dict[str, float]] = {}
    for report in itertools.chain(*map(terminalreporter.getreports, ("passed", "failed"))):
        rows |= dict(value for name, value in report.user_properties if name == "steps")
    if rows:
        names = list(dict.fromkeys(itertools.chain(*rows.values())))
        terminalreporter.section("seconds of each step of the presets")
        for line in (["preset", *names], ["---", *["---:"] * len(names)]):
            terminalreporter.line(f"| {' | '.join(line)} |")
        for preset, seconds in rows.items():
            terminalreporter.line(
                f"| {' | '.join([preset, *(str(seconds.get(each, '')) for each in names)])} |"
            )
