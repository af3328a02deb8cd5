"""A training step on any mesh is the step of one process: the gradient of every parameter, in fp64.

The model is whole: backbone, adapters, generator, and the objective's heads. Norms of transformers compute in
fp32 whatever they are given, so the test puts fp64 ones in their place.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from precise import fill_zeros, in_fp64
from processes import torchrun
from runs import BY_LORA, WHOLE
from safetensors.torch import load_file, save_file

from worldmodel import config as configs
from worldmodel.config import (
    ActionConfig,
    DataConfig,
    MeshConfig,
    SourceConfig,
    StageConfig,
    TrainConfig,
    WorldModelConfig,
    build,
)
from worldmodel.data import loader
from worldmodel.models import lora
from worldmodel.models.layers import attention
from worldmodel.models.world_model import WorldModel
from worldmodel.train import distributed, tokenizer
from worldmodel.train.distributed import Root, full_tensor
from worldmodel.train.objectives.registry import objective_class
from worldmodel.train.trainer import Trainer, freeze

pytestmark = pytest.mark.slow
STAGES = {
    "full": StageConfig(
        "joint", batch_size=4, microbatch_size=2, train=WHOLE, tasks={"rounds": 1.0}, rounds=2
    ),
    "own": StageConfig(
        "joint", batch_size=4, train=WHOLE, tasks={"rounds": 1.0}, rounds=2, self_rollout=(1.0, 1.0)
    ),
    # Through time: three rounds, of which clips that end early have fewer.
    "rollout": StageConfig(
        "state",
        batch_size=5,
        microbatch_size=2,
        train=WHOLE,
        tasks={"rounds": 1.0},
        rounds=3,
        self_rollout=(1.0, 1.0),
    ),
    "lora": StageConfig(
        "joint", batch_size=5, microbatch_size=2, train=BY_LORA, tasks={"rounds": 1.0}, rounds=2
    ),
    "text": StageConfig("joint", batch_size=5, train=WHOLE, tasks={"describe": 1.0}),
    # Questions about one observation and about earlier rounds, one at a time: processes have other kinds.
    "history": StageConfig(
        "state", batch_size=6, microbatch_size=1, train=WHOLE, tasks={"ask": 1.0}, rounds=2
    ),
    # One clip at a time: some have a window of two chunks, some have none.
    "swin": StageConfig(
        "joint", batch_size=6, microbatch_size=1, train=WHOLE, tasks={"rounds": 1.0}, rounds=2
    ),
}
CONTROLS = ActionConfig(mouse="drag", vector={"size": 2}, camera=True)
SOURCES = {"shapes": SourceConfig("shapes"), "recall": SourceConfig("shapes", split="recall")}
CASES = [
    ("reference", "full"),
    ("reference", "own"),
    ("reference", "rollout"),
    ("reference", "text"),
    ("reference", "history"),
    ("sdpa", "lora"),
    ("sdpa", "rollout"),
    ("sdpa", "swin"),
]
"""Kernels and stages; with sdpa, activations are recomputed."""
MESHES = {
    1: {"alone": MeshConfig()},
    2: {
        "dp": MeshConfig(dp_replicate=2),
        "shard": MeshConfig(dp_shard=2),
        "cp": MeshConfig(cp=2),
        "sp": MeshConfig(sp=2),
    },
    4: {
        "dp, sp": MeshConfig(dp_shard=2, sp=2),
        "cp, sp": MeshConfig(cp=2, sp=2),
        "hsdp": MeshConfig(dp_replicate=2, dp_shard=2),
    },
}


def gradients(config: TrainConfig, name: str) -> dict[str, torch.Tensor]:
    """Do one step without moving anything; returns the whole gradients, on the first process."""
    stage = config.stages[name]
    mesh = distributed.Mesh.build(config.mesh, torch.device("cpu"))
    torch.manual_seed(0)
    model = WorldModel.from_config(config.model, tokenizer.build_tokenizer(config))
    lora.add(model, stage.train)
    fill_zeros(model)
    root = Root(model, objective_class(stage)(model, **stage.objective_args))
    freeze(model, stage)
    in_fp64(root)
    distributed.parallelize(root, config, mesh)
    trainer = Trainer(config, name, mesh, root, {}, None)
    with loader.batches(config.data, config.model, stage, 5, 0, mesh.dp_rank, mesh.dp_size) as stream:
        outcome = trainer.step(next(stream), stop=False)
    found = {"loss": torch.tensor(outcome.losses["loss"], dtype=torch.float64)}
    for key, parameter in root.named_parameters():
        if parameter.grad is not None:
            found[key] = full_tensor(parameter.grad).detach().clone()
    return found


def work(folder: Path, config_file: Path) -> None:
    """Runs in each process: every stage on every mesh of this many processes."""
    tokenizer.NUM_DOCUMENTS = 400
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = build(WorldModelConfig, json.loads(config_file.read_text()))
    for mesh_name, mesh in MESHES[dist.get_world_size()].items():
        for kernel, stage_name in CASES:
            attention.use(kernel)
            special = {
                "swin": {"sampler": "swin", "num_inference_steps": 2},
                "history": {"text_history": True, "action": CONTROLS},
            }
            config = TrainConfig(
                model=dataclasses.replace(model, **special.get(stage_name, {})),
                mesh=mesh,
                precision="fp32",
                activations="recompute" if kernel == "sdpa" else "keep",
                stages={stage_name: dataclasses.replace(STAGES[stage_name], steps=1, max_gradient_norm=1e9)},
                data=DataConfig(SOURCES if stage_name == "history" else {"shapes": SOURCES["shapes"]}),
            )
            found = gradients(config, stage_name)
            if dist.get_rank() == 0:
                save_file(found, folder / f"{kernel}.{stage_name}.{mesh_name}.safetensors")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., WorldModel]) -> Path:
    """Gradients of every case, from one start of 1, 2 and 4 processes each."""
    folder = tmp_path_factory.mktemp("gradients")
    config_file = folder / "model.json"
    config = make_model(image_size=64).config
    config_file.write_text(json.dumps(configs.to_dict(config)))
    for processes in MESHES:
        torchrun(__file__, processes, folder, config_file)
    return folder


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Return the largest relative error of a parameter's gradient, and whose it is."""
    assert found.keys() == wanted.keys()
    errors = {
        name: float((found[name] - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-30))
        for name in wanted
    }
    name = max(errors, key=lambda key: errors[key])
    return errors[name], name


@pytest.mark.parametrize(
    ("kernel", "stage", "mesh"),
    [
        (*case, name)
        for meshes in MESHES.values()
        for name, mesh in meshes.items()
        for case in CASES
        if name != "alone"
    ],
)
def test_a_step_on_a_mesh_is_the_step_of_one_process(
    results: Path, kernel: str, stage: str, mesh: str
) -> None:
    file = results / f"{kernel}.{stage}.{mesh}.safetensors"
    found, wanted = load_file(file), load_file(results / f"{kernel}.{stage}.alone.safetensors")
    error, name = worst(found, wanted)
    assert error <= 1e-10, f"{name}: {error:.2e}"


def test_lora_moves_its_additions_only(results: Path) -> None:
    names = load_file(results / "sdpa.lora.alone.safetensors").keys()
    inside = [name for name in names if name.startswith(("model.backbone.", "model.generator."))]
    assert inside
    assert all(".lora_" in name for name in inside)


if __name__ == "__main__":
    work(Path(sys.argv[1]), Path(sys.argv[2]))
