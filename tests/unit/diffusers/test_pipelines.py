"""Chunks without states equal the output of the unmodified pipelines of diffusers bit for bit."""

import hashlib

import pytest
import torch
from diffusers import (
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    LTXImageToVideoPipeline,
    LTXPipeline,
    WanImageToVideoPipeline,
    WanPipeline,
)
from einops import rearrange
from torch import Tensor

from worldmodel.batch import stack
from worldmodel.models.codec.diffusers import DiffusersCodec
from worldmodel.models.generator.base import KVCache

STEPS, BATCH, TOKENS = 5, 2, 16
EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
DPM = {
    "_class_name": "CogVideoXDPMScheduler",
    "prediction_type": "v_prediction",
    "timestep_spacing": "trailing",
    "rescale_betas_zero_snr": True,
}


@pytest.fixture(params=[False, True], ids=["prompt", "stream"])
def streamed(request) -> bool:
    """Whether there is a state stream: one that has learned nothing yet must change nothing."""
    return request.param


@pytest.fixture(params=[1.0, 4.0], ids=["plain", "guided"])
def guidance(request) -> float:
    return request.param


@pytest.fixture
def texts(tiny) -> tuple[Tensor, Tensor]:
    return tiny.draw(1, BATCH, TOKENS, tiny.TEXT), tiny.draw(2, BATCH, TOKENS, tiny.TEXT)


def native(latents: Tensor) -> Tensor:
    """Ours, `[b t c h w]`, as Wan orders them."""
    return latents.transpose(1, 2).contiguous()


def packed(latents: Tensor) -> Tensor:
    """Ours as LTX orders them."""
    return rearrange(latents, "b t c h w -> b (t h w) c")


def run(pipeline, texts, guidance, **options):
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompt_embeds=texts[0],
        negative_prompt_embeds=texts[1],
        num_inference_steps=STEPS,
        guidance_scale=guidance,
        output_type="latent",
        **options,
    ).frames


@pytest.mark.parametrize("scheduling", [{}, EULER], ids=["unipc", "euler"])
def test_wan_text_to_video(tiny, streamed, guidance, texts, scheduling):
    generator = tiny.generator("wan", 0, streamed=streamed, scheduling=scheduling)
    noise = tiny.draw(0, BATCH, 3, 16, 4, 8)
    ours = tiny.denoise(generator, tiny.conditions(generator, *texts), noise[:, :0], noise, STEPS, guidance)
    pipeline = WanPipeline(
        None, None, tiny.vae("wan"), tiny.scheduler("wan", **scheduling), tiny.transformer("wan")
    )
    theirs = run(pipeline, texts, guidance, height=32, width=64, num_frames=9, latents=native(noise))
    assert torch.equal(native(ours), theirs)


@pytest.mark.parametrize("kind", ["wan", "wan-i2v"], ids=["frames", "channels"])
def test_wan_image_to_video(tiny, streamed, guidance, texts, kind, monkeypatch):
    """The image as a frame at timestep 0 (TI2V), or in added channels."""
    codec = DiffusersCodec(tiny.vae("wan"))
    generator = tiny.generator(kind, 1, streamed=streamed, codec=codec)
    noise, image = tiny.draw(0, 1, 4, 16, 4, 8), tiny.draw(5, 1, 3, 32, 64).clamp(-1, 1)
    texts = [text[:1] for text in texts]  # the pipeline takes one image
    pipeline = WanImageToVideoPipeline(
        None,
        None,
        codec.vae,
        tiny.scheduler("wan"),
        transformer=tiny.transformer(kind),
        expand_timesteps=kind == "wan",
    )
    theirs = run(
        pipeline,
        texts,
        guidance,
        image=(image + 1) / 2,
        height=32,
        width=64,
        num_frames=13,
        latents=native(noise),
    )
    frames = pipeline.video_processor.preprocess((image + 1) / 2)[:, None]
    given = tiny.conditions(generator, *texts)
    with torch.no_grad():
        context = codec.encode(frames)
        grey = codec.encode(torch.zeros(1, 12, 3, 32, 64), before=frames)
    if kind == "wan":
        ours = tiny.denoise(generator, given, context, noise[:, 1:], STEPS, guidance)
        ours = torch.cat([context, ours], dim=1)
    else:
        # As the pipeline does it: the pixels are at hand, and the image's own place is noise like the others.
        added = generator.added_channels(context, grey)
        cache = KVCache(context=context[:, :0], noise=context[:, :0], channels=added)
        monkeypatch.setattr(generator, "prefill", lambda *_: cache)
        ours = tiny.denoise(generator, given, context, noise, STEPS, guidance)
    assert torch.equal(native(ours), theirs)


def ltx_masks(texts):
    """Masks that skip the last places, and texts as `embed_text` gives them: zeros there."""
    masks = [torch.ones(BATCH, TOKENS), torch.ones(BATCH, TOKENS)]
    masks[0][0, 9:], masks[1][1, 5:] = 0, 0
    return masks, [text * mask[..., None] for text, mask in zip(texts, masks, strict=True)]


@pytest.mark.parametrize("context", [0, 1], ids=["text", "image"])
def test_ltx(tiny, streamed, guidance, texts, context):
    generator = tiny.generator("ltx", context, chunk=4 - context, streamed=streamed, fps=25)
    masks, zeroed = ltx_masks(texts)
    clip = tiny.draw(0, BATCH, 4, 8, 4, 8)
    seen, noise = clip[:, :context], clip[:, context:]
    given = tiny.conditions(generator, *zeroed)
    ours = tiny.denoise_at_once(generator, given, seen, noise, STEPS, guidance)
    pipeline = (LTXImageToVideoPipeline if context else LTXPipeline)(
        tiny.scheduler("ltx"), tiny.vae("ltx"), None, None, tiny.transformer("ltx")
    )
    theirs = run(
        pipeline,
        texts,
        guidance,
        prompt_attention_mask=masks[0],
        negative_prompt_attention_mask=masks[1],
        height=32,
        width=64,
        num_frames=13,
        frame_rate=25,
        latents=packed(clip),
        **({"image": torch.zeros(BATCH, 3, 32, 64)} if context else {}),
    )
    assert torch.equal(packed(torch.cat([seen, ours], dim=1)), theirs)


def seeds(noise: Tensor) -> list[torch.Generator]:
    """Generators for the noise that a scheduler adds, as `DiffusersSolver` documents them."""
    rows = [hashlib.blake2b(row.numpy().tobytes(), digest_size=7).digest() for row in noise]
    return [torch.Generator().manual_seed(int.from_bytes(row, "little")) for row in rows]


@pytest.mark.parametrize("scheduling", [{}, DPM], ids=["ddim", "dpm"])
def test_cogvideox_text_to_video(tiny, streamed, guidance, texts, scheduling):
    generator = tiny.generator("cog", 0, streamed=streamed, scheduling=scheduling)
    noise = tiny.draw(0, BATCH, 3, 4, 4, 8)
    given = tiny.conditions(generator, *texts)
    ours = tiny.denoise_at_once(generator, given, noise[:, :0], noise, STEPS, guidance)
    pipeline = CogVideoXPipeline(
        None, None, tiny.vae("cog"), tiny.transformer("cog"), tiny.scheduler("cog", **scheduling)
    )
    theirs = run(
        pipeline, texts, guidance, height=32, width=64, num_frames=9, latents=noise, generator=seeds(noise)
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["cog-i2v", "cog1.5-i2v"])
def test_cogvideox_image_to_video(tiny, streamed, guidance, texts, kind, monkeypatch):
    codec = DiffusersCodec(tiny.vae("cog"))
    generator = tiny.generator(kind, 1, streamed=streamed, codec=codec)
    noise, image = tiny.draw(0, BATCH, 4, 4, 4, 8), tiny.draw(5, BATCH, 3, 32, 64).clamp(-1, 1)
    pipeline = CogVideoXImageToVideoPipeline(
        None, None, codec.vae, tiny.transformer(kind), tiny.scheduler("cog")
    )
    theirs = run(
        pipeline,
        texts,
        guidance,
        image=(image + 1) / 2,
        height=32,
        width=64,
        num_frames=13,
        latents=noise,
        generator=torch.Generator().manual_seed(3),
    )
    pixels = pipeline.video_processor.preprocess((image + 1) / 2)
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():  # the pipeline samples the image's latents, one image after the other
        posteriors = [codec.vae.encode(row[None, :, None]).latent_dist for row in pixels]
        context = native(torch.cat([each.sample(draws) for each in posteriors])) * codec.scale
    added = generator.added_channels(context)
    none = context[:, :0]
    cache = KVCache(context=none, noise=none, channels=added)
    monkeypatch.setattr(generator, "prefill", lambda seen, _: stack([cache] * (len(seen) // BATCH)))
    given = tiny.conditions(generator, *texts)
    ours = tiny.denoise_at_once(generator, given, context, noise, STEPS, guidance)
    assert torch.equal(ours, theirs)
