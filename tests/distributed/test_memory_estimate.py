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
from worldmodel.train.memory_estimate import Step, microbatch
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
        rows, count = microbatch(trainer.stage, mesh.dp_size)
        for _ in range(2):
            trainer.step([synthetic.batch(config, "stage", "rounds", rows)] * count, False)
    return storages.peak


@pytest.mark.parametrize(("name", "method"), [("pan", "full"), ("pan", "lora"), ("pandora", "lora")])
def test_the_estimate_is_near_what_a_step_allocates(
    name: str, method: str, request: pytest.FixtureRequest
) -> None:
    """At most 5 % below, and less than a quarter above."""
    config = scaled(name, method)
    expected = Step(config, "stage", 1, "cpu").estimate().total
    request.getfixturevalue("group")
    assert 0.95 <= expected / allocated(config) < 1.25
