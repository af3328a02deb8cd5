"""Muon against `torch.optim.Muon`, and on shared weights against one process, bit for bit."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import torchrun
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from worldmodel.train.distributed import full_tensor, leave, shutdown
from worldmodel.train.optim import muon

SHAPES = ((6, 9), (9, 6), (7, 5), (32, 80), (1, 5), (12, 4), (3, 8), (9, 6), (32, 80), (9, 6))
MESHES = {"replicas": (4, 1), "shards": (1, 4), "replicated shards": (2, 2)}
SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}


def net(dtype: torch.dtype) -> nn.ParameterList:
    """Matrices, some of which four processes do not share evenly, or not all of them have a part of."""
    chance = torch.Generator().manual_seed(1)
    return nn.ParameterList(torch.randn(shape, generator=chance, dtype=dtype) for shape in SHAPES)


def gradients(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=chance, dtype=dtype) for shape in SHAPES]


def train(weights: nn.ParameterList, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Run three steps on whole weights."""
    for step in range(3):
        for weight, gradient in zip(weights, gradients(step, weights[0].dtype), strict=True):
            weight.grad = gradient
        optimizer.step()
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_process_equals_torch(dtype: torch.dtype) -> None:
    weights, others = net(dtype), net(dtype)
    found = train(weights, muon.Muon(weights.parameters(), **SETTINGS))
    expected = train(others, torch.optim.Muon(others.parameters(), adjust_lr_fn="original", **SETTINGS))
    rounding = SETTINGS["lr"] * torch.finfo(torch.bfloat16).eps * 2
    for shape, ours, theirs in zip(SHAPES, found, expected, strict=True):
        # Batched products of tiny matrices have kernels of their own.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if min(shape) >= 8 else rounding)


def test_products_in_fp32_are_nearer_to_the_decomposition() -> None:
    matrix = torch.randn(32, 80, generator=torch.Generator().manual_seed(2))
    exact = muon.orthogonal(matrix[None].double())[0]
    errors = [
        (muon.orthogonal(matrix[None].to(t))[0].double() - exact).norm()
        for t in (torch.float32, torch.bfloat16)
    ]
    weights = nn.ParameterList([torch.zeros(32, 80)])
    weights[0].grad = matrix
    muon.Muon(weights.parameters(), lr=1.0, momentum=0.0, dtype=torch.float32).step()
    assert errors[0] < 1e-3 < errors[1]
    assert torch.allclose(weights[0].double(), -exact, atol=1e-4)


def test_matrices_of_one_shape_are_batched_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [len(batch) for batch in muon.batched(net(torch.float32))] == [1, 3, 1, 2, 1, 1, 1]
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", 2 * 9 * 6)
    assert [len(batch) for batch in muon.batched(net(torch.float32))] == [1, 2, 1, 1, 1, 1, 1, 1, 1]


def test_a_batch_equals_its_matrices() -> None:
    stack = torch.randn(5, 48, 32, generator=torch.Generator().manual_seed(3))
    for dtype, tolerance in ((torch.bfloat16, 0.0), (torch.float32, 5e-6)):
        alone = torch.cat([muon.orthogonal(matrix[None]) for matrix in stack.to(dtype)])
        assert torch.allclose(muon.orthogonal(stack.to(dtype)), alone, rtol=0, atol=tolerance)


def test_parameters_without_gradient_are_unchanged() -> None:
    weights = net(torch.float32)
    optimizer = muon.Muon(weights.parameters(), **SETTINGS)
    weights[0].grad = torch.ones_like(weights[0])
    optimizer.step()
    changed = [not torch.equal(*pair) for pair in zip(weights, net(torch.float32), strict=True)]
    assert changed == [True] + [False] * (len(SHAPES) - 1)


def shared(shape: tuple[int, int], alone: list[torch.Tensor]) -> None:
    """In each of four processes: three steps, of which each process computes its share, against `alone`."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    weights = net(torch.float32)
    fully_shard(weights, mesh=mesh if shape[0] > 1 else mesh["shard"])
    optimizer = muon.Muon(weights.parameters(), **SETTINGS)
    computed, compute = [], muon.orthogonal

    def counted(stack: torch.Tensor) -> torch.Tensor:
        computed.extend(tuple(matrix.shape) for matrix in stack)
        return compute(stack)

    muon.orthogonal = counted
    for step in range(3):
        for weight, gradient in zip(weights, gradients(step, torch.float32), strict=True):
            weight.grad = distribute_tensor(gradient, weight.device_mesh, weight.placements)
        optimizer.step()
    muon.orthogonal = compute
    for weight, expected in zip(weights, alone, strict=True):
        assert torch.equal(full_tensor(weight.detach()), expected)
        assert optimizer.state[weight]["momentum_buffer"].placements == weight.placements
    everyone: list[list[tuple[int, int]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, computed)
    assert sorted(shape for each in everyone for shape in each) == sorted(SHAPES * 3)
    assert all(everyone)


@pytest.mark.slow
def test_four_processes_equal_one_on_every_mesh(tmp_path: Path) -> None:
    torchrun(__file__, 4, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4 * len(MESHES)


if __name__ == "__main__":
    whole = net(torch.float32)
    one_process = train(whole, muon.Muon(whole.parameters(), **SETTINGS))
    dist.init_process_group("gloo")
    for name, mesh_shape in MESHES.items():
        shared(mesh_shape, one_process)
        (Path(sys.argv[1]) / f"{name}.{dist.get_rank()}").touch()
    dist.barrier()
    shutdown()
    leave()
