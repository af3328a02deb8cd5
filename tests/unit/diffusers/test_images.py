"""Wan 2.1 image-to-video: CLIP features of the first image, compared with the pipeline of diffusers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor
from transformers import CLIPVisionModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from worldmodel.config import (
    CodecConfig,
    ConditionAdapterConfig,
    GeneratorConfig,
    VisionConfig,
    WorldModelConfig,
)
from worldmodel.errors import ConfigError, InputError, ModelError
from worldmodel.models import lora
from worldmodel.models.codec.diffusers import DiffusersCodec
from worldmodel.models.conditioning import Condition
from worldmodel.models.generator.base import KVCache
from worldmodel.models.generator.diffusers.base import DiffusersGenerator
from worldmodel.models.generator.diffusers.families import build_generator

STEPS, PLACES = 4, 512


def config(tiny: SimpleNamespace, folder: Path, kind: str = "stream") -> WorldModelConfig:
    """A world of 32 x 64 pixels around a pipeline's folder."""
    return WorldModelConfig(
        codec=CodecConfig(
            image_size=(32, 64), temporal_factor=4, latent_channels=16, architecture=dict(tiny.VAES["wan"])
        ),
        vision=VisionConfig(architecture={"model_type": "siglip_vision_model"}),
        condition_adapter=ConditionAdapterConfig(kind=kind),
        generator=GeneratorConfig(pretrained=str(folder)),
        queries=4,
        chunk_frames=12,
    )


def pixels() -> np.ndarray:
    """Pixels of black and white, which two ways of computing in floats bring to the same bits."""
    return np.random.default_rng(0).integers(0, 2, (32, 64, 3), dtype=np.uint8) * 255


def given(tiny: SimpleNamespace, generator: DiffusersGenerator, seed: int = 0) -> Condition:
    return Condition(
        tokens=tiny.draw(seed, 1, 7, generator.token_width), text=tiny.draw(seed + 1, 1, 6, tiny.TEXT)
    )


@pytest.mark.parametrize("kind", ["prompt", "stream"])
@pytest.mark.parametrize("guidance", [1.0, 4.0], ids=["plain", "guided"])
def test_samples_equal_the_pipeline(
    tiny: SimpleNamespace,
    pipeline: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    guidance: float,
) -> None:
    folder, theirs = pipeline("wan-clip")
    theirs.set_progress_bar_config(disable=True)
    codec = DiffusersCodec.from_pretrained(folder)
    generator = build_generator(config(tiny, folder, kind), codec=codec)
    generator.eval().requires_grad_(False)
    noise = tiny.draw(0, 1, 4, 16, 4, 8)
    texts = [tiny.draw(seed, 1, PLACES, tiny.TEXT) for seed in (1, 2)]
    image = PIL.Image.fromarray(pixels())
    made = theirs(
        image=image,
        prompt_embeds=texts[0],
        negative_prompt_embeds=texts[1],
        num_inference_steps=STEPS,
        guidance_scale=guidance,
        height=32,
        width=64,
        num_frames=13,
        latents=noise.transpose(1, 2).contiguous(),
        output_type="latent",
    ).frames
    frames = theirs.video_processor.preprocess(image)[:, None]
    context = codec.encode(frames)
    # As the pipeline does it: the pixels are at hand, and the image's own place is noise like the others.
    monkeypatch.setattr(codec, "decode", lambda latents: frames)
    prefill = generator.prefill

    def as_theirs(context: Tensor, condition: Condition) -> KVCache:
        cache = prefill(context, condition)
        return replace(cache, context=context[:, :0], noise=context[:, :0])

    monkeypatch.setattr(generator, "prefill", as_theirs)
    ours = tiny.denoise(generator, tiny.conditions(generator, *texts), context, noise, STEPS, guidance)
    assert torch.equal(ours.transpose(1, 2), made)


def test_clip_image_is_the_first_known_frame(tiny: SimpleNamespace) -> None:
    """As in the pipeline, where it begins the clip; of later frames their latents speak."""
    codec = DiffusersCodec(tiny.vae("wan-clip"))
    generator = tiny.generator("wan-clip", 2, 2, codec=codec)
    context = tiny.draw(3, 1, 2, 16, *tiny.GRID)
    features = generator.prefill(context, given(tiny, generator)).image_features
    frames = codec.decode(context)
    assert frames.shape[1] == 5
    encoder = generator.image_encoder
    pixels = encoder.preprocess(frames[:, :1].clamp(-1, 1))
    own = encoder.model(pixel_values=pixels, output_hidden_states=True).hidden_states[-2]
    assert features.shape == (1, 1 + 4 * 4, 20)
    assert torch.equal(features, own)
    other = torch.cat([context[:, :1], tiny.draw(4, 1, 1, 16, *tiny.GRID)], dim=1)
    assert torch.equal(generator.prefill(other, given(tiny, generator)).image_features, features)


def test_prediction_depends_on_the_clip_image(tiny: SimpleNamespace) -> None:
    generator = tiny.generator("wan-clip", codec=DiffusersCodec(tiny.vae("wan-clip")))
    said, noisy = given(tiny, generator), tiny.draw(2, 1, 3, 16, *tiny.GRID)
    cache = generator.prefill(tiny.draw(3, 1, 1, 16, *tiny.GRID), said)
    level, flipped = torch.full((1, 3), 500.0), replace(cache, image_features=cache.image_features.flip(2))
    first, other = (generator(noisy, level, said, each) for each in (cache, flipped))
    assert not torch.allclose(first, other)


def test_clip_image_is_required(tiny: SimpleNamespace) -> None:
    generator = tiny.generator("wan-clip", codec=DiffusersCodec(tiny.vae("wan-clip")))
    with pytest.raises(InputError, match="image-to-video"):
        generator.prefill(tiny.draw(3, 1, 0, 16, *tiny.GRID), given(tiny, generator))


def test_text_and_states_share_the_prompt_tokens(tiny: SimpleNamespace) -> None:
    """Its attentions take the last 512 embeddings for text and what is before them for an image."""
    generator = tiny.generator("wan-clip")
    tokens, text = tiny.draw(0, 1, 7, tiny.TEXT), tiny.draw(1, 1, PLACES, tiny.TEXT)
    both = generator.prompt(Condition(tokens=tokens, text=text))
    assert torch.equal(both, torch.cat([text[:, : PLACES - 7], tokens], dim=1))
    alone = generator.prompt(Condition(tokens=tokens))
    assert torch.equal(alone[:, :7], tokens)
    assert alone.shape == (1, PLACES, tiny.TEXT)
    assert not alone[:, 7:].any()
    with pytest.raises(ConfigError, match="513"):
        generator.prompt(Condition(tokens=tiny.draw(0, 1, PLACES + 1, tiny.TEXT)))


def test_image_encoder_is_saved_for_transformers(
    tiny: SimpleNamespace, pipeline: Callable[..., Any], tmp_path: Path
) -> None:
    folder, theirs = pipeline("wan-clip", image_mean=[0.1, 0.2, 0.3])
    settings = config(tiny, folder)
    made = build_generator(settings)
    made.save_pretrained(tmp_path / "made")  # all else in bf16
    again = build_generator(settings, tmp_path / "made").image_encoder
    own = CLIPVisionModel.from_pretrained(tmp_path / "made" / "image_encoder")
    processor = CLIPImageProcessorPil.from_pretrained(tmp_path / "made" / "image_encoder")
    assert again is not None
    assert made.image_encoder is not None
    for name, tensor in theirs.image_encoder.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor), name
        assert torch.equal(own.state_dict()[name], tensor), name
    assert again.preprocess == made.image_encoder.preprocess
    assert again.preprocess.mean == tuple(processor.image_mean) == (0.1, 0.2, 0.3)


def test_lora_excludes_the_image_encoder(tiny: SimpleNamespace) -> None:
    names = lora._linear(tiny.generator("wan-clip"))
    assert any("add_k_proj" in name for name in names)
    assert not any("image_encoder" in name for name in names)


def test_state_cross_attention_excludes_image_attention(tiny: SimpleNamespace) -> None:
    stream = tiny.generator("wan-clip", streamed=True).network.stream
    assert not any("add" in name for name in stream.state_dict())


def test_folder_without_its_image_encoder(
    tiny: SimpleNamespace, pipeline: Callable[..., Any], tmp_path: Path
) -> None:
    folder, _ = pipeline("wan-clip")
    settings = config(tiny, folder)
    place = folder / "image_encoder" / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"model_type": "siglip_vision_model"}))
    with pytest.raises(ModelError, match="clip_vision_model"):
        build_generator(settings)
    (folder / "image_encoder").rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="image_encoder"):
        build_generator(settings)
