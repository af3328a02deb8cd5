"""Latent cells of four pixels: the codec, the labels of the shapes world, and a whole model."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_config
from transformers import PreTrainedTokenizerBase

from worldmodel import shapes
from worldmodel.config import CodecConfig, WorldModelConfig, build
from worldmodel.data.loader import Batch
from worldmodel.errors import ConfigError
from worldmodel.media.tensors import to_frames, to_tensor
from worldmodel.models.codec.autoencoder import Codec
from worldmodel.models.loading.location import resolve
from worldmodel.models.world_model import WorldModel
from worldmodel.shapes.controls import sample_controls_rollout
from worldmodel.shapes.scene import half_side_of
from worldmodel.shapes.source import LABEL_WORDS, ShapesSource
from worldmodel.train.objectives.alignment import AlignmentObjective
from worldmodel.train.objectives.base import SampleRng, label

SEED = 11
WORDS = [word for words in LABEL_WORDS.values() for word in words]


def small_cells(config: WorldModelConfig) -> WorldModelConfig:
    return replace(
        config,
        codec=replace(config.codec, spatial_factor=4),
        vision=replace(config.vision, merge=4),
        query_merge=2,
    )


@pytest.mark.parametrize("factor", [4, 8])
def test_what_moves_by_a_cell_moves_by_a_cell_of_the_latents(factor: int) -> None:
    torch.manual_seed(SEED)
    config = CodecConfig(
        image_size=64, spatial_factor=factor, latent_channels=4, widths=(8, 16), num_blocks=2
    )
    assert config.grid == (64 // factor, 64 // factor)
    codec = Codec(config)
    codec.set_scale(torch.randn(4), torch.rand(4) + 0.5)
    frames = torch.rand(1, 2, 3, 64, 64) * 2 - 1
    latents = codec.encode(frames)
    assert latents.shape == (1, 1, 4, *config.grid)
    assert codec.decode(latents).shape == frames.shape
    moved = codec.encode(frames.roll(factor, dims=-1))
    inside = slice(3, -3)  # the borders are padded with zeros
    torch.testing.assert_close(
        moved[..., inside, inside], latents.roll(1, dims=-1)[..., inside, inside], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("cell", [4, 8, 32])
def test_labels_are_on_the_cells_whose_centre_an_object_covers(cell: int) -> None:
    named = 0
    for index in range(12):
        sample = shapes.sample_clip("single", SEED, index)
        labels = ShapesSource("single", cell=cell).episode("rounds", SEED, index).labels
        assert labels is not None
        scene, side = sample.clip.before, 64 // cell
        assert labels["words"].shape == (side, side, len(WORDS))
        for row, column in np.ndindex(side, side):
            y, x = (cell * place + (cell - 1) / 2 for place in (row, column))
            near = [
                obj.colour
                for obj in scene.objects
                if max(abs(obj.x - x), abs(obj.y - y)) <= half_side_of(obj)
            ]
            found = {word for word, holds in zip(WORDS, labels["words"][row, column], strict=True) if holds}
            assert found & set(shapes.COLOURS) == set(near)
            assert scene.background in found
        named += int(labels["named"].sum())
    assert named > 0


def test_labels_of_other_cells_are_an_error() -> None:
    episode = ShapesSource("single", cell=8).episode("rounds", SEED, 0)
    batch = Batch(0, "rounds", (0,), [episode])
    values, known = label(batch, "named", (8, 8))
    assert values.shape == (1, 8, 8) and known.tolist() == [True]
    with pytest.raises(ConfigError, match="'named'"):
        label(batch, "named", (16, 16))
    assert label(batch, "other", (16, 16))[1].tolist() == [False]


def test_a_model_with_small_cells_plays_and_is_aligned(tokenizer: PreTrainedTokenizerBase) -> None:
    model = WorldModel.from_config(small_cells(replace(tiny_config(64), world="shapes")), tokenizer)
    assert model.config.codec.grid == (16, 16) and model.config.num_queries == 64
    assert model.vision.round_tokens == 16
    session = model.session(seed=SEED, num_inference_steps=1)
    session.reset(shapes.render(shapes.random_scene(np.random.default_rng(SEED))))
    assert session.step("the red ball moves left").frames.shape == (8, 64, 64, 3)
    indices = (0, 1)
    source = ShapesSource("single", cell=4)
    batch = Batch(0, "rounds", indices, [source.episode("rounds", SEED, index) for index in indices])
    objective = AlignmentObjective(model)
    inputs = objective.prepare(model, batch, SampleRng([(SEED, index) for index in indices]))
    losses = objective(model, inputs)
    assert inputs.counts["words_background"] == 2 * 16 * 16  # every cell has one
    assert all(torch.isfinite(loss) for loss in losses.values())


def test_other_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 or 8"):
        CodecConfig(image_size=64, spatial_factor=16)


def test_the_shipped_codec_keeps_what_is_judged() -> None:
    values = json.loads((resolve("codec-shapes") / "config.json").read_text())
    codec = Codec(build(WorldModelConfig, values["model"]).codec)
    codec.load_state_dict(load_file(resolve("codec-shapes") / "codec" / "model.safetensors"))
    right = 0
    for kind in ("drag", "pan", "zoom", "words"):
        for index in range(6):
            clip = sample_controls_rollout(SEED, index, 1, kind)[0].clip
            frames = to_tensor([clip.frames], torch.device("cpu"))
            with torch.no_grad():
                last = to_frames(codec.decode(codec.encode(frames))[0])[-1]
            right += shapes.judge(last, clip.after).strict
    assert right >= 22
