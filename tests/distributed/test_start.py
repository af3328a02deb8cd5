"""A run starts from files without any process holding more of the backbone than its own part.

The weights that it starts from are, bit for bit, those of a model that was read whole.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import torchrun
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from worldmodel import config as configs
from worldmodel.config import BackboneConfig, MeshConfig, StageConfig, TrainConfig, TrainedConfig
from worldmodel.errors import ModelError
from worldmodel.models import lora
from worldmodel.models.loading import deferred
from worldmodel.models.world_model import WorldModel
from worldmodel.train import distributed
from worldmodel.train.checkpoint.checkpointer import Checkpoints, State, load, module_state
from worldmodel.train.distributed import full_tensor
from worldmodel.train.trainer import Trainer

pytestmark = pytest.mark.slow
VOCABULARY, WIDTH = 4096, 64
ARCHITECTURE = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
}
ADDED = TrainedConfig(lora_rank=3)
STAGES = {
    "full": StageConfig("joint", train={"backbone": TrainedConfig()}, tasks={"rounds": 1.0}),
    "lora": StageConfig("joint", train={"backbone": ADDED, "generator": ADDED}, tasks={"rounds": 1.0}),
}
RUNS = {"qwen2": ("fp32", "full"), "qwen3": ("bf16", "lora")}
"""Backbones, what they are held in, and how they learn."""
DAMAGES: dict[str, Callable[[State], State]] = {
    "gap": lambda state: {name: x for name, x in state.items() if name != "model.norm.weight"},
    "other": lambda state: state | {"model.norm.weight": torch.ones(WIDTH + 2)},
}
"""Damages to the files of a backbone."""
MESHES = {
    1: {"alone": MeshConfig()},
    2: {"shard": MeshConfig(dp_shard=2), "replicate": MeshConfig(dp_replicate=2)},
}


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation made, but for those mapped from files."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self.mapped = 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in [distributed.to_local(each) for each in tree_leaves(made) if isinstance(each, Tensor)]:
            if func is torch.ops.aten.set_.source_Storage:
                self.mapped.add(tensor.untyped_storage().data_ptr())
            if not tensor.is_meta and tensor.untyped_storage().data_ptr() not in self.mapped:
                self.nbytes = max(self.nbytes, tensor.nbytes)
        return made


class Counted:
    """An opened tensor that counts how many numbers were read of it."""

    numbers = 0

    def __init__(self, opened: Any) -> None:
        self.opened = opened

    def __getitem__(self, place: Any) -> Tensor:
        found = self.opened[place]
        Counted.numbers += found.numel()
        return found


@contextmanager
def watched() -> Iterator[Largest]:
    """Count what is read from now on, and see the largest tensor."""
    attach, Counted.numbers = deferred.attach, 0
    deferred.attach = lambda module, slices, *files: attach(
        module, {name: Counted(x) for name, x in slices.items()}, *files
    )
    try:
        with Largest() as largest:
            yield largest
    finally:
        deferred.attach = attach


def run_config(folder: Path, run: str, mesh: MeshConfig | None = None, backbone: str = "") -> TrainConfig:
    dtype, stage = RUNS[run]
    model = configs.build(configs.WorldModelConfig, json.loads((folder / "model.json").read_text()))
    model = dataclasses.replace(
        model, backbone=BackboneConfig(pretrained=str(folder / (backbone or run)), dtype=dtype)
    )
    return TrainConfig(
        model=model, mesh=mesh or MeshConfig(), stages={stage: STAGES[stage]}, seed=5, precision="fp32"
    )  # not "auto", whose measurement makes large tensors


def weights_of(model: WorldModel) -> State:
    """Whole weights, and what the backbone computes for itself."""
    buffers = {f"model.{name}": x for name, x in model.named_buffers() if name.startswith("backbone.")}
    return {name: full_tensor(x).detach().clone() for name, x in (module_state(model) | buffers).items()}


def work(folder: Path) -> None:
    """Runs in each process: start from a folder of transformers and from a checkpoint, on every mesh."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (checkpoint,) = (folder / "checkpoints").iterdir()
    for name, mesh_config in MESHES[dist.get_world_size()].items():
        mesh = distributed.Mesh.build(mesh_config, torch.device("cpu"))
        for run, (_, stage) in RUNS.items():
            with watched() as largest:
                model = Trainer.start(run_config(folder, run, mesh_config), stage, mesh, None)[0].root.model
            held = [p for key, p in model.backbone.named_parameters() if ".lora_" not in key]
            reported = {
                "read": Counted.numbers,
                "held": sum(distributed.to_local(parameter).numel() for parameter in held),
                "whole": sum(parameter.numel() for parameter in held),
                "largest": largest.nbytes,
            }
            (folder / f"{run}.{name}.{dist.get_rank()}.json").write_text(json.dumps(reported))
            write(weights_of(model), folder / f"{run}.{name}.safetensors")
        config = run_config(folder, "qwen3", mesh_config)
        write(
            weights_of(Trainer.start(config, "lora", mesh, checkpoint)[0].root.model),
            folder / f"checkpoint.{name}.safetensors",
        )
        for damage in DAMAGES:
            config = run_config(folder, "qwen3", mesh_config, damage)
            with pytest.raises(ModelError) as raised:
                Trainer.start(config, "lora", mesh, None)
            (folder / f"{damage}.{name}.{dist.get_rank()}.txt").write_text(str(raised.value))
    dist.destroy_process_group()


def write(state: State, file: Path) -> None:
    if dist.get_rank() == 0:
        save_file(state, file)


def read_whole(folder: Path, run: str) -> WorldModel:
    """Build the model that a run starts from as anyone would, each weight in memory."""
    config = run_config(folder, run)
    torch.manual_seed(config.seed)
    return WorldModel.from_config(config.model)


@pytest.fixture(scope="module")
def started(
    tmp_path_factory: pytest.TempPathFactory, model: WorldModel, tokenizer: PreTrainedTokenizerBase
) -> Path:
    """Reports of 1 and 2 processes after their start."""
    folder = tmp_path_factory.mktemp("started")
    (folder / "model.json").write_text(json.dumps(configs.to_dict(model.config)))
    for family, (dtype, _) in RUNS.items():
        torch.manual_seed(1)
        own = {"head_dim": 16} if family == "qwen3" else {}
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **ARCHITECTURE, **own))
        made.to(torch.float32 if dtype == "bf16" else torch.bfloat16)  # not as they will be held
        made.save_pretrained(folder / family, max_shard_size="300KB")
        tokenizer.save_pretrained(folder / family)
        assert len(list((folder / family).glob("*.safetensors"))) > 1
        for damage, change in DAMAGES.items() if family == "qwen3" else ():
            made.save_pretrained(folder / damage, state_dict=change(made.state_dict()))
            tokenizer.save_pretrained(folder / damage)
    save_checkpoint(folder)
    for processes in MESHES:
        torchrun(__file__, processes, folder)
    return folder


def save_checkpoint(folder: Path) -> None:
    """Write the end of a stage that learned by LoRA, with averages."""
    trained = read_whole(folder, "qwen3")
    lora.add(trained, {"backbone": ADDED, "generator": ADDED})
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    averages = {
        f"ema.{name}": torch.randn_like(parameter)
        for name, parameter in trained.named_parameters()
        if "lora_B" in name or name == "queries"
    }
    train = {name: vars(ADDED) for name in ("backbone", "generator")}
    progress = {"stage": "before", "step": 1, "ended": True, "train": train, "seed": 5, "precision": "fp32"}
    with Checkpoints(folder) as checkpoints:
        checkpoints.save("before-1", module_state(trained) | averages, progress)


def same(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


CASES = [(run, mesh) for run in RUNS for meshes in MESHES.values() for mesh in meshes]


@pytest.mark.parametrize(("run", "mesh"), CASES)
def test_a_run_starts_with_the_weights_of_its_files(started: Path, run: str, mesh: str) -> None:
    wanted = read_whole(started, run)
    lora.add(wanted, STAGES[RUNS[run][1]].train)  # whose chance goes on from the model's
    same(load_file(started / f"{run}.{mesh}.safetensors"), weights_of(wanted))


@pytest.mark.parametrize("mesh", [name for meshes in MESHES.values() for name in meshes])
def test_a_stage_starts_with_the_weights_of_the_one_before(started: Path, mesh: str) -> None:
    wanted = read_whole(started, "qwen3")
    lora.add(wanted, {"backbone": ADDED, "generator": ADDED})
    (checkpoint,) = (started / "checkpoints").iterdir()
    load(checkpoint, module_state(wanted))
    parameters = {f"ema.{name}": x.detach() for name, x in wanted.named_parameters()}
    load(checkpoint, {name: x for name, x in parameters.items() if "lora_B" in name or name == "ema.queries"})
    lora.merge(wanted)
    found = load_file(started / f"checkpoint.{mesh}.safetensors")
    added = {name: x for name, x in found.items() if ".lora_" in name}
    assert added
    assert not any(x.any() for name, x in added.items() if ".lora_B." in name)
    same({deferred.base_name(name): x for name, x in found.items() if name not in added}, weights_of(wanted))


@pytest.mark.parametrize(("run", "mesh"), CASES)
def test_a_process_reads_and_holds_its_own_part_alone(started: Path, run: str, mesh: str) -> None:
    reported = [json.loads(file.read_text()) for file in sorted(started.glob(f"{run}.{mesh}.*.json"))]
    parts = 2 if mesh == "shard" else 1
    assert len(reported) == (1 if mesh == "alone" else 2)
    for each in reported:
        assert each["read"] == each["held"] == each["whole"] // parts
        assert each["largest"] == VOCABULARY * WIDTH * {"fp32": 4, "bf16": 2}[RUNS[run][0]] // parts


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_do_not_fit_are_reported_by_every_process(started: Path, damage: str) -> None:
    with pytest.raises(ModelError) as raised:
        WorldModel.from_config(run_config(started, "qwen3", backbone=damage).model)
    reported = [file.read_text() for file in sorted(started.glob(f"{damage}.*.txt"))]
    assert reported == [str(raised.value)] * 5


if __name__ == "__main__":
    work(Path(sys.argv[1]))
