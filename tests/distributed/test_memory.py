"""Memory of a step beside the shards of a process: exact bytes of storages, on one and on two processes."""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import torchrun
from storages import Storages
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from worldmodel.config import MeshConfig
from worldmodel.train import distributed
from worldmodel.train.activations import Offload, Policy, apply_policy

pytestmark = pytest.mark.slow
WIDTH, DEPTH, TOKENS = 256, 8, 4
LAYER = 2 * WIDTH * WIDTH * 2
"""Bytes of a layer in bf16."""
ACTIVATIONS = DEPTH * 2 * TOKENS * WIDTH * 4
"""Bytes allowed for the few tokens that pass through the layers."""
CASES: dict[str, tuple[Policy, str]] = {
    "keep": ("keep", "trained"),
    "recompute": ("recompute", "trained"),
    "selective": ("selective", "trained"),
    "offload": ("offload", "trained"),
    "frozen": ("keep", "frozen"),
    "frozen in bf16": ("keep", "frozen in bf16"),
}
MESHES = {
    "alone": (1, MeshConfig()),
    "shard": (2, MeshConfig()),
    "replicate": (2, MeshConfig(dp_replicate=2)),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Layers, and a vector before them so that frozen ones have a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.start = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.start
        for layer in self.layers:
            x = layer(x)
        return x


def step(policy: Policy, weights: str, mesh: Any) -> dict[str, Any]:
    """Two microbatches; returns what is held after their forward and backward passes."""
    torch.manual_seed(0)
    root, offload = Stack(), Offload(mesh.device)
    root.layers.requires_grad_(weights == "trained")
    if weights == "frozen in bf16":
        root.layers.bfloat16()
    for layer in root.layers:
        apply_policy(layer, policy, offload)
    distributed.shard_layers(distributed.layer_stacks(root), mesh, "bf16")
    fully_shard(root, mesh=mesh.fsdp, reshard_after_forward=False)
    shards = sum(distributed.to_local(p).nbytes for p in root.parameters() if p.requires_grad)
    sizes: dict[str, Any] = {"shards": shards, "forward": [], "backward": []}
    with Storages() as storages:
        for _ in range(2):
            with distributed.compute_precision("bf16", mesh.device):
                y = root(torch.randn(TOKENS, WIDTH))
                sizes["forward"].append(storages.held())
            y.float().sum().backward()
            del y
            gc.collect()
            sizes["backward"].append(storages.held())
    gradients = [distributed.to_local(p.grad) for p in root.parameters() if p.grad is not None]
    sizes["gradients"] = sum(gradient.nbytes for gradient in gradients)
    sizes["dtypes"] = sorted({str(gradient.dtype) for gradient in gradients})
    with Storages() as storages, torch.no_grad(), distributed.compute_precision("bf16", mesh.device):
        root(torch.randn(TOKENS, WIDTH))
        sizes["no gradient"] = storages.held()
    return sizes


def work(folder: Path) -> None:
    """Runs in each process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, (processes, config) in MESHES.items():
        if processes == dist.get_world_size():
            mesh = distributed.Mesh.build(config, torch.device("cpu"))
            for case, (policy, weights) in CASES.items():
                sizes = step(policy, weights, mesh)
                if dist.get_rank() == 0:
                    (folder / f"{name}.{case}.json").write_text(json.dumps(sizes))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    for processes in (1, 2):
        torchrun(__file__, processes, folder)
    return folder


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mesh", MESHES)
def test_no_weights_are_held_beside_the_shards(measured: Path, mesh: str, case: str) -> None:
    sizes = json.loads((measured / f"{mesh}.{case}.json").read_text())
    parts = MESHES[mesh][0] // MESHES[mesh][1].dp_replicate
    trained = DEPTH * 2 * WIDTH * WIDTH * (CASES[case][1] == "trained")
    assert sizes["shards"] == 4 * (trained + WIDTH) // parts
    # One layer: the process group may not have let go of the newest gathered one.
    assert sizes["no gradient"] <= LAYER + ACTIVATIONS
    assert sizes["forward"][0] <= LAYER + ACTIVATIONS
    assert sizes["forward"][1] <= sizes["gradients"] + LAYER + ACTIVATIONS


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mesh", MESHES)
def test_accumulated_gradients_are_sharded(measured: Path, mesh: str, case: str) -> None:
    sizes = json.loads((measured / f"{mesh}.{case}.json").read_text())
    assert sizes["gradients"] == sizes["shards"]
    assert sizes["dtypes"] == ["torch.float32"]
    assert all(held <= sizes["gradients"] + LAYER for held in sizes["backward"])


if __name__ == "__main__":
    work(Path(sys.argv[1]))
