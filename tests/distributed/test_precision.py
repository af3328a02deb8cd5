"""A step in bf16 on two processes, against one process and against fp32; policies for activations."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from precise import fill_zeros
from processes import torchrun
from runs import BY_LORA, WHOLE
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from worldmodel import config as configs
from worldmodel.config import (
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
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel import collectives, ulysses
from worldmodel.train import distributed, tokenizer
from worldmodel.train.distributed import Root, full_tensor
from worldmodel.train.objectives.registry import objective_class
from worldmodel.train.optim.average import EMA
from worldmodel.train.trainer import Trainer, freeze

pytestmark = pytest.mark.slow
STAGE = StageConfig(
    "joint", steps=1, batch_size=4, microbatch_size=1, tasks={"rounds": 1.0}, max_gradient_norm=1e9
)
SHARD, SP = MeshConfig(), MeshConfig(sp=2)
CASES: dict[int, dict[str, tuple[MeshConfig, str, str, str]]] = {
    1: {
        "fp32": (SHARD, "fp32", "keep", "full"),
        "alone": (SHARD, "bf16", "keep", "full"),
        "lora fp32": (SHARD, "fp32", "keep", "lora"),
        "lora alone": (SHARD, "bf16", "keep", "lora"),
    },
    2: {
        "shard": (SHARD, "bf16", "keep", "full"),
        "lora shard": (SHARD, "bf16", "keep", "lora"),
        "replicate": (MeshConfig(dp_replicate=2), "bf16", "keep", "full"),
        **{policy: (SHARD, "bf16", policy, "full") for policy in ("recompute", "selective", "offload")},
        **{f"sp {policy}": (SP, "fp32", policy, "full") for policy in ("keep", "recompute", "selective")},
    },
}
"""Mesh, precision, policy and how the large parts are trained, by number of processes and name."""


def first_dtype(module: nn.Module) -> str:
    return str(next(module.parameters()).dtype)


def step(config: TrainConfig) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Do one step; returns whole gradients, and the types that were seen."""
    (stage,) = config.stages.values()
    mesh = distributed.Mesh.build(config.mesh, torch.device("cpu"))
    torch.manual_seed(0)
    model = WorldModel.from_config(config.model, tokenizer.build_tokenizer(config))
    lora.add(model, stage.train)
    fill_zeros(model)
    root = Root(model, objective_class(stage)(model, **stage.objective_args))
    freeze(model, stage)
    distributed.parallelize(root, config, mesh)
    observed: dict[str, Any] = {}

    def look(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, args: observed.update({name: [first_dtype(module), str(args[0].dtype)]})

    model.backbone.model.base_model.layers[1].register_forward_pre_hook(look("layer"))
    model.codec.encoder.register_forward_pre_hook(look("codec"))
    ema = EMA(model.named_parameters(), 0.9)
    trainer = Trainer(config, "only", mesh, root, {}, ema)
    with (
        loader.batches(config.data, config.model, stage, 5, 0, mesh.dp_rank, mesh.dp_size) as stream,
        collectives.counted() as sent,
    ):
        outcome = trainer.step(next(stream), stop=False)
    observed["sent"] = sent[ulysses.NAME]
    observed["ema"] = sorted({str(average.dtype) for average in ema.weights.values()})
    observed["gathered"] = [
        name
        for name, module in root.named_modules()
        for parameter in module.parameters(recurse=False)
        if not isinstance(parameter, torch.distributed.tensor.DTensor)
    ]
    found = {"loss": torch.tensor(outcome.losses["loss"])}
    for key, parameter in root.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.dtype == parameter.dtype == torch.float32
            found[key] = full_tensor(parameter.grad).detach().clone()
    return found, observed


def work(folder: Path, config_file: Path) -> None:
    """Runs in each process."""
    tokenizer.NUM_DOCUMENTS, ulysses.MIN_GROUP_BYTES = 400, 1
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    whole = build(WorldModelConfig, json.loads(config_file.read_text()))
    frozen = dataclasses.replace(whole, backbone=dataclasses.replace(whole.backbone, dtype="bf16"))
    for name, (mesh, precision, policy, method) in CASES[dist.get_world_size()].items():
        train = BY_LORA if method == "lora" else WHOLE
        config = TrainConfig(
            model=frozen if method == "lora" else whole,
            mesh=mesh,
            precision=precision,  # type: ignore[arg-type]
            activations=policy,  # type: ignore[arg-type]
            stages={"only": dataclasses.replace(STAGE, train=train)},
            data=DataConfig({"shapes": SourceConfig("shapes")}),
        )
        found, observed = step(config)
        if dist.get_rank() == 0:
            save_file(found, folder / f"{name}.safetensors")
            (folder / f"{name}.json").write_text(json.dumps(observed))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., WorldModel]) -> Path:
    folder = tmp_path_factory.mktemp("precision")
    config_file = folder / "model.json"
    config_file.write_text(json.dumps(configs.to_dict(make_model(image_size=64).config)))
    for processes in CASES:
        torchrun(__file__, processes, folder, config_file)
    return folder


def error(folder: Path, found: str, wanted: str) -> float:
    """Return the relative error of all gradients together."""
    pair = [load_file(folder / f"{name}.safetensors") for name in (found, wanted)]
    assert pair[0].keys() == pair[1].keys()
    one, two = (torch.cat([each[name].flatten() for name in pair[1]]) for each in pair)
    return float((one - two).norm() / two.norm())


def observed_by(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize(
    ("found", "alone", "exact"),
    [
        ("shard", "alone", "fp32"),
        ("replicate", "alone", "fp32"),
        ("lora shard", "lora alone", "lora fp32"),
    ],
)
def test_bf16_on_a_mesh_is_as_exact_as_on_one_process(
    results: Path, found: str, alone: str, exact: str
) -> None:
    yardstick = error(results, alone, exact)
    assert 0 < yardstick < 0.1
    assert error(results, found, exact) <= 1.5 * yardstick


@pytest.mark.parametrize("policy", ["recompute", "selective", "offload"])
def test_policies_for_activations_change_no_gradient(results: Path, policy: str) -> None:
    assert error(results, policy, "shard") == 0


@pytest.mark.parametrize("name", ["alone", "shard", "replicate", "lora shard"])
def test_layers_have_bf16_weights_and_the_codec_fp32(results: Path, name: str) -> None:
    observed = observed_by(results, name)
    assert observed["layer"] == ["torch.bfloat16"] * 2
    assert observed["codec"] == ["torch.float32"] * 2
    assert observed["ema"] == ["torch.float32"]


@pytest.mark.parametrize("name", [name for cases in CASES.values() for name in cases])
def test_nothing_stays_gathered_after_a_step(results: Path, name: str) -> None:
    assert observed_by(results, name)["gathered"] == []


def test_selective_recomputation_does_not_send_again(results: Path) -> None:
    keep, recompute, selective = (
        observed_by(results, f"sp {policy}")["sent"] for policy in ("keep", "recompute", "selective")
    )
    assert 0 < keep == selective < recompute
    assert error(results, "sp selective", "sp keep") == 0


if __name__ == "__main__":
    work(Path(sys.argv[1]), Path(sys.argv[2]))
