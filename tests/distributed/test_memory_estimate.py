"""The estimated peak memory of a step, against what a step on the CPU allocates."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from scaled_presets import scaled
from storages import Storages

from worldmodel.config import TrainConfig
from worldmodel.parallel.mesh import Mesh
from worldmodel.train import synthetic
from worldmodel.train.memory_estimate import StepEstimator, microbatches
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
