"""The folder of a run: one run at a time, and one that goes on with what it began with."""

import dataclasses
import json
import multiprocessing
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import ALIGNED, changed, short_run

from worldmodel import config as configs
from worldmodel.cli import main
from worldmodel.config import DataConfig, SourceConfig, StageConfig, TrainConfig
from worldmodel.errors import ConfigError, ModelError, OutputError, WorldModelError
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel.mesh import Mesh
from worldmodel.train import finetune
from worldmodel.train.checkpoint import checkpointer, export
from worldmodel.train.run import folder as run_folder
from worldmodel.train.run import settings
from worldmodel.train.run.settings import check_stages
from worldmodel.train.trainer import Trainer


def hold(run: Path, held: Any) -> None:
    """Hold the folder of a run until the process is killed."""
    with run_folder.locked(run, Mesh(), 1.0):
        held.set()
        time.sleep(600)


def two_stages(run: TrainConfig) -> TrainConfig:
    """Two stages, the first of one step and the second of two."""
    stage = dataclasses.replace(
        run.stages["state"], steps=1, tasks={"rounds": 1.0}, self_rollout=(0.0, 0.0), rounds=1
    )
    return dataclasses.replace(run, stages={"first": stage, "second": dataclasses.replace(stage, steps=2)})


@pytest.fixture
def config(run_config: TrainConfig) -> TrainConfig:
    return two_stages(run_config)


@pytest.fixture(scope="module")
def once(
    make_model: Callable[..., WorldModel], tokenizer_folder: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run that was stopped at the end of its first stage."""
    model = make_model(image_size=64, world="shapes").config
    config = two_stages(short_run(model, tokenizer_folder, tmp_path_factory.mktemp("once") / "run"))
    stopped(config, [False, True])  # asked in the step, and at the end of the stage
    return Path(config.run_dir)


@pytest.fixture
def begun(config: TrainConfig, once: Path) -> Path:
    """A copy of that run, as the test's own."""
    return Path(shutil.copytree(once, config.run_dir))


def with_stage(config: TrainConfig, name: str, **values: Any) -> TrainConfig:
    stages = config.stages | {name: dataclasses.replace(config.stages[name], **values)}
    return dataclasses.replace(config, stages=stages)


def stopped(config: TrainConfig, answers: list[bool]) -> None:
    asked = iter(answers)
    assert finetune.train(config, stop=lambda: next(asked)) == Path(config.run_dir)


def test_what_a_run_has_begun_with_may_not_change(config: TrainConfig, begun: Path) -> None:
    """At the end of its first stage; nothing may be written when the next run is refused."""
    written = begun / "config.json"
    before = written.read_bytes()
    stages, model, data = config.stages, config.model, config.data
    other = data.sources | {"other": SourceConfig("shapes", split="val")}
    wider = dataclasses.replace(model, state=dataclasses.replace(model.state, width=48))
    for changes, key in (
        ({"seed": 5}, "seed was 0 and is 5"),
        (
            {"model": wider},
            r"model\.state\.width was 32 and is 48",
        ),
        (
            {"data": DataConfig({"shapes": SourceConfig("shapes", split="val")})},
            r"data\.sources\.shapes\.split",
        ),
        ({"data": DataConfig(other)}, r"data\.sources\.other is new"),
        ({"init_from": "shapes-tiny"}, "init_from"),
        ({"stages": {"new": stages["first"], **stages}}, "stages first"),
        ({"stages": {"second": stages["second"]}}, "'first'"),
    ):
        with pytest.raises(ConfigError, match=f"{key}.*choose another run_dir"):
            finetune.train(dataclasses.replace(config, **changes))
    for values, key in (({"steps": 3}, "steps was 1"), ({"lr": 1e-4}, "lr"), ({"train": {}}, "train")):
        with pytest.raises(ConfigError, match=rf"stages\.first\.{key}"):
            finetune.train(with_stage(config, "first", **values))
    assert written.read_bytes() == before


def test_a_finished_run_with_other_settings_is_not_returned_as_theirs(config: TrainConfig) -> None:
    only = dataclasses.replace(config, stages={"first": config.stages["first"]})
    model = finetune.train(only)
    before = (model / "config.json").read_bytes()
    with pytest.raises(ConfigError, match=r"stages\.first\.steps was 1 and is 9"):
        finetune.train(with_stage(only, "first", steps=9))
    assert (model / "config.json").read_bytes() == before


@pytest.mark.usefixtures("begun")
def test_stages_that_have_not_begun_and_settings_of_the_machine_may_change(config: TrainConfig) -> None:
    unused = {"unused": SourceConfig("shapes", split="val", weight=0.0)}
    later = dataclasses.replace(
        with_stage(with_stage(config, "second", steps=1, lr=1e-4, ema_decay=0.0), "first", microbatch_size=1),
        data=dataclasses.replace(config.data, sources=config.data.sources | unused, prefetch=3),
        checkpoint_every=7,
        log_every=2,
        keep_checkpoints=3,
    )
    later = dataclasses.replace(
        later, stages={"first": later.stages["first"], "new": config.stages["first"], **later.stages}
    )
    later = dataclasses.replace(later, stages=later.stages | {"last": config.stages["first"]})
    model = finetune.train(later)
    assert [json.loads((model.parent / "config.json").read_text())[key] for key in ("log_every",)] == [2]
    folders = sorted(path.name for path in (model.parent / "checkpoints").iterdir())
    assert [name.split("-")[1] for name in folders] == ["first", "new", "second", "last"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 2}, r"stages\.second\.batch_size was 3 and is 2"),
        ({"ema_decay": 0.0}, r"stages\.second\.ema_decay was 'on' and is 'off'"),
        ({"ema_decay": 0.5, "lr": 1e-4, "steps": 3}, None),
    ],
    ids=["batch_size", "ema", "rates and steps"],
)
def test_a_stage_resumes_with_its_batches_and_its_average(
    config: TrainConfig, values: dict[str, Any], message: str | None
) -> None:
    stopped(config, [False, False, True])  # after the first step of the second stage
    later = with_stage(config, "second", **values)
    if message:
        with pytest.raises(ConfigError, match=message):
            finetune.train(later)
    else:
        assert (finetune.train(later) / "config.json").is_file()


def test_the_seed_is_that_of_the_checkpoint_even_without_the_config(config: TrainConfig, begun: Path) -> None:
    (begun / "config.json").unlink()
    with pytest.raises(ConfigError, match="seed was 0 and is 4"):
        finetune.train(dataclasses.replace(config, seed=4))
    assert (finetune.train(config) / "config.json").is_file()


def test_a_stage_that_does_not_start_leaves_the_config_of_the_checkpoints(
    config: TrainConfig, begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun
    before = (run / "config.json").read_bytes()

    def refuse(*_: Any) -> None:
        raise ModelError("no such weights")

    monkeypatch.setattr(Trainer, "start", refuse)
    with pytest.raises(ModelError, match="weights"):
        finetune.train(with_stage(config, "second", steps=50))
    assert (run / "config.json").read_bytes() == before
    assert [path.name for path in run.iterdir() if path.name.startswith(".writing")] == []


def test_a_folder_belongs_to_one_run_at_a_time(
    config: TrainConfig, begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "LOCK_WAIT_S", 0.1)
    run = begun
    with run_folder.locked(run, Mesh(), 1.0):
        with pytest.raises(OutputError, match="in use by another run"):
            finetune.train(config)
        newest = checkpointer.latest(run)  # readers need no lock
        assert newest is not None
        assert (export.export(newest, tmp_path / "exported") / "config.json").is_file()
    assert (finetune.train(config) / "config.json").is_file()


def test_a_killed_process_releases_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "LOCK_WAIT_S", 1.0)
    forked = multiprocessing.get_context("fork")  # a new process would first import torch
    held = forked.Event()
    holder = forked.Process(target=hold, args=(tmp_path / "run", held))
    holder.start()
    assert held.wait(60)
    with (
        pytest.raises(OutputError, match="in use by another run"),
        run_folder.locked(tmp_path / "run", Mesh(), 1.0),
    ):
        pass
    holder.kill()
    holder.join()
    with run_folder.locked(tmp_path / "run", Mesh(), 1.0):
        pass


def test_a_folder_that_cannot_be_written_is_a_sentence(config: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(OutputError, match="choose another run_dir"):
            finetune.train(dataclasses.replace(config, run_dir=str(folder)))
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ConfigError, match="tokenizer"):
        finetune.train(dataclasses.replace(config, tokenizer=str(tmp_path)))


def test_the_commit_is_that_of_the_package_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outer, package = tmp_path / "project", tmp_path / "project" / "site-packages" / "worldmodel"
    package.mkdir(parents=True)
    (outer / ".git").mkdir()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "abc\n"))
    assert run_folder.commit(outer) == "abc"
    assert run_folder.commit(package) is None  # the clone around it is another project's

    def absent(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", absent)
    assert run_folder.commit(outer) is None


def test_a_stopped_run_is_not_called_a_model(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = dataclasses.replace(config, run_dir=str(tmp_path / "model"))
    (tmp_path / "mine.json").write_text(json.dumps(configs.to_dict(run)))
    train = finetune.train
    monkeypatch.setattr(finetune, "train", lambda config, command, stop: train(config, command, lambda: True))
    assert main(["train", str(tmp_path / "mine.json")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("stopped; run the same command")


def test_a_run_that_ctrl_c_stops_can_be_resumed_and_ends_with_130(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = dataclasses.replace(config, run_dir=str(tmp_path / "model"))
    (tmp_path / "mine.json").write_text(json.dumps(configs.to_dict(run)))
    train = finetune.train

    def interrupted(config: TrainConfig, command: str, stop: Callable[[], bool]) -> Path:
        signal.raise_signal(signal.SIGINT)
        return train(config, command, stop)

    monkeypatch.setattr(finetune, "train", interrupted)
    assert main(["train", str(tmp_path / "mine.json")]) == 130
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].startswith("stopped; run the same command")
    assert captured.err.splitlines()[-1] == "interrupted"
    monkeypatch.setattr(finetune, "train", train)
    assert main(["train", str(tmp_path / "mine.json")]) == 0
    assert (tmp_path / "model" / "model" / "config.json").is_file()


def test_overrides_change_the_model_that_a_config_starts_from(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    stage = {"tasks": {"rounds": 1.0}, "train": {"adapters": {}}}
    path.write_text(json.dumps({"init_from": str(model_folder), "stages": {"state": stage}}))
    plain = settings.load(path)
    assert plain.model.state.width == 32  # not the default's
    found = settings.load(path, ["model.fps=5", "model.action.keys=[up]", "seed=3", "stages.state.lr=1e-4"])
    action = dataclasses.replace(plain.model.action, keys=("up",))
    assert found.model == dataclasses.replace(plain.model, fps=5, action=action)
    assert (found.seed, found.stages["state"].lr) == (3, 1e-4)
    with pytest.raises(WorldModelError, match=r"model\.fpss"):
        settings.load(path, ["model.fpss=5"])
    own = tmp_path / "own.yaml"
    own.write_text(json.dumps({"init_from": str(model_folder), "model": {"fps": 4}}))
    assert settings.load(own, ["model.chunk_frames=4"]).model == dataclasses.replace(
        TrainConfig().model, fps=4, chunk_frames=4
    )


def test_the_memory_of_a_config_is_that_of_the_model_it_starts_from(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    stage = {"tasks": {"rounds": 1.0}, "batch_size": 2, "rounds": 1, "train": {"adapters": {}}}
    path.write_text(json.dumps({"init_from": str(model_folder), "stages": {"state": stage}}))
    assert main(["info", str(path), "--plan", "--json", "--gpus", "1"]) == 0
    assert sum(json.loads(capsys.readouterr().out)["parameters"].values()) < 1e6


@pytest.mark.parametrize(
    ("objective", "task"),
    [
        ("codec", "document"),
        ("language", "rounds"),
        ("alignment", "imagine"),
        ("alignment", "document"),
        ("worldmodel.experiments.distillation:DistillationObjective", "describe"),
        ("worldmodel.experiments.distillation:DistillationObjective", "document"),
        ("state", "round"),
    ],
)
def test_tasks_that_do_not_suit_an_objective_are_refused_before_the_first_stage(
    config: TrainConfig, objective: Any, task: str
) -> None:
    last = StageConfig(objective, tasks={"rounds": 0.0, task: 1.0}, train=ALIGNED)
    with pytest.raises(ConfigError, match=rf"stages\.last\.tasks has {task}.*{objective}"):
        finetune.train(dataclasses.replace(config, stages=config.stages | {"last": last}))
    assert not Path(config.run_dir).exists()


def test_stages_that_train_nothing_are_refused(run_config: TrainConfig) -> None:
    with pytest.raises(ConfigError, match=r"stages\.state\.train names no component"):
        finetune.train(changed(run_config, train={}))
    with pytest.raises(ConfigError, match=r"nothing that stages\.state\.train names \(backbone, adapters\)"):
        finetune.train(changed(run_config, objective="codec", tasks={"rounds": 1.0}, ema_decay=0.0))


def test_the_stages_of_shipped_configs_and_of_the_manifest_train_something(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    (text,) = (
        found["data"]["train.yaml"]
        for found in yaml.safe_load_all((root / "deploy" / "kubernetes" / "train.yaml").read_text())
        if found["kind"] == "ConfigMap"
    )
    manifest = tmp_path / "train.yaml"
    manifest.write_text(text)
    for path in [manifest, *sorted((root / "configs").glob("*.yaml"))]:
        check_stages(configs.load(path))
