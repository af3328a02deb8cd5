"""Switches for cheaper inference: weights in 8 bits, compiled blocks, guidance in few steps."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from worldmodel.config import TrainedConfig
from worldmodel.errors import ConfigError
from worldmodel.models import lora
from worldmodel.models.adapters import Adapters
from worldmodel.models.inference import optimize
from worldmodel.models.quantization import num_bytes
from worldmodel.models.world_model import WorldModel


def play(model: WorldModel, image: np.ndarray) -> np.ndarray:
    session = model.session(seed=3, num_inference_steps=2, guidance_scale=2.0)
    session.reset(image)
    session.step("the red ball moves left")
    return session.step("the blue box jumps").frames.astype(int)


def linear_bytes(model: WorldModel) -> int:
    return sum(
        layer.weight.numel() * layer.weight.element_size()
        for part in (model.backbone.model, model.generator)
        for name, layer in part.named_modules()
        if type(layer) is torch.nn.Linear and "lm_head" not in name
    )


@pytest.mark.parametrize(("method", "largest"), [("int8", 3.0), ("fp8", 12.0)])
def test_weights_in_8_bits(
    make_model: Callable[..., WorldModel], image: np.ndarray, method: str, largest: float
) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: openworldmodel[quantization]")
    plain, model = make_model(), make_model()
    expected, before, linear = play(plain, image), num_bytes(model), linear_bytes(model)
    optimize(model, quantization=method)
    saved = before - num_bytes(model)
    assert 0.65 * linear < saved <= 0.75 * linear  # a quarter stays, and the scales
    made = play(model, image)
    assert 0 < np.abs(made - expected).mean() < largest  # of 255; random weights, so errors add up
    assert model.session().reset(image).shape == plain.session().reset(image).shape


def test_an_adapter_applies_beside_weights_in_8_bits(
    model_folder: Path, image: np.ndarray, tmp_path: Path
) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: openworldmodel[quantization]")
    trained = WorldModel.from_pretrained(model_folder)
    train = {name: TrainedConfig(lora_rank=2) for name in ("backbone", "generator")}
    lora.add(trained, train)
    for name, parameter in trained.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.3)
    lora.save(trained, train, tmp_path)
    model = WorldModel.from_pretrained(model_folder)
    adapters = Adapters(model, {"own": tmp_path})
    optimize(model, quantization="int8")
    plain = play(model, image)
    with adapters.using("own"):
        made = play(model, image)
    expected = play(WorldModel.from_pretrained(model_folder, adapters=tmp_path), image)
    assert np.abs(made - expected).mean() < 3 < np.abs(plain - expected).mean()


def test_other_methods_are_refused(model: WorldModel) -> None:
    with pytest.raises(ConfigError, match="int4"):
        optimize(model, quantization="int4")


PLAYED = """
import sys
import numpy as np
from worldmodel.models.inference import optimize
from worldmodel.models.world_model import WorldModel

model = WorldModel.from_pretrained(sys.argv[1])
sessions = [model.session(3, 2, 2.0), model.session(3, 2, 2.0)]
for session, compiled in zip(sessions, (False, True)):
    optimize(model, compile=compiled)
    session.reset(np.load(sys.argv[2]))
    session.step("the red ball moves left")
assert all(layer._compiled_call_impl is not None for layer in model.generator.layers)
print(np.abs(sessions[0].frames.astype(int) - sessions[1].frames).max())
"""


@pytest.mark.slow
def test_compiled_blocks_change_rounding_only(model_folder: Path, image: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "image.npy", image)  # in a process of its own: the checks of shapes cannot be compiled
    arguments = [sys.executable, "-c", PLAYED, str(model_folder), str(tmp_path / "image.npy")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 1
