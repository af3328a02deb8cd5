"""The stage encode with the parts of diffusers: latents of a causal codec and text states."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import precomputed
import pyarrow as pa
import pytest
import torch
from architectures import DECODER, SIGLIP
from safetensors.torch import load
from transformers import PreTrainedTokenizerBase

from worldmodel import media
from worldmodel.config import (
    ActionConfig,
    BackboneConfig,
    CodecConfig,
    ConditionAdapterConfig,
    GeneratorConfig,
    SourceConfig,
    VisionConfig,
    WorldModelConfig,
)
from worldmodel.flow.catalog.clips import COLUMNS, ClipReader
from worldmodel.flow.stages import find_stage
from worldmodel.media.tensors import to_tensor
from worldmodel.models.rounds import RoundEncoder
from worldmodel.models.world_model import WorldModel

TEXTS = ("it goes left", "it vanishes")


@pytest.fixture
def saved(pipeline: Callable[..., Any], tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    """A model folder with the parts of a Wan pipeline."""
    folder, _ = pipeline("wan")
    config = WorldModelConfig(
        codec=CodecConfig(image_size=32, temporal_factor=4, latent_channels=16, pretrained=str(folder)),
        backbone=BackboneConfig(architecture=DECODER | {"model_type": "qwen3"}),
        vision=VisionConfig(architecture=SIGLIP, max_frames=2),
        action=ActionConfig(text={"max_tokens": 64}),
        condition_adapter=ConditionAdapterConfig(
            kind="stream", width=32, num_layers=1, num_heads=2, text=True
        ),
        generator=GeneratorConfig(pretrained=str(folder)),
        queries=8,
        chunk_frames=8,
    )
    torch.manual_seed(0)
    return WorldModel.from_config(config, tokenizer).save_pretrained(tmp_path / "model", dtype=torch.float32)


def test_files_of_the_stage_are_what_training_computes(saved: Path, tmp_path: Path) -> None:
    model = WorldModel.from_pretrained(saved)
    small = np.random.default_rng(0).integers(0, 255, (17, 4, 4, 3), dtype=np.uint8)
    path = tmp_path / "clip.mp4"
    media.write_video(small.repeat(8, axis=1).repeat(8, axis=2), path, 8, scale=1)
    columns = {"video": path.read_bytes(), "actions": list(TEXTS)}
    data = {name: pa.array([columns.get(name)]) for name in ("video", *COLUMNS)}
    settings = {"model": str(saved), "dtype": "float32", "tasks": precomputed.TASKS}
    made = find_stage("encode").make(**settings)(pa.record_batch({"clip": ["0"], **data}))
    (row,) = made.to_pylist()

    frames = to_tensor([media.read_video(path, 32, model.config.fps, 17)])
    with torch.no_grad():
        expected = RoundEncoder.of(model).chunks(frames, precomputed.TASKS)
    found = load(row["latents"])
    assert found.keys() == expected.keys() == {
        "first_context", "first_target", "context", "target", "imagine", "observed"
    }  # fmt: skip
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name][0], rtol=0, atol=1e-5)
    states = load(row["text_states"])
    assert states.keys() == {"text:", *(f"text:{text}" for text in TEXTS)}
    embeds = model.generator.encode_text(TEXTS)
    assert embeds is not None
    for text, embed in zip(TEXTS, embeds, strict=True):
        state = model.generator.pad_text(states[f"text:{text}"])
        assert len(states[f"text:{text}"]) < len(embed)
        torch.testing.assert_close(state, embed, rtol=0, atol=1e-5)

    reader = ClipReader("flow", SourceConfig("flow"), model.config)
    files = {"video": path.read_bytes(), "latents": row["latents"], "text_states": row["text_states"]}
    clip = reader.clip("0", {"actions": list(TEXTS)}, files)
    for task in precomputed.TASKS:
        episode = clip.episode(task, 0, 0, 2)
        assert episode.observations  # the vision encoder reads pixels
        assert episode.encoded
        assert (episode.answer in TEXTS) == (task == "describe")
