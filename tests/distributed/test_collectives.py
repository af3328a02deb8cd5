"""Processes whose samples differ in kind run the same collectives, and a step is that of one process.

The gradients of a step on two processes are compared with those of plain modules, without FSDP, that see the
samples of both.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from architectures import DECODER, SIGLIP, WAN, WAN_VAE
from precise import fill_zeros, in_fp64
from processes import torchrun
from runs import WHOLE
from torch import Tensor
from transformers import AutoTokenizer

from worldmodel.actions import Action
from worldmodel.config import (
    ActionConfig,
    BackboneConfig,
    CodecConfig,
    ConditionAdapterConfig,
    DiagnosticsConfig,
    GeneratorConfig,
    MeshConfig,
    StageConfig,
    StateConfig,
    TrainConfig,
    TrainedConfig,
    VisionConfig,
    WorldModelConfig,
)
from worldmodel.data.loader import Batch
from worldmodel.episodes import Episode
from worldmodel.models.loading import model_folder
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel.mesh import Mesh
from worldmodel.train import distributed
from worldmodel.train.diagnostics.collective_check import collective_check
from worldmodel.train.distributed import Root, full_tensor
from worldmodel.train.objectives.base import SampleRng
from worldmodel.train.objectives.registry import objective_class
from worldmodel.train.trainer import Trainer, freeze

pytestmark = pytest.mark.slow
SEED = 5
CHUNK = 8
SMALL = WorldModelConfig(
    codec=CodecConfig(image_size=32, latent_channels=4, widths=(8, 16), num_blocks=2),
    backbone=BackboneConfig(architecture=DECODER),
    vision=VisionConfig(width=32, num_blocks=1),
    action=ActionConfig(text={"max_tokens": 64}),
    state=StateConfig(width=32, num_layers=1, num_heads=2),
    generator=GeneratorConfig(width=48, num_layers=2, num_heads=3),
    chunk_frames=CHUNK,
)
TWO_TRANSFORMERS = replace(
    SMALL,
    codec=CodecConfig(image_size=32, temporal_factor=4, latent_channels=16, architecture=WAN_VAE),
    vision=VisionConfig(architecture=SIGLIP, max_frames=4, width=32, num_blocks=1),
    condition_adapter=ConditionAdapterConfig(
        kind="prompt", width=32, num_layers=1, num_heads=2, num_tokens=6
    ),
    generator=GeneratorConfig(architecture=WAN, condition_dropout=0.0),
    queries=8,
)
CASES: dict[str, tuple[WorldModelConfig, float]] = {
    "rounds": (SMALL, 1e-10),
    "windows": (replace(SMALL, sampler="swin", num_inference_steps=2), 1e-10),
    # Norms of transformers and diffusers compute in fp32.
    "towers": (replace(SMALL, vision=VisionConfig(architecture=SIGLIP, max_frames=4)), 1e-6),
    "transformers": (TWO_TRANSFORMERS, 1e-6),
}
"""Models, and the largest relative error of a gradient."""


def clip(rng: np.random.Generator, frames: int) -> np.ndarray:
    return rng.integers(0, 255, (frames, 32, 32, 3), dtype=np.uint8)


def rounds_of(index: int, rounds: int) -> Episode:
    rng = np.random.default_rng(index)
    actions = tuple(Action("it goes left" if index % 2 else "everything vanishes") for _ in range(rounds))
    return Episode("rounds", (clip(rng, 1), *(clip(rng, CHUNK) for _ in actions)), actions)


def described(index: int, frames: int) -> Episode:
    rng = np.random.default_rng(index)
    return Episode("described", (clip(rng, frames),), prompt="what is it?", answer="a " * (1 + index) + "cat")


def batches_of(case: str, rank: int) -> list[Batch]:
    """Return the microbatches of a process; those of one index differ between processes."""

    def batch(task: str, *episodes: tuple[int, Episode], self_rollout: bool = False) -> Batch:
        indices, rows = zip(*episodes, strict=True)
        return Batch(0, task, indices, list(rows), self_rollout)

    if case == "towers":  # images alone, and beside a clip
        frames = [(0, 1), (1, 1)] if rank == 0 else [(2, 1), (3, CHUNK)]
        return [batch("describe", *((index, described(index, count)) for index, count in frames))]
    if case == "transformers":  # one clip at a time, whose noise level chooses the transformer
        return [batch("rounds", (i, rounds_of(i, 1))) for i in ((0, 1, 2, 3) if rank == 0 else (4, 5, 6))]
    rounds = {0: [1, 3], 1: [2]}[rank]
    return [
        batch(
            "rounds",
            *((i, rounds_of(i, count)) for i in (10 * rank + count, 20 + 10 * rank + count)),
            self_rollout=True,
        )
        for count in rounds
    ]


def build(case: str, stage: StageConfig) -> Root:
    """Build the model of a case in fp64, the same in every process."""
    torch.manual_seed(0)
    model = WorldModel.from_config(
        CASES[case][0], AutoTokenizer.from_pretrained(model_folder.resolve("shapes-tiny") / "backbone")
    )
    if case == "transformers":
        from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

        from worldmodel.models.generator.diffusers.wan import WanGenerator

        second = {name: value for name, value in WAN.items() if name != "_class_name"}
        assert isinstance(model.generator, WanGenerator)
        model.generator.set_second(WanTransformer3DModel(**second), boundary_ratio=0.7)
    fill_zeros(model)
    root = Root(model, objective_class(stage)(model, **stage.objective_args))
    freeze(model, stage)
    in_fp64(root)
    return root


def gradients_alone(root: Root, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Return the gradients of a step, by the plain modules."""
    objective, model, prepared = root.objective, root.model, []
    for batch in batches:
        rng = SampleRng([(SEED, index) for index in batch.indices], "cpu", model.dtype)
        with torch.no_grad():
            prepared.append(objective.prepare(model, batch, rng))
    for inputs in prepared:
        losses = objective(model, inputs)
        terms = [
            weight * losses[name] / max(1, sum(each.counts[name] for each in prepared))
            for name, weight in objective.weights.items()
            if name in losses
        ]
        torch.stack(terms).sum().backward()
    return {name: x.grad for name, x in root.named_parameters() if x.grad is not None}


def compare(case: str) -> None:
    """Runs in each of two processes: do one step, and compare it with that of one process."""
    stage = StageConfig(
        "joint" if case in ("rounds", "windows") else "generator",
        steps=1,
        train=WHOLE | ({"vision.encoder": TrainedConfig()} if case == "towers" else {}),
        tasks={"rounds": 1.0},
        rounds=2,
        max_gradient_norm=1e9,
    )
    config = TrainConfig(
        model=CASES[case][0],
        mesh=MeshConfig(dp_shard=2),
        precision="fp32",
        stages={case: stage},
        seed=SEED,
        diagnostics=DiagnosticsConfig(check_collectives=True),
        hang_timeout_s=60,
    )
    wanted = gradients_alone(build(case, stage), [*batches_of(case, 0), *batches_of(case, 1)])
    mesh, root = Mesh.build(config.mesh, torch.device("cpu")), build(case, stage)
    distributed.parallelize(root, config, mesh)
    with collective_check(config):
        Trainer(config, case, mesh, root, {}, None).step(batches_of(case, mesh.rank), stop=False)
    found = {name: full_tensor(x.grad) for name, x in root.named_parameters() if x.grad is not None}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        error = float((found[name] - gradient).norm() / gradient.norm().clamp(min=1e-30))
        assert error <= CASES[case][1] or found[name].norm() < 1e-15, f"{name}: {error:.2e}"


@pytest.mark.parametrize("case", CASES)
def test_a_step_with_unlike_samples_is_the_step_of_one_process(case: str) -> None:
    torchrun(__file__, 2, case)


def work(case: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    compare(case)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    work(sys.argv[1])
