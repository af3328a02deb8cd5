"""Checkpoints of sharded training: written by four processes, read by two and by one, and back."""

import math
import os
import resource
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import torchrun
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from worldmodel.errors import OutputError
from worldmodel.train.checkpoint.checkpointer import (
    Checkpoints,
    State,
    load,
    load_optimizer_state,
    module_state,
    optimizer_state,
)
from worldmodel.train.checkpoint.manifest import Manifest

pytestmark = pytest.mark.slow
MESHES = {"replicated shards": (2, 2), "shards": (1, 4), "plain": None}


class Net(nn.Module):
    """Widths that four processes do not share evenly, one that leaves some without any, a tied weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 6)
        self.wide = nn.Linear(6, 9)
        self.narrow = nn.Linear(9, 6)
        self.short = nn.Parameter(torch.randn(2))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.randn(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids) + self.short.sum()
        return self.head(hidden + self.narrow(torch.tanh(self.wide(hidden))))


def make(shape: tuple[int, int] | None, seed: int) -> tuple[Net, dict[str, torch.optim.Optimizer]]:
    net = Net(seed)
    if shape:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        fully_shard(net.wide, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net, {"adamw": torch.optim.AdamW(net.parameters(), lr=1e-2)}


def step(net: Net, optimizers: dict[str, torch.optim.Optimizer]) -> None:
    ids = torch.arange(12).view(2, 6) % 7
    nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()
    optimizers["adamw"].step()
    optimizers["adamw"].zero_grad()


def whole(state: State) -> State:
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in state.items()}


def state_of(net: Net, optimizers: dict[str, torch.optim.Optimizer]) -> State:
    return module_state(net) | optimizer_state(optimizers, net)


def restored(folder: Path, shape: tuple[int, int] | None) -> State:
    """Load into other weights on another mesh; returns whole tensors."""
    net, optimizers = make(shape, seed=9)
    progress = load(folder, module_state(net))
    load_optimizer_state(folder, optimizers, net)
    assert progress == {"mesh": folder.name.split("-")[1]}
    return whole(state_of(net, optimizers))


def check(folder: Path, run: Path, shape: tuple[int, int] | None) -> None:
    expected, found = load_file(run / f"{folder.name.split('-')[1]}.safetensors"), restored(folder, shape)
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def numbers_in(file: Path) -> int:
    return sum(tensor.numel() for tensor in load_file(file).values())


def write(run: Path) -> None:
    """In each of four processes: save from every mesh, training on while it is written."""
    with Checkpoints(run, keep=9) as checkpoints:
        for name, shape in MESHES.items():
            net, optimizers = make(shape, seed=1)
            for _ in range(2):
                step(net, optimizers)
            expected = whole(state_of(net, optimizers))
            if dist.get_rank() == 0:
                save_file(expected, run / f"{name}.safetensors")
            checkpoints.save(name, state_of(net, optimizers), {"mesh": name})
            step(net, optimizers)
        newest = checkpoints.latest()
        assert newest is not None and newest.name == "00003-plain"
        check(newest, run, (2, 2))


def fail(run: Path) -> None:
    """In each of four processes: one of them cannot write, all raise, and the next save is whole."""
    net, optimizers = make((1, 4), seed=1)
    step(net, optimizers)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    checkpoints = Checkpoints(run / "failing")
    checkpoints.save("first", state_of(net, optimizers), {})
    message = ""
    try:
        checkpoints.wait()
    except OutputError as error:
        message = str(error)
    assert "by process 2: " in message
    assert checkpoints.latest() is None
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    checkpoints.save("second", state_of(net, optimizers), {})
    newest = checkpoints.latest()
    assert newest is not None and newest.name == "00001-second"
    checkpoints.close()


def read(run: Path) -> None:
    """In each of two processes: every checkpoint onto another mesh."""
    for folder in sorted((run / "checkpoints").iterdir()):
        for shape in ((1, 2), (2, 1)):
            check(folder, run, shape)


def test_any_mesh_to_any_other(tmp_path: Path) -> None:
    torchrun(__file__, 4, "write", tmp_path)
    folders = sorted((tmp_path / "checkpoints").iterdir())
    assert [folder.name.split("-")[1] for folder in folders] == list(MESHES)
    for folder in folders:
        check(folder, tmp_path, None)
        names = [file.name for file in Manifest.read(folder).files]
        assert names == [f"{rank:05d}.safetensors" for rank in range(1, 5)]  # each writes its share
        held = sum(numbers_in(folder / name) for name in names)
        tensors = Manifest.read(folder).tensors.values()
        assert held == sum(math.prod(shape) for _, shape in tensors)  # what several hold is written once
    torchrun(__file__, 2, "read", tmp_path)


if __name__ == "__main__":
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    place = Path(sys.argv[2])
    for task in {"write": (write, fail), "read": (read,)}[sys.argv[1]]:
        task(place)
    dist.destroy_process_group()
