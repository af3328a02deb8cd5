"""Objectives, optimizers, schedules and callbacks of a user's own, without editing the package."""

import re
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import yaml

from worldmodel.config import StageConfig, TrainConfig, build, imports
from worldmodel.errors import ConfigError
from worldmodel.train import finetune
from worldmodel.train.objectives.base import Objective
from worldmodel.train.objectives.registry import objective_class
from worldmodel.train.objectives.state import StateObjective
from worldmodel.train.optim.optimizers import build_optimizers
from worldmodel.train.run.log import read_metrics
from worldmodel.train.run.settings import check_stages, resolve_model

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "extend-training.md"
TASKS = {"rounds": 1.0}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """The config of the guide, in a folder with the module of the guide."""
    text = GUIDE.read_text(encoding="utf-8")
    blocks = dict(reversed(re.findall(r"```(python|yaml)\n(.*?)```", text, flags=re.DOTALL)))
    (tmp_path / "my_training.py").write_text(blocks["python"], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_training", raising=False)
    return resolve_model(build(TrainConfig, yaml.safe_load(blocks["yaml"])))


def test_the_guide_trains_a_step_by_all_four(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    model = finetune.train(replace(config, log_every=1))
    row = read_metrics(model.parent)["absolute"][1]
    assert row["rounds/absolute"] > 0
    assert row["rounds/loss"] == pytest.approx(row["rounds/absolute"])
    assert re.search(rf"step 0: loss {row['rounds/loss']:.3f}", capsys.readouterr().out)
    module = sys.modules["my_training"]
    assert module.cosine(0, config.stages["absolute"], least=0.1) == 1.0
    assert objective_class(config.stages["absolute"]) is module.AbsoluteError


def test_a_class_of_torch_gets_the_rates_of_the_components() -> None:
    train = {"all": {"lr": 0.5}, "queries": {"lr": 0.25}}
    settings = {"optimizer": "torch.optim:SGD", "optimizer_args": {"momentum": 0.9}, "weight_decay": 0.1}
    stage = build(StageConfig, {"tasks": TASKS, "train": train} | settings)
    model = torch.nn.ModuleDict({"part": torch.nn.Linear(2, 2), "queries": torch.nn.Linear(2, 2, bias=False)})
    (optimizer,) = build_optimizers(torch.nn.ModuleDict({"model": model}), stage).values()
    assert isinstance(optimizer, torch.optim.SGD)
    found = {(g["lr"], g["peak"], g["weight_decay"], g["momentum"]) for g in optimizer.param_groups}
    assert found == {(0.5, 0.5, 0.1, 0.9), (0.5, 0.5, 0.0, 0.9), (0.25, 0.25, 0.1, 0.9)}


def test_an_installed_package_offers_names_that_cannot_replace_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "worldmodel.experiments.distillation:ImleObjective"
    offered = {each: EntryPoint(each, name, "worldmodel.objectives") for each in ("few_steps", "state")}
    monkeypatch.setattr(imports, "_installed", lambda group: offered)
    assert objective_class(StageConfig("few_steps", tasks=TASKS)).__name__ == "ImleObjective"
    assert objective_class(StageConfig("state", tasks=TASKS)) is StateObjective


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "stat"}, r"objective is 'stat'.*did you mean 'state'"),
        ({"objective": "missing_module:Name"}, "missing_module"),
        ({"objective": "json:Missing"}, "Missing"),
        ({"objective": "json:loads"}, "subclass of worldmodel.train.objectives.base.Objective"),
        ({"objective_args": {"sizes": 3}}, r"objective_args.*sizes"),
        ({"optimizer": "json:JSONDecoder"}, "torch.optim.Optimizer"),
        ({"optimizer": "torch.optim:SGD", "optimizer_args": {"momentums": 1}}, "momentums"),
        ({"schedule": "json:__doc__"}, "cannot be called"),
        ({"schedule_args": {"least": 1}}, "least"),
    ],
)
def test_what_cannot_be_used_is_refused_before_the_first_stage(
    config: TrainConfig, settings: dict[str, object], message: str
) -> None:
    stage = {"tasks": TASKS, "train": {"adapters": {}}} | settings
    with pytest.raises(ConfigError, match=message) as caught:
        check_stages(
            build(TrainConfig, {"stages": {"one": stage}, "data": {"sources": {"s": {"kind": "shapes"}}}})
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("mine", {}, "MODULE:NAME"),
        ("json:loads", {}, "Callback"),
        ("my_training:PrintLoss", {"period": 1}, "period"),
    ],
)
def test_callbacks_that_cannot_be_built_are_refused(
    config: TrainConfig, name: str, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_stages(
            build(TrainConfig, {"callbacks": {name: arguments}, "stages": {"one": {"tasks": TASKS}}})
        )


def test_nothing_of_this_package_is_an_experiment_by_its_short_name() -> None:
    with pytest.raises(ConfigError, match="MODULE:NAME"):
        StageConfig("distill", tasks=TASKS)
    for name in ("DistillationObjective", "ImleObjective"):
        found = objective_class(StageConfig(f"worldmodel.experiments.distillation:{name}", tasks=TASKS))
        assert issubclass(found, Objective)
