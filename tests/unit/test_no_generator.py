"""Models without a generator: the forecast is shown, and nothing that needs a generator is accepted."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from worldmodel import config as configs
from worldmodel.cli import main
from worldmodel.config import (
    CodecConfig,
    ConditionAdapterConfig,
    DataConfig,
    GeneratorConfig,
    SourceConfig,
    StageConfig,
    TrainConfig,
    TrainedConfig,
    ValidationConfig,
    WorldModelConfig,
)
from worldmodel.errors import ConfigError, ModelError
from worldmodel.eval.examples import Album
from worldmodel.eval.runner import ModelSubject
from worldmodel.eval.suite import EvalSettings
from worldmodel.models.loading import deferred
from worldmodel.models.loading import model_folder as folders
from worldmodel.models.loading.location import resolve, shipped_models
from worldmodel.models.loading.model_card import action_section
from worldmodel.models.world_model import WorldModel
from worldmodel.train import finetune
from worldmodel.train.memory.report import report
from worldmodel.train.objectives.registry import OBJECTIVES
from worldmodel.train.start import build_model
from worldmodel.worlds import suite_of

FORECAST: dict[str, Any] = {"generator": None, "num_inference_steps": 0}
TRAINED = {"backbone": TrainedConfig(), "adapters": TrainedConfig()}


@pytest.fixture(scope="module")
def bare(make_model: Callable[..., WorldModel], model_folder: Path) -> WorldModel:
    """The tiny model without its generator."""
    made = make_model(seed=5, **FORECAST)
    folders.load_weights(made, model_folder)
    deferred.load_shards(made)
    return made


@pytest.fixture(scope="module")
def bare_folder(bare: WorldModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bare.save_pretrained(tmp_path_factory.mktemp("models") / "bare", dtype=torch.float32)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_inference_steps": 1}, "num_inference_steps is 1"),
        ({"guidance_scale": 3.0}, "guidance_scale 3"),
        ({"condition_adapter": ConditionAdapterConfig(kind="stream")}, "stream"),
        ({"condition_adapter": ConditionAdapterConfig(forecast="none")}, "none"),
    ],
)
def test_settings_that_need_a_generator_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        WorldModelConfig(**FORECAST | settings)


def test_null_and_settings_over_it_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {generator: null, num_inference_steps: 0}")
    assert configs.load(path).model == WorldModelConfig(**FORECAST)
    assert configs.load(path, ["model.generator.width=96"]).model.generator == GeneratorConfig(width=96)
    assert configs.load("doorkey").model.generator is None
    assert main(["config", str(path)]) == 0


def test_the_frames_are_the_forecast_of_the_model_with_a_generator(
    model: WorldModel, bare: WorldModel, image: np.ndarray
) -> None:
    assert not list(bare.generator.parameters())
    assert not list(bare.condition_adapter.parameters())
    sessions = model.session(3, num_inference_steps=0), bare.session(3)
    for start in ({"observation": image}, {"text": "a red ball"}):
        first, second = (session.reset(**start) for session in sessions)
        assert np.array_equal(first, second)
        first, second = (session.step({"keys": ["left"]}).frames for session in sessions)
        assert np.array_equal(first, second)


@pytest.mark.parametrize(
    ("settings", "named"), [({"num_inference_steps": 2}, "2"), ({"guidance_scale": 1.5}, "1.5")]
)
def test_sessions_take_neither_steps_nor_guidance(
    bare: WorldModel, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        bare.session(**settings)
    assert bare.session(num_inference_steps=0, guidance_scale=1).params.num_inference_steps == 0


def test_evaluation_compares_no_steps(bare: WorldModel) -> None:
    def work(config: WorldModelConfig | None) -> dict[str, int]:
        shapes = replace(bare.config, world="shapes", codec=replace(bare.config.codec, image_size=64))
        parts = suite_of(shapes).parts(EvalSettings(num_samples=40), config, Album())
        return {part.name: part.work for part in parts}

    assert work(None)["steps"] == 5 * work(bare.config)["steps"] == 50
    with pytest.raises(ConfigError, match="4"):
        ModelSubject(bare, 4)


def test_a_folder_has_no_generator(
    bare: WorldModel, bare_folder: Path, image: np.ndarray, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not any((bare_folder / part).exists() for part in ("generator", "condition_adapter"))
    assert "generator" not in (bare_folder / "README.md").read_text()
    loaded = WorldModel.from_pretrained(bare_folder, dtype=torch.float32)
    assert loaded.config == bare.config
    expected = bare.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    assert main(["info", str(bare_folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    stored = load_file(bare_folder / "state" / "model.safetensors")
    size = sum(tensor.numel() for tensor in stored.values())
    assert facts["components"]["state"]["parameters"] == size
    assert "generator" not in facts["components"]
    assert main(["rollout", str(bare_folder), "--num-inference-steps", "2"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def started(model: WorldModelConfig, init_from: Any) -> dict[str, torch.Tensor]:
    """The weights that a run begins with."""
    made = build_model(TrainConfig(model=model, init_from=init_from))
    deferred.load_shards(made)
    return made.state_dict()


def test_a_generator_is_added_to_a_trained_model(bare: WorldModel, bare_folder: Path) -> None:
    whole = replace(bare.config, generator=GeneratorConfig(width=48, num_layers=1, num_heads=3))
    with pytest.raises(ModelError, match=bare_folder.name):
        build_model(TrainConfig(model=whole, init_from=str(bare_folder)))
    sources = {"all": str(bare_folder), "generator": None}
    made = started(whole, sources)
    added = {name for name in made if name.startswith(folders.FOR_GENERATOR)}
    expected = bare.state_dict()
    assert made.keys() == expected.keys() | added and not expected.keys() & added
    assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())
    again = started(bare.config, str(bare_folder))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.items())


def test_a_run_starts_from_the_shipped_codec(bare: WorldModel) -> None:
    codec = CodecConfig(image_size=(32, 48), temporal_factor=1)
    model = replace(bare.config, codec=codec, chunk_frames=1)
    stored = load_file(resolve("codec-games") / "codec" / "model.safetensors")
    made = started(model, {"codec": "codec-games"})
    assert all(torch.equal(made[f"codec.{name}"], tensor.float()) for name, tensor in stored.items())
    assert {f"codec.{name}" for name in stored} == {name for name in made if name.startswith("codec.")}
    with pytest.raises(ModelError, match="backbone"):
        started(model, "codec-games")
    with pytest.raises(ModelError, match="does not fit"):
        started(bare.config, {"codec": "codec-games"})
    assert "codec-games" not in shipped_models()
    with pytest.raises(ModelError, match="init_from"):
        WorldModel.from_pretrained("codec-games")


@pytest.mark.parametrize("objective", ["generator", "joint"])
def test_objectives_of_generators_are_refused(bare: WorldModel, objective: Any) -> None:
    with pytest.raises(ConfigError, match=r"model\.generator"):
        OBJECTIVES[objective](bare)
    with pytest.raises(ConfigError, match=r"stages\.last\.objective"):
        TrainConfig(model=bare.config, stages={"last": StageConfig(objective, tasks={"rounds": 1.0})})


@pytest.mark.slow
def test_memory_is_planned_without_a_generator(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for overrides in ([], ["model.generator.width=192"]):
        report("doorkey", overrides, True, [1], "state", 80.0)
        found.append(json.loads(capsys.readouterr().out)["memory_bytes"][0]["total"])
    assert 0 < found[0] < found[1]


@pytest.mark.slow
def test_states_are_trained(bare: WorldModel, tmp_path: Path) -> None:
    codec = replace(bare.config.codec, image_size=64)
    stage = StageConfig("state", steps=2, batch_size=2, tasks={"rounds": 1.0}, train=TRAINED)
    config = TrainConfig(
        model=replace(bare.config, world="shapes", codec=codec),
        stages={"state": stage},
        data=DataConfig({"shapes": SourceConfig("shapes")}),
        run_dir=str(tmp_path / "run"),
        validation=ValidationConfig(codec_frames=16),
        precision="fp32",
        sample_every=1,
    )
    trained = WorldModel.from_pretrained(finetune.train(config))
    assert trained.config.generator is None
    assert trained.tasks == ("rounds",)
    assert trained.session().reset(np.zeros((64, 64, 3), np.uint8)).shape[1:] == (64, 64, 3)


def test_the_shipped_doorkey_has_none() -> None:
    shipped = folders.resolve("minigrid-doorkey")
    assert not (shipped / "generator").exists()
    made = WorldModel.from_pretrained(shipped)
    session = made.session()
    session.reset(made.start_images[0].image)
    assert session.step({"keys": ["left"]}).frames.shape == (1, 48, 48, 3)


def test_the_shipped_doorkey_fits_in_the_package_and_states_its_actions() -> None:
    shipped = folders.resolve("minigrid-doorkey")
    files = [file for file in shipped.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 32 * 2**20
    spec = folders.read_config(shipped).action.spec
    assert "\n".join(action_section(spec)) in (shipped / "README.md").read_text(encoding="utf-8")
