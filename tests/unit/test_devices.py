"""Every objective of our own model runs on a second device without mixing tensors of two."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from emulated_device import DEVICE, DeviceError, EmulatedDevice, train_step
from stages import STAGES

from worldmodel.config import DataConfig, SourceConfig, TrainConfig
from worldmodel.data import loader
from worldmodel.models import lora
from worldmodel.models.world_model import WorldModel
from worldmodel.train.objectives.base import SampleRng
from worldmodel.train.objectives.registry import objective_class


@pytest.mark.parametrize("name", STAGES)
def test_objectives_run_on_one_device(make_model: Callable[..., WorldModel], name: str) -> None:
    stage = dataclasses.replace(STAGES[name], steps=1, batch_size=2)
    model = make_model(image_size=64, world="shapes")
    data = DataConfig({"shapes": SourceConfig("shapes")})
    with loader.batches(data, TrainConfig(model=model.config).model, stage, seed=0) as stream:
        (batch, *_) = next(stream)
    lora.add(model, stage.train)
    objective = objective_class(stage)(model, **stage.objective_args)
    with EmulatedDevice() as device:
        losses = train_step(device, model, stage, batch, objective)
        assert model.device == DEVICE
    assert all(math.isfinite(value) for value in losses.values())


def test_random_numbers_are_those_of_the_cpu() -> None:
    keys = [(5, 1), (5, 2)]
    rng = SampleRng(keys)
    truth = [rng.normal(3), rng.uniform(2), rng.integers(7, 5)]
    with EmulatedDevice() as device:
        rng = SampleRng(keys, DEVICE)
        found = [rng.normal(3), rng.uniform(2), rng.integers(7, 5)]
        assert {each.device for each in found} == {DEVICE}
        assert not device.waits
        assert all(map(torch.equal, (each.cpu() for each in found), truth))


def test_mixed_devices_raise_and_waits_are_counted() -> None:
    with EmulatedDevice() as device:
        layer = torch.nn.Linear(3, 2)
        device.move(layer)
        x = torch.ones(4, 3)
        with pytest.raises(DeviceError, match=r"cpu \[4, 3\]"):
            layer(x)
        out = layer(x.to(DEVICE))
        assert (out.device, not device.waits) == (DEVICE, True)
        out.sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.device == DEVICE
        assert isinstance(out.sum().item(), float)
        assert out.detach().cpu().device.type == "cpu"
        assert out[out[:, 0] > 0].shape[1] == 2
        assert device.waits == {"item": 1, "copy to the host": 1, "index by a mask": 1}


def test_a_list_as_index_reads_the_rows_it_names() -> None:
    rows, without_data = torch.arange(6.0).reshape(3, 2), torch.empty(3, 2, device="meta")
    with EmulatedDevice() as device:
        chosen = rows.to(DEVICE)[[2, 0, 2]]
        assert (chosen.device, device.waits["index from the host"]) == (DEVICE, 1)
        assert chosen.cpu().tolist() == [[4, 5], [0, 1], [4, 5]]
        with pytest.raises(DeviceError, match="without data"):
            rows.to(DEVICE).add(without_data)
