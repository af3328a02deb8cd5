"""The host waits for the device once a step, and pixels are moved as uint8."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from emulated_device import DEVICE, EmulatedDevice
from stages import STAGES

from worldmodel.config import DataConfig, SourceConfig, TrainConfig
from worldmodel.data import loader
from worldmodel.media import tensors
from worldmodel.models.world_model import WorldModel
from worldmodel.train import distributed
from worldmodel.train.distributed import Root
from worldmodel.train.objectives.registry import objective_class
from worldmodel.train.optim.optimizers import build_optimizers
from worldmodel.train.trainer import Trainer, freeze

TRANSFORMERS = "causal_lm.py"
"""Calls transformers, which looks once a forward pass whether the positions are those of packed sequences."""


@pytest.mark.parametrize("name", STAGES)
def test_a_step_waits_for_the_device_once(
    make_model: Callable[..., WorldModel], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = make_model(image_size=64, world="shapes")
    stage = dataclasses.replace(STAGES[name], steps=1, batch_size=3, microbatch_size=2, rounds=2, muon_lr=0)
    config = TrainConfig(
        model=model.config,
        stages={name: stage},
        data=DataConfig({"shapes": SourceConfig("shapes")}),
        precision="fp32",
    )
    with loader.batches(config.data, config.model, stage, seed=0) as stream:
        batches = next(stream)
    assert len(batches) > 1
    # FSDP and autocast have no such device.
    monkeypatch.setattr(distributed, "free_gathered", lambda root: None)
    autocast = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: autocast("cpu", enabled=False))
    mesh = distributed.init(config)
    try:
        with EmulatedDevice() as device:
            root = Root(model, objective_class(stage)(model, **stage.objective_args))
            freeze(model, stage)
            device.move(root)
            mesh = dataclasses.replace(mesh, device=DEVICE)
            trainer = Trainer(config, name, mesh, root, build_optimizers(root, stage), None)
            result = trainer.step(batches, stop=False)
            own = {place: n for place, n in device.places.items() if not place.startswith(TRANSFORMERS)}
            waits = sum(device.waits.values()) - sum(device.places.values()) + sum(own.values())
            assert waits <= 1, device.places
    finally:
        distributed.shutdown()
    assert result.losses["loss"] > 0
    assert result.processed["samples"] == 3


def test_pixels_are_moved_as_uint8(monkeypatch: pytest.MonkeyPatch) -> None:
    moved, move = [], tensors.to_device
    monkeypatch.setattr(tensors, "to_device", lambda x, device: moved.append(x.dtype) or move(x, device))
    rng = np.random.default_rng(0)
    clips = [rng.integers(0, 256, (3, 8, 6, 3), dtype=np.uint8) for _ in range(2)]
    found: Any = tensors.to_tensor(clips, "cpu")
    assert moved == [torch.uint8]
    expected = torch.from_numpy(np.stack(clips).transpose(0, 1, 4, 2, 3).astype(np.float32)) / 127.5 - 1
    assert torch.equal(found, expected)
