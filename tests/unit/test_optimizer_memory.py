"""The estimated memory of optimizers while they step, against what a step on the CPU allocates."""

from typing import Any

import pytest
import torch
from storages import Storages

from worldmodel.config import StageConfig, TrainedConfig
from worldmodel.train.memory.optimizer_step import optimizer_steps
from worldmodel.train.optim import muon
from worldmodel.train.optim.optimizers import build_optimizers

MIB = 2**20


def model(device: str) -> torch.nn.ModuleDict:
    """Two shapes of matrices for Muon, and what AdamW trains beside them."""
    with torch.device(device):
        layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(6)]
        layers += [torch.nn.Linear(512, 1024, bias=False) for _ in range(3)]
        parts = {"layers": torch.nn.ModuleList(layers), "words": torch.nn.Embedding(100, 64)}
        return torch.nn.ModuleDict({"model": torch.nn.ModuleDict(parts)})


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, torch.float32),
        ({}, torch.bfloat16),
        ({"optimizer": "torch.optim:SGD", "optimizer_args": {"momentum": 0.9}}, torch.float32),
        ({"optimizer": "torch.optim:Adagrad"}, torch.float32),
    ],
    ids=["muon", "muon in bf16", "SGD", "Adagrad"],
)
def test_a_step_allocates_what_is_estimated(settings: dict[str, Any], dtype: torch.dtype) -> None:
    stage = StageConfig(tasks={"rounds": 1.0}, train={"all": TrainedConfig()}, **settings)
    expected = optimizer_steps(model("meta"), stage, dtype)
    root = model("cpu")
    optimizers = build_optimizers(root, stage, dtype)
    found = []
    for _ in range(2):  # states are made in the first step
        for parameter in root.parameters():
            parameter.grad = torch.randn_like(parameter)
        found = []
        for optimizer in optimizers.values():
            gradients = sum(each.grad.nbytes for each in root.parameters() if each.grad is not None)
            with Storages(measures_peak=True) as storages:
                optimizer.step()
            states = [value for slots in optimizer.state.values() for value in slots.values()]
            found.append((sum(each.nbytes for each in states), gradients, storages.peak))
            optimizer.zero_grad()
    assert len(found) == len(expected)
    for step, (states, gradients, peak) in zip(expected, found, strict=True):
        assert step.states == pytest.approx(states, rel=0.01)
        assert step.gradients == gradients
        if states > MIB:  # the embedding alone is small, and its temporary tensors are not counted
            assert step.temporary + step.whole == pytest.approx(peak, rel=0.1, abs=0.1 * MIB)


def test_the_step_of_muon_needs_memory_for_one_batch_of_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers there are: their batches pass one after the other."""
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", 2 * 256**2)
    stage = StageConfig(tasks={"rounds": 1.0}, train={"all": TrainedConfig()})
    peaks = []
    for count in (4, 24):
        with torch.device("cpu"):
            layers = torch.nn.ModuleList(torch.nn.Linear(256, 256, bias=False) for _ in range(count))
        root = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": layers})})
        (expected,) = optimizer_steps(root, stage, torch.float32)
        (optimizer,) = build_optimizers(root, stage, torch.float32).values()
        for parameter in root.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with Storages(measures_peak=True) as storages:
            optimizer.step()
        assert expected.temporary == 0
        assert expected.whole == pytest.approx(storages.peak, rel=0.1)
        peaks.append(storages.peak)
    assert peaks[0] == peaks[1]
