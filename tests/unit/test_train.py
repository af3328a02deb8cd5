"""Training: objectives train the components they name, and a stopped run resumes exactly."""

import dataclasses
import gc
import json
import math
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runs import ALIGNED, SHAPES, changed
from safetensors.torch import load_file

from worldmodel import config as configs
from worldmodel import media, signals
from worldmodel.cli import main
from worldmodel.config import (
    DataConfig,
    MeshConfig,
    SourceConfig,
    StageConfig,
    TrainConfig,
    TrainedConfig,
    ValidationConfig,
    WorldModelConfig,
)
from worldmodel.data import loader
from worldmodel.errors import ConfigError, ModelError
from worldmodel.media.tensors import to_tensor
from worldmodel.models import lora
from worldmodel.models.conditioning import GridAdapter
from worldmodel.models.loading import deferred
from worldmodel.models.world_model import WorldModel
from worldmodel.shapes.source import KEYS
from worldmodel.train import distributed, finetune, start, trainer
from worldmodel.train.checkpoint import checkpointer, export
from worldmodel.train.components import settings_of
from worldmodel.train.run import publish
from worldmodel.train.run.log import read_metrics
from worldmodel.train.trainer import Progress, StepResult, Trainer
from worldmodel.worlds import get_world


def components(*names: str, **settings: TrainedConfig) -> dict[str, TrainedConfig]:
    """The `train` of a stage."""
    return {name: TrainedConfig() for name in names} | settings


STAGES = {
    "codec": StageConfig("codec", tasks={"rounds": 1.0}, train=components("codec"), muon_lr=0, rounds=1),
    "language": StageConfig("language", tasks={"document": 1.0}, train=components("backbone")),
    "alignment": StageConfig(
        "alignment", tasks={"rounds": 1.0}, train=components("vision"), muon_lr=0, rounds=1
    ),
    "state": StageConfig("state", tasks={"rounds": 1.0}, train=ALIGNED, self_rollout=(1.0, 1.0)),
    "describe": StageConfig("state", tasks={"describe": 1.0}, train=ALIGNED),
    "inverse": StageConfig("state", tasks={"inverse": 1.0}, train=ALIGNED),
    "imagine": StageConfig("state", tasks={"imagine": 1.0}, train=ALIGNED, rounds=1),
    "generator": StageConfig(
        "generator", tasks={"rounds": 1.0}, train=components("condition_adapter", "generator"), rounds=1
    ),
    "joint": StageConfig(
        "joint",
        tasks={"rounds": 1.0},
        train=ALIGNED | components("generator"),
        rounds=2,
        self_rollout=(1.0, 1.0),
    ),
    "distill": StageConfig(
        "worldmodel.experiments.distillation:DistillationObjective",
        {"teacher_steps": 2},
        tasks={"rounds": 1.0},
        train=components("generator"),
        rounds=2,
    ),
    "lora": StageConfig(
        "state",
        tasks={"rounds": 1.0},
        train=components("vision", backbone=TrainedConfig(lora_rank=2)),
        rounds=1,
    ),
}


@pytest.mark.parametrize("name", STAGES)
def test_every_objective_trains_the_components_of_its_stage(run_config: TrainConfig, name: str) -> None:
    stage = dataclasses.replace(STAGES[name], steps=2, batch_size=2)
    config = dataclasses.replace(run_config, stages={name: stage})
    mesh = distributed.init(config)
    try:
        current, _ = Trainer.start(config, name, mesh, None)
        model = current.root.model
        before = {key: distributed.full_tensor(t).clone() for key, t in model.state_dict().items()}
        for batches in loader.batches(config.data, config.model, stage, seed=0):
            result = current.step(batches, stop=False)
            assert all(math.isfinite(value) for value in result.losses.values())
            assert result.losses["loss"] > 0
        current.finish(batches)
        after = {key: distributed.full_tensor(t) for key, t in model.state_dict().items()}
    finally:
        distributed.shutdown()
    moved = {key for key, tensor in after.items() if not torch.equal(tensor, before[key])}
    assert moved
    assert all(settings_of(key, stage.train) for key in moved)
    if name in ("codec", "language", "alignment", "generator", "distill", "lora"):
        assert {key.split(".")[0] for key in moved} == set(stage.train)
    if name == "lora":
        assert all(".lora_" in key for key in moved if key.startswith("backbone"))


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    newest = checkpointer.latest(run)
    assert newest is not None
    progress = checkpointer.load(newest, {})
    assert (progress["stage"], progress["step"], progress["ended"]) == ("state", 6, True)
    return load_file(next(newest.glob("*.safetensors")))


@pytest.mark.slow
def test_a_stopped_run_resumes_bit_for_bit(run_config: TrainConfig, tmp_path: Path) -> None:
    measured = dataclasses.replace(run_config.validation, codec_frames=18)
    run_config = dataclasses.replace(run_config, sample_every=2, validation=measured)
    model = finetune.train(run_config)
    assert (model / "config.json").is_file()

    answers = iter([False, False, True])  # asked to stop before the third step
    halves = dataclasses.replace(run_config, run_dir=str(tmp_path / "halves"))
    assert finetune.train(halves, stop=lambda: next(answers)) == tmp_path / "halves"
    newest = checkpointer.latest(tmp_path / "halves")
    assert newest is not None
    progress = checkpointer.load(newest, {})
    assert (progress["stage"], progress["step"], progress["ended"]) == ("state", 3, False)
    assert not (tmp_path / "halves" / "model").exists()

    torch.manual_seed(99)  # the global generator must not matter
    finetune.train(halves)
    straight, resumed = final_weights(tmp_path / "run"), final_weights(tmp_path / "halves")
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())
    one, two = (read_metrics(tmp_path / name)["state"] for name in ("run", "halves"))
    assert [line["step"] for line in one.values()] == [0, 1, 2, 3, 4, 5, 6]  # 0: the codec alone
    for step_done, line in one.items():
        losses = {key for key in line if "/" in key}
        assert {key: line[key] for key in losses} == {key: two[step_done][key] for key in losses}
    for file in model.rglob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "halves" / "model" / file.relative_to(model)).read_bytes()


def test_a_resumed_run_keeps_the_precision_that_auto_chose(
    run_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(run_config, precision="auto")
    monkeypatch.setattr(trainer, "faster_precision", lambda device: "bf16")
    answers = iter([False, True])
    finetune.train(config, stop=lambda: next(answers))
    monkeypatch.setattr(trainer, "faster_precision", lambda device: "fp32")
    newest = checkpointer.latest(Path(config.run_dir))
    mesh = distributed.init(config)
    try:
        resumed, progress = Trainer.start(config, "state", mesh, newest)
    finally:
        distributed.shutdown()
    assert progress.precision == resumed.config.precision == "bf16"
    assert resumed.optimizers["muon"].dtype == torch.bfloat16  # pyright: ignore[reportAttributeAccessIssue]


def test_signals_are_handled_for_the_command_line_alone(
    run_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handlers() -> list[Any]:
        return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    before, during, step = handlers(), [], Trainer.step

    def watched(self: Trainer, *args: Any) -> StepResult:
        during.append(handlers())
        return step(self, *args)

    monkeypatch.setattr(Trainer, "step", watched)
    config = changed(run_config, steps=3, tasks={"rounds": 1.0})
    assert finetune.train(config, stop=lambda: True) == Path(config.run_dir)  # as within another program
    with signals.recorded() as received:
        signal.raise_signal(signal.SIGTERM)
        assert finetune.train(config, stop=lambda: bool(received)) == Path(config.run_dir)
    assert received == [signal.SIGTERM]
    assert handlers() == during[0] == before != during[1]


def test_a_run_writes_metrics_plots_and_previews(
    run_config: TrainConfig, capsys: pytest.CaptureFixture[str], whole_runs: None
) -> None:
    config = changed(dataclasses.replace(run_config, sample_every=2), steps=4)
    run = finetune.train(config).parent
    assert (run / "losses.png").stat().st_size > 5000
    previews = sorted(path.name for path in (run / "samples").iterdir())
    assert previews
    assert set(previews) <= {f"state-{step:06d}.{kind}" for step in (2, 4) for kind in ("png", "mp4")}
    line = read_metrics(run)["state"][4]
    assert {"samples_per_s", "tokens_per_s", "stall_share"} <= line.keys()
    phases = ("data", "prepare", "forward", "backward", "optimizer", "other")
    assert sum(line[f"{phase}_share"] for phase in phases) == pytest.approx(1, abs=0.01)
    norms = [value for name, value in line.items() if "/gradient_norm_" in name]
    assert sum(norm**2 for norm in norms) ** 0.5 == pytest.approx(
        next(value for name, value in line.items() if name.endswith("/gradient_norm")), rel=1e-5
    )
    assert line["lr/state"] > 0
    assert line["step_s"] > 0
    assert 0 < line["mfu"] < 1
    assert line["memory_gib"] > 0.1
    assert json.loads((run / "config.json").read_text())["seed"] == 0
    printed = capsys.readouterr()
    assert "parameters" in printed.err + printed.out
    assert "1 processes on" in printed.err + printed.out


def trained(config: TrainConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train the only stage, without files; returns the losses of its steps and the final weights."""
    ((name, stage),) = config.stages.items()
    mesh = distributed.init(config)
    try:
        run, _ = Trainer.start(config, name, mesh, None)
        losses = []
        for batches in loader.batches(config.data, config.model, stage, config.seed):
            losses.append(run.step(batches, stop=False).losses["loss"])
        run.finish(batches)
        weights = {key: distributed.full_tensor(t).clone() for key, t in run.root.model.state_dict().items()}
    finally:
        distributed.shutdown()
    return losses, weights


def test_losses_do_not_depend_on_microbatches_and_activation_checkpointing(run_config: TrainConfig) -> None:
    config = changed(run_config, microbatch_size=0, steps=2, tasks={"rounds": 1.0})
    expected, _ = trained(config)
    for size in (1, 2):
        losses, _ = trained(changed(config, microbatch_size=size))
        assert losses == pytest.approx(expected, rel=1e-5)
    for policy in ("recompute", "selective", "offload"):
        losses, _ = trained(dataclasses.replace(config, activations=policy))
        assert losses == pytest.approx(expected, rel=1e-6)


def test_a_stage_returns_its_memory_before_the_next_is_built(
    run_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, built = Trainer.start, []

    def started(*args: Any) -> tuple[Trainer, Progress]:
        alive.append([each() is not None for each in built])
        made = start(*args)
        built.extend(weakref.ref(each) for each in (made[0].root, next(made[0].root.parameters())))
        return made

    alive: list[list[bool]] = []
    monkeypatch.setattr(Trainer, "start", started)
    one_step = changed(run_config, steps=1, ema_decay=0.9, tasks={"rounds": 1.0}).stages["state"]
    gc.disable()  # what the collector would find some time later is found at the stage's end
    try:
        finetune.train(dataclasses.replace(run_config, stages={"a": one_step, "b": one_step}))
    finally:
        gc.enable()
    assert alive == [[], [False, False]]
    assert not any(each() for each in built)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_null_condition_is_computed_where_conditions_are_dropped(
    run_config: TrainConfig, monkeypatch: pytest.MonkeyPatch, dropout: float
) -> None:
    null, calls = GridAdapter.null, []
    monkeypatch.setattr(GridAdapter, "null", lambda self, x: calls.append(len(x)) or null(self, x))
    generator = dataclasses.replace(run_config.model.generator, condition_dropout=dropout)
    model = dataclasses.replace(run_config.model, generator=generator)
    stage = dataclasses.replace(STAGES["generator"], steps=1, batch_size=2)
    finetune.train(dataclasses.replace(run_config, model=model, stages={"only": stage}))
    assert calls == ([2] if dropout else [])


def test_a_stage_ends_with_the_average_of_its_weights(run_config: TrainConfig) -> None:
    config = changed(run_config, steps=2, tasks={"rounds": 1.0})
    (_, last), (_, average) = (trained(changed(config, ema_decay=decay)) for decay in (0.0, 0.9))
    name = "vision.merge.weight"
    assert not torch.equal(last[name], average[name])


@pytest.mark.slow
def test_answers_about_own_clips_are_learned(
    run_config: TrainConfig, make_model: Callable[..., WorldModel], tmp_path: Path
) -> None:
    """The same question has different answers about different clips, so the answer must come from pixels."""
    rows, clips = ["path,question,answer"], {}
    for answer, grey in (("yes", 230), ("no", 20)):
        clips[answer] = np.full((9, 64, 64, 3), grey, np.uint8)
        media.write_video(clips[answer], tmp_path / f"{answer}.mp4", 8, scale=1)
        rows.append(f"{answer}.mp4,is it bright?,{answer}")
    (tmp_path / "clips.csv").write_text("\n".join(rows))
    columns = {"video": "path", "question": "question", "answer": "answer"}
    mine = SourceConfig(kind="clips", path=str(tmp_path / "clips.csv"), columns=columns)
    config = dataclasses.replace(
        changed(run_config, steps=60, batch_size=4, microbatch_size=0, tasks={"ask": 1.0}, ema_decay=0.0),
        data=DataConfig({"mine": mine}),
    )
    losses, weights = trained(config)
    assert losses[-1] < 0.1 * losses[0]
    model = make_model(image_size=64, world="shapes")
    model.load_state_dict(weights)
    for answer, frames in clips.items():
        seen = model.observe(to_tensor([frames[1:]]))
        assert model.generate_text(seen, "is it bright?") == [answer]


def test_a_recording_in_the_format_of_lerobot_is_trained_on(run_config: TrainConfig, tmp_path: Path) -> None:
    dataset = get_world("shapes").record(tmp_path / "set", 3, rounds=2, format="lerobot")
    mine = DataConfig({"mine": SourceConfig("lerobot", str(dataset))})
    config = changed(run_config, steps=2, tasks={"rounds": 1.0})
    action = dataclasses.replace(config.model.action, keys=KEYS)
    model = dataclasses.replace(config.model, action=action)
    losses, _ = trained(dataclasses.replace(config, model=model, data=mine))
    assert len(losses) == 2 and all(map(math.isfinite, losses))


@pytest.mark.slow
def test_exported_weights_include_lora(run_config: TrainConfig, tmp_path: Path) -> None:
    train = {"backbone": TrainedConfig(lora_rank=2, lr=1e-2)}
    run = finetune.train(changed(run_config, train=train, ema_decay=0.0, tasks={"rounds": 1.0})).parent
    model = WorldModel.from_pretrained(run / "model")
    assert not any("lora" in name for name in model.state_dict())
    beginning = start.build_model(run_config).state_dict()
    moved = {
        name
        for name, tensor in model.state_dict().items()
        if not torch.equal(tensor, beginning[name].bfloat16().float())
    }
    assert moved
    assert all(name.startswith("backbone.model") and "proj" in name for name in moved)


def test_merging_lora_keeps_outputs(make_model: Callable[..., WorldModel]) -> None:
    model = make_model().double()
    lora.add(model, {"backbone": TrainedConfig(lora_rank=3)})
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    embeds = torch.randn(1, 5, model.backbone.width, dtype=torch.float64)
    before = model.backbone(embeds)
    lora.merge(model)
    torch.testing.assert_close(model.backbone(embeds), before)
    assert model.state_dict().keys() == make_model().state_dict().keys()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_merged_lora_comes_back_with_tied_embeddings(
    make_model: Callable[..., WorldModel], tmp_path: Path, family: str, tied: bool
) -> None:
    """States and words of the stored model are those before; the embedding is not merged twice."""
    shared = make_model().config.backbone
    architecture = {**shared.architecture, "model_type": family, "tie_word_embeddings": tied}
    if family == "qwen2":
        architecture.pop("head_dim")
    model = make_model(backbone=dataclasses.replace(shared, architecture=architecture))
    lora.add(model, {"backbone": TrainedConfig(lora_rank=3)})
    for each, parameter in model.named_parameters():
        if "lora_B" in each:
            torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.tensor([[5, 9, 2, 40, 7]])

    def answers(model: WorldModel) -> tuple[torch.Tensor, torch.Tensor]:
        states = model.backbone(model.backbone.embed(ids))
        return states, model.backbone.logits(states)

    expected = answers(model)
    assert not torch.allclose(expected[0], answers(make_model(backbone=model.config.backbone))[0], atol=1e-3)
    lora.merge(model)
    model.save_pretrained(tmp_path / "model", dtype=torch.float32)
    found = answers(WorldModel.from_pretrained(tmp_path / "model").eval())
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def test_a_finished_run_is_not_trained_again(
    run_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_step = changed(run_config, steps=1)
    model = finetune.train(one_step)
    before = (model / "condition_adapter" / "model.safetensors").read_bytes()
    monkeypatch.setattr(loader, "batches", None)
    assert finetune.train(one_step) == model
    assert (model / "condition_adapter" / "model.safetensors").read_bytes() == before
    written = json.loads((model.parent / "config.json").read_text())
    assert written.pop("origin")["num_processes"] == 1
    assert configs.build(TrainConfig, written) == one_step


def test_a_run_records_its_command(
    run_config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(json.dumps(configs.to_dict(changed(run_config, steps=2))))
    assert main(["train", str(config), "seed=5"]) == 0
    record = publish.training_record(Path(run_config.run_dir))
    assert record["command"] == f"worldmodel train {config} seed=5"
    assert [stage["steps"] for stage in record["stages"].values()] == [2]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert finetune.command_line("my.yaml") == (
        "torchrun --nproc-per-node 2 -m worldmodel.train.finetune my.yaml"
    )
    monkeypatch.setenv("GROUP_WORLD_SIZE", "4")
    assert "--nnodes 4 --nproc-per-node 2" in finetune.command_line("my.yaml")


@pytest.mark.slow
def test_checkpoints_are_exported_as_models(run_config: TrainConfig, tmp_path: Path) -> None:
    run = finetune.train(dataclasses.replace(run_config, checkpoint_every=2)).parent
    folders = sorted((run / "checkpoints").iterdir())
    assert len(folders) == 3  # two during the stage, and its end
    for index, folder in enumerate(folders):
        export.export(folder, tmp_path / str(index))
        WorldModel.from_pretrained(tmp_path / str(index))
    last = (tmp_path / "2" / "vision" / "model.safetensors").read_bytes()
    assert last == (run / "model" / "vision" / "model.safetensors").read_bytes()


def test_checkpoints_of_another_model_are_refused(run_config: TrainConfig) -> None:
    finetune.train(changed(run_config, steps=1))
    other = dataclasses.replace(
        run_config, model=dataclasses.replace(run_config.model, generator=configs.GeneratorConfig(width=96))
    )
    other = dataclasses.replace(changed(other, steps=1), stages={"more": STAGES["state"]})
    other = dataclasses.replace(other, stages=changed(run_config, steps=1).stages | other.stages)
    with pytest.raises(ConfigError, match=r"generator\.width.*run_dir"):
        finetune.train(other)
    (Path(run_config.run_dir) / "config.json").unlink()  # the checkpoint itself tells
    with pytest.raises(ModelError, match="run_dir"):
        finetune.train(other)


def test_a_gradient_that_is_not_finite_changes_no_weight(
    run_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = torch.nn.utils.clip_grad_norm_

    def broken(parameters: list[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
        parameters[0].grad = parameters[0].grad * float("nan")
        return clip(parameters, max_norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", broken)
    with pytest.raises(ConfigError, match=r"(?s)step 0.*sample"):
        finetune.train(run_config)
    assert not list(Path(run_config.run_dir).glob("checkpoints/*"))
    assert not dist.is_initialized()


def test_a_run_starts_from_a_saved_model(make_model: Callable[..., WorldModel], tmp_path: Path) -> None:
    model = make_model(image_size=64)
    folder = model.save_pretrained(tmp_path / "before")
    stage = StageConfig(
        "state", steps=1, batch_size=1, tasks={"rounds": 1.0}, train=components("vision"), rounds=1
    )
    config = TrainConfig(
        model=model.config,
        stages={"state": stage},
        data=SHAPES,
        init_from=str(folder),
        run_dir=str(tmp_path / "run"),
        validation=ValidationConfig(codec_frames=0),
    )
    after = WorldModel.from_pretrained(finetune.train(config))
    kept, moved = model.codec.state_dict(), model.vision.state_dict()
    for name, tensor in after.codec.state_dict().items():
        torch.testing.assert_close(tensor, kept[name], rtol=1e-2, atol=1e-3)
    assert any(not torch.equal(tensor, moved[name]) for name, tensor in after.vision.state_dict().items())
    assert after.backbone.token_ids("the red ball") == model.backbone.token_ids("the red ball")


def test_a_run_starts_from_components_of_a_model(
    make_model: Callable[..., WorldModel], tmp_path: Path
) -> None:
    saved = make_model(seed=1)
    folder = str(saved.save_pretrained(tmp_path / "before", dtype=torch.float32))
    wider = replace_generator(saved.config, width=96)
    sources = {"all": folder, "generator": None, "state": None, "condition_adapter": None}
    model = start.build_model(TrainConfig(model=wider, init_from=sources))
    deferred.load_shards(model)
    state = model.state_dict()
    for name, tensor in saved.state_dict().items():
        if not name.startswith(("generator.", "state.", "condition_adapter.")):
            assert torch.equal(state[name], tensor), name
    assert state["generator.project.weight"].shape == (4, 96)
    first = "state.from_state.project.weight"
    assert not torch.equal(state[first], saved.state_dict()[first])
    with pytest.raises(ModelError, match=r"generator\."):
        start.build_model(TrainConfig(model=wider, init_from={"generator": folder}))
    with pytest.raises(ConfigError, match="'generators'"):
        start.build_model(TrainConfig(model=wider, init_from={"generators": folder}))
    with pytest.raises(ConfigError, match="3"):
        TrainConfig(init_from=3)


def replace_generator(config: WorldModelConfig, **changes: Any) -> WorldModelConfig:
    return dataclasses.replace(config, generator=dataclasses.replace(config.generator, **changes))


@pytest.mark.slow
def test_processes_that_never_start_are_a_sentence(run_config: TrainConfig, tmp_path: Path) -> None:
    """A process of its own, as torchrun starts it: another of the two never comes."""
    (tmp_path / "config.json").write_text(json.dumps(configs.to_dict(run_config)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "worldmodel", "train", tmp_path / "config.json", "hang_timeout_s=1"],
        env=os.environ | rendezvous | {"RANK": "0", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (2, ""), done
    assert "hang_timeout_s" in done.stderr


def test_a_mesh_of_the_wrong_size_is_refused(
    run_config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"mesh\.sp 3"):
        finetune.train(dataclasses.replace(run_config, mesh=MeshConfig(sp=3)))
    assert not dist.is_initialized()
    assert main(["train", "no_such_config"]) == 2
    assert "no_such_config" in capsys.readouterr().err
