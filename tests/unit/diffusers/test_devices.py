"""Objectives of a model with a generator of diffusers run on a second device."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import DECODER, SIGLIP
from emulated_device import EmulatedDevice, train_step
from transformers import PreTrainedTokenizerBase

from worldmodel.actions import Action
from worldmodel.config import (
    ActionConfig,
    BackboneConfig,
    CodecConfig,
    ConditionAdapterConfig,
    GeneratorConfig,
    StageConfig,
    TrainedConfig,
    VisionConfig,
    WorldModelConfig,
)
from worldmodel.data.loader import Batch
from worldmodel.episodes import Episode
from worldmodel.models.world_model import WorldModel
from worldmodel.train.objectives.registry import OBJECTIVES


@pytest.mark.parametrize(
    ("objective", "condition", "text"),
    [("prompt", "prompt", False), ("prompt_kl", "prompt", False), ("generator", "stream", True)],
)
def test_objectives_run_on_one_device(
    tiny: SimpleNamespace,
    pipeline: Callable[..., Any],
    tokenizer: PreTrainedTokenizerBase,
    objective: Any,
    condition: Any,
    text: bool,
) -> None:
    torch.manual_seed(0)
    folder, _ = pipeline("wan")
    config = WorldModelConfig(
        codec=CodecConfig(image_size=32, temporal_factor=4, latent_channels=16, pretrained=str(folder)),
        backbone=BackboneConfig(architecture=DECODER),
        vision=VisionConfig(architecture=SIGLIP, max_frames=2),
        action=ActionConfig(text={"max_tokens": 64}),
        condition_adapter=ConditionAdapterConfig(
            kind=condition, width=32, num_layers=1, num_heads=2, num_tokens=6, text=text
        ),
        generator=GeneratorConfig(pretrained=str(folder)),
        queries=8,
    )
    rng = np.random.default_rng(0)
    clips = [rng.integers(0, 255, (count, 32, 32, 3), dtype=np.uint8) for count in (1, 8)]
    episodes = [Episode(words, tuple(clips), (Action(text=words),)) for words in ("left", "right")]
    model = WorldModel.from_config(config, tokenizer)
    train = {name: TrainedConfig() for name in ("adapters", "generator.network")}
    stage = StageConfig(objective, train=train, tasks={"rounds": 1.0})
    made = OBJECTIVES[objective](model)
    with EmulatedDevice() as device:
        losses = train_step(device, model, stage, Batch(0, "rounds", (0, 1), episodes), made)
    assert all(math.isfinite(value) for value in losses.values())
