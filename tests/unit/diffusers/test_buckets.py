"""Training in buckets with generators of diffusers, and vision encoders whose features follow the size."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bucketed
import numpy as np
import pytest
import torch
from architectures import DECODER, QWEN_VL, SIGLIP
from transformers import PreTrainedTokenizerBase

from worldmodel.config import (
    ActionConfig,
    BackboneConfig,
    CodecConfig,
    ConditionAdapterConfig,
    GeneratorConfig,
    StageConfig,
    TrainConfig,
    TrainedConfig,
    ValidationConfig,
    VisionConfig,
    WorldModelConfig,
)
from worldmodel.errors import ConfigError
from worldmodel.models.world_model import WorldModel
from worldmodel.train import finetune

Make = Callable[..., WorldModelConfig]


@pytest.fixture
def make(tiny: SimpleNamespace) -> Make:
    """Make the config of a model with a generator of diffusers."""

    def make(
        kind: str, adapter: Any, encoder: dict[str, Any] | None = None, queries: int = 0
    ) -> WorldModelConfig:
        vae = tiny.VAES[tiny.family(kind)]
        return WorldModelConfig(
            codec=CodecConfig(
                image_size=64,
                temporal_factor=4,
                latent_channels=vae.get("z_dim") or vae["latent_channels"],
                architecture=json.loads(json.dumps(vae)),
            ),
            backbone=BackboneConfig(architecture=DECODER),
            vision=VisionConfig(architecture=encoder or {}, max_frames=4, width=32, num_blocks=1),
            action=ActionConfig(text={"max_tokens": 64}),
            condition_adapter=ConditionAdapterConfig(
                kind=adapter, width=32, num_layers=1, num_heads=2, num_tokens=6
            ),
            generator=GeneratorConfig(architecture=tiny.TRANSFORMERS[kind]),
            queries=queries,
            chunk_frames=8,
            context_latents=2,
            num_inference_steps=2,
        )

    return make


CASES = [
    ("wan", "stream", None, 0),
    pytest.param("wan", "stream", QWEN_VL, 0, marks=pytest.mark.slow),
    pytest.param("wan-clip", "prompt", SIGLIP, 8, marks=pytest.mark.slow),
    pytest.param("ltx", "prompt", QWEN_VL, 8, marks=pytest.mark.slow),
    pytest.param("cog-i2v", "stream", SIGLIP, 8, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "adapter", "encoder", "queries"), CASES)
def test_a_resized_model_is_one_built_for_the_size(
    make: Make, tokenizer: PreTrainedTokenizerBase,
    kind: str, adapter: str, encoder: dict[str, Any] | None, queries: int,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    model = WorldModel.from_config(make(kind, adapter, encoder, queries), tokenizer).eval()
    for parameter in model.requires_grad_(False).parameters():
        if not parameter.any():
            parameter.normal_(std=0.1)
    expected = bucketed.played(bucketed.built_for(model, (48, 80), tokenizer), (48, 80))
    model.resize((48, 80))
    found = bucketed.played(model, (48, 80))
    assert np.abs(found.astype(int) - expected).max() <= 1
    assert found.std() > 1


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "adapter", "encoder", "queries"), CASES)
def test_a_run_on_two_buckets_resumes_bit_for_bit(
    make: Make, tokenizer_folder: str, tmp_path: Path,
    kind: str, adapter: str, encoder: dict[str, Any] | None, queries: int,
) -> None:  # fmt: skip
    trained = {name: TrainedConfig() for name in ("backbone", "adapters", "generator.network")}
    stage = StageConfig(
        "generator", steps=5, batch_size=2, rounds=2, train=trained, tasks={"rounds": 1.0}, warmup_steps=1
    )
    config = TrainConfig(
        model=make(kind, adapter, encoder, queries),
        stages={"only": stage},
        data=bucketed.data(bucketed.write_clips(tmp_path / "clips")),
        tokenizer=tokenizer_folder,
        run_dir=str(tmp_path / "run"),
        precision="fp32",
        validation=ValidationConfig(codec_frames=16),
        log_every=1,
    )
    bucketed.train_twice(config, tmp_path / "halves")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    flow = [line["rounds/flow"] for line in lines if "rounds/flow" in line]
    assert len(flow) == 5
    assert np.isfinite(flow).all()


def test_a_size_that_the_transformer_cannot_have_is_refused(
    make: Make, tokenizer_folder: str, tmp_path: Path
) -> None:
    data = bucketed.data(bucketed.write_clips(tmp_path / "clips"))
    config = TrainConfig(
        model=make("wan", "stream", SIGLIP, 8),
        stages={"only": StageConfig("generator", train={"adapters": TrainedConfig()}, tasks={"rounds": 1.0})},
        data=replace(data, buckets=[(64, 64), (40, 72)]),
        tokenizer=tokenizer_folder,
        run_dir=str(tmp_path / "run"),
    )
    with pytest.raises(ConfigError, match="5 x 9 latent cells"):
        finetune.train(config)
