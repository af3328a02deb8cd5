"""Export of checkpoints: averaged and merged weights, LoRA adapters, and errors."""

import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from worldmodel import config as configs
from worldmodel.config import TrainConfig, TrainedConfig
from worldmodel.errors import ModelError
from worldmodel.models import lora
from worldmodel.models.world_model import WorldModel
from worldmodel.train.checkpoint import export
from worldmodel.train.checkpoint.checkpointer import Checkpoints, module_state

MakeModel = Callable[..., WorldModel]


@pytest.fixture
def run(model_folder: Path, model: WorldModel, tmp_path: Path) -> Path:
    """The folder of a run that started from the tiny model."""
    config = TrainConfig(model=model.config, init_from=str(model_folder))
    (tmp_path / "config.json").write_text(json.dumps({"origin": {}, **configs.to_dict(config)}))
    return tmp_path


def save(run: Path, model: WorldModel, train: dict[str, Any], **averages: torch.Tensor) -> Path:
    state = module_state(model) | {f"ema.{name}": tensor for name, tensor in averages.items()}
    with Checkpoints(run) as checkpoints:
        return checkpoints.save("state-4", state, {"stage": "state", "step": 4, "train": train}).result()


def hidden(model: WorldModel) -> torch.Tensor:
    embeds = torch.randn(2, 5, model.backbone.width, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.backbone(embeds)


def test_a_checkpoint_is_exported_as_a_model(run: Path, make_model: MakeModel) -> None:
    trained = make_model(seed=3)
    folder = export.export(save(run, trained, {"vision": asdict(TrainedConfig())}), run / "model")
    exported = WorldModel.from_pretrained(folder).state_dict()
    for name, tensor in trained.state_dict().items():
        assert torch.equal(exported[name], tensor.bfloat16().to(tensor.dtype)), name


def test_exported_weights_include_lora(run: Path, make_model: MakeModel) -> None:
    train = {"backbone": TrainedConfig(lora_rank=2)}
    trained, base = make_model(seed=3), make_model(seed=3)
    lora.add(trained, train)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if ".lora_B." in name:
                parameter.normal_()
    assert not torch.allclose(hidden(trained), hidden(base), atol=0.1)
    checkpoint = save(run, trained, {name: asdict(settings) for name, settings in train.items()})
    loaded = make_model(seed=4)
    export.load_weights(loaded, checkpoint)
    assert loaded.state_dict().keys() == base.state_dict().keys()
    torch.testing.assert_close(hidden(loaded), hidden(trained), atol=1e-4, rtol=1e-4)


def test_lora_weights_are_exported_as_adapters(
    run: Path, model_folder: Path, model: WorldModel, tmp_path: Path
) -> None:
    train = {name: TrainedConfig(lora_rank=2) for name in ("backbone", "generator")}
    train["queries"] = TrainedConfig()
    trained = WorldModel.from_pretrained(model_folder)
    trained.queries.normal_()
    lora.add(trained, train)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if ".lora_B." in name:
                parameter.normal_()
    averages = {"queries": torch.randn_like(trained.queries)}
    checkpoint = save(run, trained, {name: asdict(settings) for name, settings in train.items()}, **averages)
    folder = export.export_adapters(checkpoint, tmp_path / "adapters")
    assert load_file(folder / lora.WHOLE).keys() == {"queries"}
    lora.merge(trained)
    trained.queries.copy_(averages["queries"])
    together = WorldModel.from_pretrained(model_folder, adapters=folder)
    for (name, expected), actual in zip(
        trained.state_dict().items(), together.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6, msg=name)
    # peft reads the folder of the backbone without our code.
    plain = WorldModel.from_pretrained(model_folder)
    before = hidden(plain)
    PeftModel.from_pretrained(plain.backbone.model, str(folder / "backbone"))
    assert not torch.allclose(hidden(plain), before, atol=0.1)
    torch.testing.assert_close(hidden(plain), hidden(together), atol=1e-4, rtol=1e-4)
    (folder / "backbone").rename(folder / "vision")
    with pytest.raises(ModelError, match="vision"):
        WorldModel.from_pretrained(model_folder, adapters=folder)
    with pytest.raises(ModelError, match="COMPONENT"):
        WorldModel.from_pretrained(model_folder, adapters=tmp_path)


def test_a_checkpoint_without_lora_has_no_adapters(run: Path, model: WorldModel, tmp_path: Path) -> None:
    checkpoint = save(run, model, {"vision": asdict(TrainedConfig())})
    with pytest.raises(ModelError, match=checkpoint.name):
        export.export_adapters(checkpoint, tmp_path / "adapters")
    assert not (tmp_path / "adapters").exists()


def test_averages_replace_weights(run: Path, make_model: MakeModel) -> None:
    trained = make_model(seed=3)
    average = torch.full_like(trained.queries, 0.25)
    checkpoint = save(run, trained, {}, queries=average)
    loaded = make_model(seed=4)
    export.load_weights(loaded, checkpoint)
    assert torch.equal(loaded.queries, average)
    assert torch.equal(loaded.blank_latents, trained.blank_latents)


def test_a_checkpoint_is_averaged_with_another_model(
    run: Path, model: WorldModel, model_folder: Path, make_model: MakeModel
) -> None:
    trained = make_model(seed=3)
    checkpoint = save(run, trained, {"vision": asdict(TrainedConfig())})
    folder = export.export(checkpoint, run / "mean", average_with=str(model_folder))
    before, after, mean = (
        dict(each.named_parameters()) for each in (model, trained, WorldModel.from_pretrained(folder))
    )
    for name, weight in mean.items():
        torch.testing.assert_close(weight, (before[name] + after[name]) / 2, atol=0.01, rtol=0.01)
    assert any(not torch.equal(before[name], after[name]) for name in mean)
    with pytest.raises(ModelError, match="sizes"):
        export.export(checkpoint, run / "none", average_with="shapes-tiny")


def test_a_model_without_its_generator_shows_the_forecast(
    run: Path, model: WorldModel, make_model: MakeModel
) -> None:
    trained = make_model(seed=3)
    assert trained.state is not None
    torch.nn.init.normal_(trained.state.to_latents.weight, std=0.1)
    checkpoint = save(run, trained, {"state": asdict(TrainedConfig())})
    whole, alone = (
        WorldModel.from_pretrained(export.export(checkpoint, run / name, without_generator=name == "alone"))
        for name in ("whole", "alone")
    )
    assert alone.config.generator is None
    assert not any(name.startswith(("generator", "condition")) for name in alone.state_dict())
    size = model.config.codec.image_size
    image = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)
    frames = []
    for each in (whole.session(num_inference_steps=0), alone.session()):
        each.reset(image)
        frames.append(each.step("go").frames)
    assert np.array_equal(*frames)
    assert frames[0].std(axis=0).any()


def test_a_checkpoint_of_another_model_is_refused(
    run: Path, model: WorldModel, make_model: MakeModel
) -> None:
    checkpoint = save(run, model, {})
    before = copy.deepcopy(other := make_model(image_size=64)).state_dict()
    with pytest.raises(ModelError, match=checkpoint.name):
        export.load_weights(other, checkpoint)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_moved_and_damaged_checkpoints_are_refused(run: Path, model: WorldModel) -> None:
    checkpoint = save(run, model, {})
    moved = checkpoint.rename(run / "moved")
    with pytest.raises(ModelError, match=r"config\.json"):
        export.export(moved, run / "model")
    checkpoint = moved.rename(checkpoint)
    export.export(checkpoint, run / "model")
    next(checkpoint.glob("*.safetensors")).write_bytes(b"")
    with pytest.raises(ModelError, match="safetensors"):
        export.export(checkpoint, run / "again")
    assert not (run / "again").exists()
