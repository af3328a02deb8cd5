"""Vision encoders against the image processors and models of transformers, and their adapters."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from einops import rearrange
from precise import fill_zeros
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedModel, Qwen2VLImageProcessorPil
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from worldmodel.config import ImageSize, VisionConfig, height_width
from worldmodel.errors import ConfigError, ModelError
from worldmodel.models.layers.resampler import Resampler
from worldmodel.models.loading import deferred
from worldmodel.models.vision.adapter import Observation
from worldmodel.models.vision.encoders import EncoderVision, build_encoder
from worldmodel.models.vision.preprocessing import SETTINGS, frames_wanted
from worldmodel.models.vision.qwen_vl import QwenVisionEncoder, fit_size

VIT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": 4,
    "image_size": 16,
}
TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": 40,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "clip": {"model_type": "clip_vision_model", **VIT},
    "siglip": {"model_type": "siglip_vision_model", **VIT},
    "siglip2": {
        "model_type": "siglip2_vision_model",
        "num_patches": 16,
        **{name: x for name, x in VIT.items() if name != "image_size"},
    },
    "dinov2": {"model_type": "dinov2", **VIT},
    "dinov2_with_registers": {"model_type": "dinov2_with_registers", "num_register_tokens": 2, **VIT},
    "dinov3": {"model_type": "dinov3_vit", "num_register_tokens": 2, **VIT},
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl_vision",
        "window_size": 16,
        "fullatt_block_indexes": [1],
        **TOWER,
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl_vision",
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [1],
        **TOWER,
    },
}
VITS = [name for name in ARCHITECTURES if "qwen" not in name]
TOWERS = [name for name in ARCHITECTURES if "qwen" in name]
WIDTH = 24


def config(name: str, **settings: Any) -> VisionConfig:
    return VisionConfig(architecture=ARCHITECTURES[name], **{"max_frames": 4, "pool": 1, **settings})


def vision(name: str, width: int = WIDTH, image_size: ImageSize = 16, **settings: Any) -> EncoderVision:
    torch.manual_seed(0)
    made = EncoderVision.from_config(config(name, **settings), width, image_size=image_size)
    fill_zeros(made.encoder)
    return made


def bytes_of(size: ImageSize, count: int = 1) -> np.ndarray:
    """Smooth images, uint8 `[t, h, w, 3]`."""
    coarse = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, 3, 5, 5)).astype(np.float32))
    fine = torch.nn.functional.interpolate(coarse, size=height_width(size), mode="bilinear")
    return rearrange(fine, "t c h w -> t h w c").round().to(torch.uint8).numpy()


def as_frames(images: np.ndarray) -> Tensor:
    return rearrange(torch.from_numpy(images).float() / 127.5 - 1, "t h w c -> 1 t c h w")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_deferred_loading(name: str, tmp_path: Path) -> None:
    AutoModel.from_config(AutoConfig.for_model(**ARCHITECTURES[name])).save_pretrained(tmp_path)
    whole = build_encoder(VisionConfig(encoder=str(tmp_path)), 16)
    with deferred.loading():
        left = build_encoder(VisionConfig(encoder=str(tmp_path)), 16)
    assert all(parameter.is_meta for parameter in left.parameters())
    deferred.materialize(left, torch.device("cpu"))
    deferred.load_shards(left)
    held = dict(left.named_parameters()) | dict(left.named_buffers())
    for key, tensor in [*whole.named_parameters(), *whole.named_buffers()]:
        assert torch.equal(held.pop(key), tensor), key
    assert not held


# Preprocessing and features

CLIP_SIZES = {"size": {"shortest_edge": 24}, "crop_size": {"height": 16, "width": 16}}
SQUARE = {"size": {"height": 16, "width": 16}}
PROCESSORS = {
    "clip": CLIPImageProcessorPil(**CLIP_SIZES),
    "siglip": SiglipImageProcessorPil(**SQUARE),
    "siglip2": Siglip2ImageProcessorPil(patch_size=4, max_num_patches=16),
    "dinov2": BitImageProcessorPil(
        **CLIP_SIZES, image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_preprocessing_equals_the_image_processor(name: str, tmp_path: Path) -> None:
    processor = PROCESSORS[name]
    AutoModel.from_config(AutoConfig.for_model(**ARCHITECTURES[name])).save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    for size in (64, 24, 16, 10, (36, 64), (64, 36), (16, 24)):
        encoder, image = build_encoder(VisionConfig(encoder=str(tmp_path)), size), bytes_of(size)
        given = processor(image[0])
        theirs = torch.as_tensor(np.array(given["pixel_values"]))
        ours = encoder.preprocess(as_frames(image))
        if name == "siglip2":
            ours = rearrange(ours, "n c (h y) (w x) -> n (h w) (y x c)", y=4, x=4)
            assert tuple(np.array(given["spatial_shapes"])[0]) == encoder.grid
            theirs = theirs[:, : ours.shape[1]]  # padded behind
        # Theirs are rounded to bytes twice: after rows are resized, and after columns.
        rounding = 1.5 / 255 if height_width(size) != encoder.preprocess.resize else 1e-6
        assert (ours - theirs).abs().max() * min(encoder.preprocess.std) < rounding


@pytest.mark.parametrize("select_layer", [-1, -2, -3])
@pytest.mark.parametrize("name", VITS)
def test_features_are_those_of_the_patches(name: str, select_layer: int) -> None:
    encoder = vision(name, select_layer=select_layer).encoder
    frames = as_frames(bytes_of(16, 3))
    given = {"pixel_values": encoder.preprocess(frames)}
    if name == "siglip2":
        given["pixel_values"] = rearrange(
            given["pixel_values"], "n c (h y) (w x) -> n (h w) (y x c)", y=4, x=4
        )
        given["pixel_attention_mask"] = torch.ones(3, 16, dtype=torch.long)
        given["spatial_shapes"] = torch.tensor([[4, 4]] * 3)
    with torch.no_grad():
        output = encoder.model(**given, output_hidden_states=True)
        features = encoder(frames)
    whole = output.last_hidden_state if select_layer == -1 else output.hidden_states[select_layer]
    before = {"clip": 1, "dinov2": 1, "dinov2_with_registers": 3, "dinov3": 3}.get(name, 0)
    assert features.shape == (1, 3, 16, 32)
    assert torch.equal(features[0], whole[:, before:])


@pytest.mark.parametrize("size", [64, (48, 80)], ids=str)
@pytest.mark.parametrize("name", TOWERS)
def test_qwen_preprocessing_equals_the_image_processor(name: str, size: ImageSize) -> None:
    encoder = vision(name, image_size=16).encoder
    assert isinstance(encoder, QwenVisionEncoder)
    processor = Qwen2VLImageProcessorPil(
        patch_size=4,
        size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
        image_mean=list(encoder.preprocess.mean),
        image_std=list(encoder.preprocess.std),
    )
    image = bytes_of(size)
    given = processor(image[0], return_tensors="pt")
    encoder = vision(name, image_size=size).encoder
    with torch.no_grad():
        theirs = encoder.model(given["pixel_values"], grid_thw=given["image_grid_thw"]).pooler_output
        ours = encoder(as_frames(image))
    assert ours.shape == (1, 1, len(theirs), 40)
    torch.testing.assert_close(ours[0, 0], theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", TOWERS)
def test_qwen_encoder_encodes_pairs_of_frames(name: str) -> None:
    """The patches, through the tower's own kernel, are a strided convolution over the clip."""
    encoder = vision(name, image_size=64).encoder
    seen = []
    encoder.model.patch_embed.register_forward_hook(lambda module, args, output: seen.append(output))
    frames = torch.cat([as_frames(bytes_of(64, 3)), as_frames(bytes_of(64, 3)).flip(4)])
    with torch.no_grad():
        encoder(frames)
        clip = rearrange(torch.cat([frames, frames[:, -1:]], dim=1), "b t c h w -> (b t) c h w")
        pixels = rearrange(encoder.preprocess(clip[None]), "(b t) c h w -> b c t h w", b=2)
        whole = encoder.model.patch_embed.proj(pixels)
    expected = rearrange(whole, "b d u (h i) (w j) -> (b u h w i j) d", i=2, j=2)
    torch.testing.assert_close(seen[0], expected, atol=1e-5, rtol=1e-5)


def test_qwen_encoder_encodes_clips_independently() -> None:
    for name in TOWERS:
        encoder = vision(name, image_size=64).encoder
        frames = torch.cat([as_frames(bytes_of(64, 3)), as_frames(bytes_of(64, 3)).flip(4)])
        with torch.no_grad():
            torch.testing.assert_close(encoder(frames)[1:], encoder(frames[1:]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("size", "side"), [(16, 56), (64, 56), (75, 84), (256, 252), (5000, 980)])
def test_fit_size_is_nearest_to_the_size_of_frames(size: int, side: int) -> None:
    assert fit_size((size, size), 28, 56 * 56, 28 * 28 * 1280) == (side, side)


@pytest.mark.parametrize("frame", [(480, 832), (320, 512), (20, 90), (720, 1280), (5000, 3000), (16, 2048)])
def test_fit_size_equals_smart_resize(frame: tuple[int, int]) -> None:
    for height, width in (frame, frame[::-1]):
        assert fit_size((height, width), 28, 56 * 56, 28 * 28 * 1280) == smart_resize(
            height, width, 28, 56 * 56, 28 * 28 * 1280
        )


# Adapters


def test_frames_wanted_are_evenly_spaced_and_include_the_last() -> None:
    assert frames_wanted(8, 4).tolist() == [1, 3, 5, 7]
    assert frames_wanted(8, 8).tolist() == list(range(8))
    assert frames_wanted(9, 1).tolist() == [8]
    assert frames_wanted(1, 3).tolist() == [0, 0, 0]
    assert frames_wanted(3, 4).tolist() == [0, 1, 2, 2]


@pytest.mark.parametrize("adapter", ["mlp", "resampler"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_number_of_tokens_per_round(name: str, adapter: str) -> None:
    made = vision(name, adapter=adapter, num_tokens=5, pool=2, max_frames=3, image_size=(48, 80))
    for count in (3, 7):
        frames = as_frames(bytes_of((48, 80), count))
        seen = made(Observation(torch.zeros(1, 1, 4, 8, 8), frames))
        assert seen.cells is None
        assert seen.tokens.shape == (1, made.round_tokens, WIDTH)


def test_projection_pools_incomplete_windows() -> None:
    made = vision("siglip2", pool=3, image_size=(16, 48))
    assert made.encoder.grid == (2, 6)
    features = torch.randn(2, 3, 12, 32)
    grid = features.view(2, 3, 2, 6, 32)
    means = [grid[:, :, :, c : c + 3].mean(dim=(2, 3)) for c in (0, 3)]
    pooled = torch.stack(means, dim=2).flatten(1, 2)
    project: Any = made.adapter.read
    expected = project.down(torch.nn.functional.gelu(project.up(pooled)))
    torch.testing.assert_close(project(features, rows=2), expected)


@pytest.mark.parametrize("name", TOWERS)
def test_aligned_features_pass_unchanged_at_first(name: str) -> None:
    made = vision(name, width=40, image_size=64)
    frames = as_frames(bytes_of(64, 4))
    observation = Observation(torch.zeros(1, 1, 4, 8, 8), frames)
    assert torch.equal(made(observation).tokens, made.encoder(frames).flatten(1, 2))
    made(observation).tokens.sum().backward()
    project: Any = made.adapter.read
    assert project.down.weight.grad.any()


def test_initial_scale_of_tokens_is_that_of_word_embeddings() -> None:
    for adapter in ("mlp", "resampler"):
        made = vision("siglip", adapter=adapter, width=64)
        tokens = made(Observation(torch.zeros(1, 1, 4, 2, 2), as_frames(bytes_of(16, 4)))).tokens
        torch.testing.assert_close(
            tokens.norm(dim=-1), torch.full(tokens.shape[:2], 2.0), atol=1e-3, rtol=1e-3
        )


@pytest.mark.parametrize("adapter", ["mlp", "resampler"])
def test_frame_position_starts_at_zero(adapter: str) -> None:
    made = vision("dinov2", adapter=adapter)
    frames = as_frames(bytes_of(16, 1)).expand(-1, 4, -1, -1, -1)
    with torch.no_grad():
        made.adapter.frame_position.normal_()
    observation = Observation(torch.zeros(1, 1, 4, 2, 2), frames)
    made(observation).tokens[..., 0].sum().backward()
    assert made.adapter.frame_position.grad is not None
    assert made.adapter.frame_position.grad.abs().amax(dim=-1).all()


def test_encoder_is_deterministic_in_training() -> None:
    made = vision("dinov3").train()  # in training mode DINOv3 stretches positions at random
    made.encoder.requires_grad_(False)
    observation = Observation(torch.zeros(1, 1, 4, 2, 2), as_frames(bytes_of(16, 4)))
    first = made(observation).tokens
    assert torch.equal(first, made(observation).tokens)
    first.sum().backward()
    assert all(p.grad is None for p in made.encoder.parameters())
    assert all(p.grad is not None for name, p in made.named_parameters() if not name.startswith("encoder."))
    made.encoder.requires_grad_(True)
    made(observation).tokens[..., 0].sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in made.encoder.parameters())


def test_resampler_is_invariant_to_the_order_of_inputs() -> None:
    torch.manual_seed(0)
    resampler = Resampler(12, 32, 20, 6, 2, 4).double()
    inputs = torch.randn(3, 9, 12, dtype=torch.float64)
    tokens = resampler(inputs)
    assert tokens.shape == (3, 6, 20)
    torch.testing.assert_close(tokens, resampler(inputs.flip(1)))
    torch.testing.assert_close(
        tokens[:1], resampler(inputs[:1].repeat(1, 2, 1))
    )  # twice the same says the same
    assert (tokens - resampler(inputs[:, :8])).abs().max() > 1e-3
    tokens.pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in resampler.parameters())


def test_resampler_heads_must_divide_its_width() -> None:
    with pytest.raises(ConfigError, match="divisor"):
        Resampler(12, 32, 20, 6, 2, 5)


# Files


@pytest.mark.parametrize("adapter", ["mlp", "resampler"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_saved_weights_load_bit_equal(name: str, adapter: str, tmp_path: Path) -> None:
    made = vision(name, adapter=adapter, image_size=64)
    with torch.no_grad():
        made.adapter.frame_position.normal_()
    made.save_pretrained(tmp_path / "vision")
    again = EncoderVision.from_config(made.config, WIDTH, tmp_path / "vision", image_size=64)
    assert again.state_dict().keys() == made.state_dict().keys()
    assert all(torch.equal(again.state_dict()[key], x) for key, x in made.state_dict().items())
    observation = Observation(torch.zeros(1, 1, 4, 8, 8), as_frames(bytes_of(64, 4)))
    assert torch.equal(made(observation).tokens, again(observation).tokens)
    AutoModel.from_pretrained(tmp_path / "vision" / "encoder")


WHOLE = {
    "clip": ("clip", "vision_model"),
    "siglip": ("siglip", "vision_model"),
    "siglip2": ("siglip2", "vision_model"),
    "qwen2_5_vl": ("qwen2_5_vl", "visual"),
    "qwen3_vl": ("qwen3_vl", "visual"),
}


def whole_model(name: str) -> PreTrainedModel:
    """A model that also reads, with the encoder of that name inside."""
    text = {
        "hidden_size": 40,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 30,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    torch.manual_seed(1)
    vision_config = {key: x for key, x in ARCHITECTURES[name].items() if key != "model_type"}
    made = AutoConfig.for_model(WHOLE[name][0], text_config=text, vision_config=vision_config)
    return AutoModel.from_config(made).eval()


@pytest.mark.parametrize("name", WHOLE)
def test_only_the_encoder_of_a_multimodal_model_is_loaded(name: str, tmp_path: Path) -> None:
    whole = whole_model(name)
    whole.save_pretrained(tmp_path)
    inside = getattr(whole, WHOLE[name][1])
    encoder = build_encoder(VisionConfig(encoder=str(tmp_path)), 64)
    assert type(encoder.model) is type(inside)
    state = encoder.model.state_dict()
    assert state.keys() == inside.state_dict().keys()
    assert all(torch.equal(state[key], x) for key, x in inside.state_dict().items())
    for (_, ours), (_, theirs) in zip(encoder.model.named_buffers(), inside.named_buffers(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", TOWERS)
def test_settings_of_a_multimodal_processor(name: str, tmp_path: Path) -> None:
    whole_model(name).save_pretrained(tmp_path)
    own = {"image_mean": [0.1, 0.2, 0.3], "size": {"shortest_edge": 64, "longest_edge": 1024}, "resample": 3}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": own}))
    encoder = build_encoder(VisionConfig(encoder=str(tmp_path)), 64)
    assert encoder.preprocess.mean == (0.1, 0.2, 0.3)
    assert encoder.preprocess.crop == (32, 32)
    (tmp_path / SETTINGS).write_text(json.dumps({"min_pixels": 96**2}))
    assert build_encoder(VisionConfig(encoder=str(tmp_path)), 64).preprocess.crop == (96, 96)


# Errors


def test_unsupported_architecture(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'vit'"):
        build_encoder(VisionConfig(architecture={"model_type": "vit"}), 64)
    (tmp_path / "config.json").write_text('{"model_type": ["clip"]}')
    with pytest.raises(ConfigError, match="clip"):
        build_encoder(VisionConfig(encoder=str(tmp_path)), 64)
    with pytest.raises(ConfigError, match=r"vision\.architecture: .*hidden_size"):
        build_encoder(VisionConfig(architecture={"model_type": "dinov2", "hidden_size": "wide"}), 64)


@pytest.mark.parametrize(("name", "layer"), [("clip", -4), ("clip", 1), ("qwen3_vl", -2)])
def test_invalid_select_layer(name: str, layer: int) -> None:
    with pytest.raises(ConfigError, match="select_layer"):
        vision(name, select_layer=layer)


def test_hub_name_requires_a_commit() -> None:
    for revision in (None, "main", "a" * 39):
        with pytest.raises(ModelError, match="siglip-base-patch16-224"):
            build_encoder(VisionConfig(encoder="google/siglip-base-patch16-224", revision=revision), 64)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resample": 1}, "1"),
        ({"size": {"longest_edge": 32}}, "longest_edge"),
    ],
)
def test_unsupported_image_processor(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    vision("siglip").encoder.save_pretrained(tmp_path)
    (tmp_path / SETTINGS).write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=message):
        build_encoder(VisionConfig(encoder=str(tmp_path)), 64)


def test_mismatched_files(tmp_path: Path) -> None:
    made = vision("siglip")
    made.save_pretrained(tmp_path)
    other = dataclasses.replace(made.config, adapter="resampler")
    with pytest.raises(ModelError, match="adapter"):
        EncoderVision.from_config(other, WIDTH, tmp_path)
    with pytest.raises(ModelError, match="adapter"):
        EncoderVision.from_config(made.config, WIDTH + 1, tmp_path)
    (tmp_path / "adapter.safetensors").unlink()
    with pytest.raises(ModelError, match="adapter"):
        EncoderVision.from_config(made.config, WIDTH, tmp_path)
    settings = json.loads((tmp_path / "encoder" / "config.json").read_text())
    (tmp_path / "encoder" / "config.json").write_text(json.dumps({**settings, "hidden_size": 64}))
    with pytest.raises(ModelError, match="encoder"):
        build_encoder(VisionConfig(encoder=str(tmp_path / "encoder")), 64)
