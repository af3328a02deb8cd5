"""Autoencoders of diffusers as codecs: lengths of clips, scales, folders, errors."""

import json

import pytest
import torch
from diffusers import AutoencoderKLWan

from worldmodel.config import CodecConfig
from worldmodel.errors import ConfigError, ModelError
from worldmodel.models.codec.diffusers import DiffusersCodec

SIZE = 32


@pytest.fixture(params=["wan", "ltx", "cog"])
def codec(request, tiny) -> DiffusersCodec:
    return DiffusersCodec(tiny.vae(request.param)).eval().requires_grad_(False)


def frames(tiny, count: int, seed: int = 0) -> torch.Tensor:
    return tiny.draw(seed, 2, count, 3, SIZE, SIZE).clamp(-1, 1)


@pytest.mark.parametrize(("count", "latents"), [(1, 1), (5, 2), (8, 3), (9, 3), (21, 6)])
def test_lengths_of_a_clip(codec, tiny, count, latents):
    z = codec.encode(frames(tiny, count))
    assert z.shape == (2, latents, codec.latent_channels, SIZE // 8, SIZE // 8)
    assert codec.decode(z).shape == (2, 1 + 4 * (latents - 1), 3, SIZE, SIZE)


def test_short_clip_repeats_its_first_frame(codec, tiny):
    clip = frames(tiny, 8)
    assert torch.equal(codec.encode(clip), codec.encode(torch.cat([clip[:, :1], clip], dim=1)))


@pytest.mark.parametrize("seen", [1, 5])
def test_continuation_is_encoded_with_the_frames_before(codec, tiny, seen):
    whole = frames(tiny, seen + 8)
    after = codec.encode(whole[:, seen:], before=whole[:, :seen])
    assert torch.equal(after, codec.encode(whole)[:, -2:])
    context = codec.context(after, whole[:, :seen], 1 + seen // 4)
    decoded = codec.decode(after, context)
    assert decoded.shape == (2, 8, 3, SIZE, SIZE)
    alone = codec.decode(torch.cat([context, after], dim=1))[:, -8:]
    torch.testing.assert_close(decoded, alone, atol=0, rtol=0)


def test_wan_encodes_the_first_frame_as_an_image(tiny):
    codec = DiffusersCodec(tiny.vae("wan"))
    clip = frames(tiny, 9)
    latents = codec.encode(clip)
    torch.testing.assert_close(latents[:, :1], codec.context(latents, clip[:, :1], 1))


def test_latent_scales_equal_the_pipelines(tiny):
    """Standardised latents are those that pipelines denoise (their formulas, written out)."""
    x = frames(tiny, 5)
    pixels = x.transpose(1, 2)
    wan = tiny.vae("wan")
    mean, std = (
        torch.tensor(v).view(1, -1, 1, 1, 1) for v in (wan.config.latents_mean, wan.config.latents_std)
    )
    expected = (wan.encode(pixels).latent_dist.mode() - mean) * (1 / std)
    assert torch.equal(DiffusersCodec(wan).encode(x), expected.transpose(1, 2))
    ltx = tiny.vae("ltx")
    ltx.latents_mean.normal_(generator=torch.Generator().manual_seed(0))
    ltx.latents_std.uniform_(0.5, 2)
    mean, std = (v.view(1, -1, 1, 1, 1) for v in (ltx.latents_mean, ltx.latents_std))
    expected = (ltx.encode(pixels).latent_dist.mode() - mean) / std
    torch.testing.assert_close(DiffusersCodec(ltx).encode(x), expected.transpose(1, 2))
    cog = tiny.vae("cog", scaling_factor=0.7)
    expected = 0.7 * cog.encode(pixels).latent_dist.mode()
    torch.testing.assert_close(DiffusersCodec(cog).encode(x), expected.transpose(1, 2))


def test_decoding_inverts_the_scale(codec, tiny):
    z = tiny.draw(3, 1, 3, codec.latent_channels, 4, 4)
    raw = (z / codec.scale + codec.mean).transpose(1, 2)
    torch.testing.assert_close(codec.decode(z), codec.vae.decode(raw).sample.transpose(1, 2))


def test_denoising_decoder_gets_timestep_zero(tiny):
    vae = tiny.vae("ltx", timestep_conditioning=True)
    z = tiny.draw(3, 2, 2, 8, 4, 4)
    expected = vae.decode(z.transpose(1, 2), torch.zeros(2)).sample
    torch.testing.assert_close(DiffusersCodec(vae).decode(z), expected.transpose(1, 2))


def test_save_and_load(codec, tiny, tmp_path):
    codec.save_pretrained(tmp_path, torch.float32)
    x = frames(tiny, 5)
    assert torch.equal(DiffusersCodec.from_config(CodecConfig(), tmp_path).encode(x), codec.encode(x))
    theirs = type(codec.vae).from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), codec.vae.parameters(), strict=True))


def test_random_weights_from_a_config(tiny):
    config = CodecConfig(
        architecture=tiny.VAES["wan"], image_size=SIZE, temporal_factor=4, latent_channels=16
    )
    codec = DiffusersCodec.from_config(config)
    assert (codec.latent_channels, codec.temporal_factor, codec.spatial_factor) == (16, 4, 8)


def test_codec_errors(tiny, tmp_path):
    with pytest.raises(ModelError, match="codec folder"):
        DiffusersCodec.from_pretrained(tmp_path / "missing")
    with pytest.raises(ConfigError, match="'AutoencoderKL'"):
        DiffusersCodec.from_config(CodecConfig(architecture={"_class_name": "AutoencoderKL"}))
    with pytest.raises(ConfigError, match="basedim"):
        DiffusersCodec.from_config(
            CodecConfig(architecture={"_class_name": "AutoencoderKLWan", "basedim": 3})
        )
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    with pytest.raises(ModelError, match="'AutoencoderKL'"):
        DiffusersCodec.from_pretrained(tmp_path)


def test_damaged_folders(tiny, tmp_path):
    tiny.vae("wan").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"base_dim": 6}))
    with pytest.raises(ModelError, match=tmp_path.name):
        DiffusersCodec.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_res_blocks": 2}))
    with pytest.raises(ModelError, match=r"config\.json"):
        DiffusersCodec.from_pretrained(tmp_path)
    tiny.vae("wan").save_pretrained(tmp_path / "pickled", safe_serialization=False)
    assert AutoencoderKLWan.from_pretrained(tmp_path / "pickled", use_safetensors=False)
    with pytest.raises(ModelError, match="pickled"):
        DiffusersCodec.from_pretrained(tmp_path / "pickled")
