"""The estimated peak memory of a step, against what a step on the CPU allocates."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from scaled_presets import scaled
from storages import Storages

from worldmodel.config import TrainConfig, build
from worldmodel.parallel.mesh import Mesh
from worldmodel.train.memory import synthetic
from worldmodel.train.memory.estimate import StepEstimator, microbatches
from worldmodel.train.trainer import Trainer

pytestmark = pytest.mark.slow


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore
    yield
    dist.destroy_process_group()


def allocated(config: TrainConfig) -> int:
    """Return the peak of two steps in bytes."""
    with Storages(measures_peak=True) as storages:
        mesh = Mesh.build(config.mesh, torch.device("cpu"))
        trainer, _ = Trainer.start(config, "stage", mesh, None)
        if "adamw" in trainer.optimizers:
            for group in trainer.optimizers["adamw"].param_groups:
                group |= {"fused": True, "foreach": False}  # as on GPUs
        rows, count = microbatches(trainer.stage, mesh.dp_size)
        for _ in range(2):
            trainer.step([synthetic.batch(config, "stage", "rounds", rows)] * count, False)
    return storages.peak


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("name", ["pan", "pandora"])
def test_the_estimate_is_near_what_a_step_allocates(
    name: str, method: str, request: pytest.FixtureRequest
) -> None:
    config = scaled(name, method)
    expected = StepEstimator(config, "stage", "cpu").estimate(1).total
    request.getfixturevalue("group")
    assert expected == pytest.approx(allocated(config), rel=0.1)


def test_the_estimate_of_a_large_model_with_few_tokens_that_muon_trains(
    request: pytest.FixtureRequest,
) -> None:
    config = large()
    expected = StepEstimator(config, "stage", "cpu").estimate(1).total
    request.getfixturevalue("group")
    assert expected == pytest.approx(allocated(config), rel=0.1)


def large() -> TrainConfig:
    """One round of a small frame, and a backbone whose matrices Muon trains."""
    decoder = {
        "model_type": "qwen3",
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    stage = {
        "objective": "joint",
        "steps": 4,
        "batch_size": 1,
        "rounds": 1,
        "tasks": {"rounds": 1.0},
        "train": {"backbone": {}, "adapters": {}, "generator": {}},
    }
    settings = {
        "model": {
            "codec": {"image_size": 32},
            "backbone": {"architecture": decoder},
            "generator": {"width": 256, "num_layers": 6, "num_heads": 4},
        },
        "data": {"sources": {"shapes": {"kind": "shapes"}}},
        "stages": {"stage": stage},
        "precision": "fp32",
        "activations": "recompute",
    }
    return build(TrainConfig, settings)
