"""Steps of every objective on the device: finite, with one wait of the host, as the trainer runs them."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from architectures import DECODER, SIGLIP, TEXT, WAN, WAN_VAE
from runs import SHAPES
from stages import STAGES
from transformers import PreTrainedTokenizerBase

from worldmodel.actions import Action
from worldmodel.config import (
    ActionConfig,
    BackboneConfig,
    CodecConfig,
    ConditionAdapterConfig,
    GeneratorConfig,
    StageConfig,
    TrainConfig,
    TrainedConfig,
    VisionConfig,
    WorldModelConfig,
)
from worldmodel.data import loader
from worldmodel.data.loader import Batch
from worldmodel.episodes import Episode
from worldmodel.models.world_model import WorldModel
from worldmodel.train import distributed, start
from worldmodel.train.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
TEXT_ENCODER = {"model_type": "umt5", "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}


@contextmanager
def waits(device: torch.device) -> Iterator[list[str]]:
    """Record where the host waits for the device; on a CPU there is nothing to wait for."""
    places: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    # transformers looks whether positions are those of packed sequences.
    places += [
        f"{each.filename}:{each.lineno}"
        for each in caught
        if "called a synchronizing" in str(each.message) and "/transformers/" not in each.filename
    ]


def check_steps(config: TrainConfig, batches: list[Batch]) -> None:
    """Take three steps on the same samples; the first one also compiles and allocates."""
    mesh = distributed.init(config)
    try:
        trainer, _ = Trainer.start(config, "only", mesh, None)
        assert trainer.root.model.device.type == mesh.device.type
        losses = [trainer.step(batches, stop=False).losses for _ in range(2)]
        with waits(mesh.device) as places:
            losses.append(trainer.step(batches, stop=False).losses)
    finally:
        distributed.shutdown()
    assert all(math.isfinite(value) for step in losses for value in step.values())
    assert losses[2]["loss"] != losses[0]["loss"]
    assert len(places) <= 1, places


@pytest.fixture(autouse=True)
def _tokenizer(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "build_tokenizer", lambda config: tokenizer)


@pytest.mark.parametrize("name", STAGES)
def test_objectives_of_our_own_model(
    make_model: Callable[..., WorldModel], name: str, device: torch.device
) -> None:
    stage = dataclasses.replace(
        STAGES[name], batch_size=3, microbatch_size=2, lr=1e-3, muon_lr=0, warmup_steps=1
    )
    model = make_model(image_size=64, world="shapes").config
    precision = "bf16" if device.type == "cuda" else "fp32"
    config = TrainConfig(model=model, stages={"only": stage}, data=SHAPES, precision=precision)
    with loader.batches(config.data, config.model, stage, seed=0) as stream:
        batches = next(stream)
    check_steps(config, batches)


@pytest.mark.parametrize(
    ("objective", "condition"), [("prompt", "prompt"), ("prompt_kl", "prompt"), ("generator", "stream")]
)
def test_objectives_with_a_generator_of_diffusers(
    tokenizer: PreTrainedTokenizerBase, objective: Any, condition: Any
) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed: openworldmodel[diffusers]")
    encoder = TEXT_ENCODER | {"d_model": TEXT, "vocab_size": len(tokenizer)}
    model = WorldModelConfig(
        codec=CodecConfig(image_size=32, temporal_factor=4, latent_channels=16, architecture=WAN_VAE),
        backbone=BackboneConfig(architecture=DECODER),
        vision=VisionConfig(architecture=SIGLIP, max_frames=2),
        action=ActionConfig(text={"max_tokens": 64}),
        condition_adapter=ConditionAdapterConfig(
            kind=condition, width=32, num_layers=1, num_heads=2, num_tokens=6, text=condition == "stream"
        ),
        generator=GeneratorConfig(architecture=WAN | {"text_encoder": encoder}),
        queries=8,
    )
    rng = np.random.default_rng(0)
    clips = [rng.integers(0, 255, (count, 32, 32, 3), dtype=np.uint8) for count in (1, 8)]
    episodes = [Episode(words, tuple(clips), (Action(text=words),)) for words in ("left", "right")]
    train = {name: TrainedConfig() for name in ("adapters", "generator.network")}
    stage = StageConfig(
        objective, batch_size=2, lr=1e-3, muon_lr=0, warmup_steps=1, train=train, tasks={"rounds": 1.0}
    )
    config = TrainConfig(model=model, stages={"only": stage}, precision="fp32")
    check_steps(config, [Batch(0, "rounds", (0, 1), episodes)])
