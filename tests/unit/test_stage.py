"""Validation, profiles and deterministic kernels of a stage."""

import dataclasses
import gzip
import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import changed
from safetensors.torch import load_file

from worldmodel.config import (
    DataConfig,
    DiagnosticsConfig,
    SourceConfig,
    TrainConfig,
    ValidationConfig,
)
from worldmodel.data import loader
from worldmodel.errors import ConfigError
from worldmodel.models.state import StateHead
from worldmodel.models.world_model import WorldModel
from worldmodel.train import distributed, finetune, validation
from worldmodel.train.checkpoint import checkpointer, export
from worldmodel.train.checkpoint.manifest import verify
from worldmodel.train.run.log import read_metrics
from worldmodel.train.trainer import StepResult, Trainer

HELD_OUT = DataConfig(
    {"shapes": SourceConfig("shapes"), "held": SourceConfig("shapes", split="val", weight=0.0)}
)
NONE = ValidationConfig(codec_frames=0)
HELD = ValidationConfig("held", every=2, batches=2, codec_frames=0)


def test_the_checkpoint_with_the_lowest_validation_loss_is_kept(
    run_config: TrainConfig, tmp_path: Path
) -> None:
    config = dataclasses.replace(changed(run_config, ema_decay=0.0), data=HELD_OUT, validation=HELD)
    answers = iter([False] * 4 + [True])
    stopped = finetune.train(config, stop=lambda: next(answers))
    best = checkpointer.load(stopped / "checkpoints" / "best", {})
    records = read_metrics(stopped)["state"]
    losses = {step: line["validation/loss"] for step, line in records.items() if "validation/loss" in line}
    assert losses.keys() == {2, 4}
    assert (best["step"], best["validation_loss"]) == min(losses.items(), key=lambda item: item[1])
    run = finetune.train(config).parent
    records = read_metrics(run)["state"]
    losses = {step: line["validation/loss"] for step, line in records.items() if "validation/loss" in line}
    assert losses.keys() == {2, 4, 6}
    best = checkpointer.load(run / "checkpoints" / "best", {})
    assert (best["step"], best["validation_loss"]) == min(losses.items(), key=lambda item: item[1])
    verify(run / "checkpoints" / "best")
    export.export(run / "checkpoints" / "best", tmp_path / "exported")
    assert WorldModel.from_pretrained(tmp_path / "exported").config == config.model
    plain = dataclasses.replace(config, validation=NONE, run_dir=str(tmp_path / "plain"))
    others = read_metrics(finetune.train(plain).parent)["state"]
    for step, line in others.items():  # validation does not disturb training
        losses = {key: value for key, value in line.items() if key.startswith(("rounds/", "describe/"))}
        assert {key: records[step][key] for key in losses} == losses


def test_the_data_of_all_stages_are_checked_before_weights_are_read(
    run_config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "start", lambda *_: pytest.fail("the weights were read"))
    (tmp_path / "clips.jsonl").write_text('{"file": "a.mp4"}\n')
    clips = DataConfig({"mine": SourceConfig("clips", str(tmp_path / "clips.jsonl"))})
    with pytest.raises(ConfigError, match=r"mine\.columns"):
        finetune.train(dataclasses.replace(run_config, data=clips))
    (tmp_path / "texts.jsonl").write_text('{"text": "a text"}\n')
    texts = DataConfig({"mine": SourceConfig("text", str(tmp_path / "texts.jsonl"))})
    state = run_config.stages["state"]
    words = dataclasses.replace(state, objective="language", tasks={"document": 1.0})
    stages = {"words": words, "state": state}
    with pytest.raises(ConfigError, match="'rounds'"):
        finetune.train(dataclasses.replace(run_config, data=texts, stages=stages))


def test_stages_without_held_out_tasks_are_not_validated(
    run_config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "held.jsonl").write_text('{"text": "a text"}\n')
    held = SourceConfig("text", str(tmp_path / "held.jsonl"), weight=0.0)
    config = dataclasses.replace(
        changed(run_config, steps=2, tasks={"rounds": 1.0}),
        data=DataConfig({"shapes": SourceConfig("shapes"), "held": held}),
        validation=dataclasses.replace(HELD, every=1, batches=1),
    )
    run = finetune.train(config).parent
    assert not (run / "checkpoints" / "best").exists()
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("validation none in this stage") == 1


def test_the_last_steps_are_kept_if_their_validation_fails(
    run_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(
        changed(run_config, steps=1, tasks={"rounds": 1.0}),
        data=HELD_OUT,
        validation=dataclasses.replace(HELD, every=1, batches=1),
    )

    def broken(*_: Any) -> None:
        raise ConfigError("the held-out clips cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(validation, "validate", broken)
        with pytest.raises(ConfigError, match="held-out"):
            finetune.train(config)
    newest = checkpointer.latest(Path(config.run_dir))
    assert newest is not None and checkpointer.load(newest, {})["ended"]
    assert (finetune.train(config) / "config.json").is_file()


def test_the_average_is_validated_where_it_is_exported(
    run_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights that are validated, against those of the checkpoint `best` as they are exported."""
    config = dataclasses.replace(
        changed(run_config, steps=4, ema_decay=0.9, tasks={"rounds": 1.0}),
        data=HELD_OUT,
        validation=dataclasses.replace(HELD, batches=1),
    )
    name, seen, validate = "vision.merge.weight", {}, validation.validate

    def watched(trainer: Trainer) -> dict[str, float]:
        losses = validate(trainer)
        weight = dict(trainer.root.model.named_parameters())[name]
        seen[losses["validation/loss"]] = distributed.full_tensor(weight.detach()).clone()
        return losses

    monkeypatch.setattr(validation, "validate", watched)
    run = finetune.train(dataclasses.replace(config, checkpoint_every=100), stop=stopping(3))
    best = run / "checkpoints" / "best"
    tensors = load_file(next(best.glob("*.safetensors")))
    (loss,) = seen
    assert loss == checkpointer.load(best, {})["validation_loss"]
    assert torch.equal(seen[loss], tensors[f"ema.{name}"])
    assert not torch.equal(seen[loss], tensors[f"model.{name}"])
    finetune.train(config)
    assert len(seen) == 2  # at the end the average is in place of the weights
    last = load_file(next(newest(run).glob("*.safetensors")))
    assert torch.equal(list(seen.values())[1], last[f"model.{name}"])


def stopping(steps: int) -> Callable[[], bool]:
    """What is asked after every step whether to stop: it says so at the step of this number."""
    asked = itertools.count(1)
    return lambda: next(asked) >= steps


def newest(run: Path) -> Path:
    found = checkpointer.latest(run)
    assert found is not None
    return found


@pytest.mark.slow
def test_own_clips_are_validated_on(run_config: TrainConfig, recorded: Path, tmp_path: Path) -> None:
    """The loss on a table of clips, which a source of weight 0 holds out, and the best checkpoint."""
    clips = SourceConfig(
        "clips", str(recorded / "clips.jsonl"), columns={"video": "path", "text": "text"}, weight=0.0
    )
    config = dataclasses.replace(
        changed(run_config, steps=4),
        data=DataConfig({"shapes": SourceConfig("shapes"), "held": clips}),
        validation=HELD,
    )
    run = finetune.train(config).parent
    records = read_metrics(run)["state"]
    losses = {step: line["validation/loss"] for step, line in records.items() if "validation/loss" in line}
    assert losses.keys() == {2, 4}
    assert all(0 < loss < 100 for loss in losses.values())
    assert losses[2] != losses[4]
    best = checkpointer.load(run / "checkpoints" / "best", {})
    assert (best["step"], best["validation_loss"]) == min(losses.items(), key=lambda item: item[1])


def test_validation_on_what_is_trained_is_refused(run_config: TrainConfig) -> None:
    settings = ValidationConfig("shapes")
    with pytest.raises(ConfigError, match=r"Stage state .*'shapes'.*weight"):
        finetune.train(dataclasses.replace(run_config, validation=settings))
    with pytest.raises(ConfigError, match=r"validation\.source is 'gone'.*shapes"):
        finetune.train(dataclasses.replace(run_config, validation=ValidationConfig("gone")))
    with pytest.raises(ConfigError, match="every of validation is 0"):
        ValidationConfig("held", every=0)


def test_a_profile_of_some_steps_is_written(run_config: TrainConfig) -> None:
    config = changed(run_config, steps=4, tasks={"rounds": 1.0}, ema_decay=0.0)
    run = finetune.train(dataclasses.replace(config, diagnostics=DiagnosticsConfig(profile_steps=1))).parent
    (trace,) = (run / "profile").iterdir()
    assert trace.name == "state-0.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event["name"].startswith("Optimizer.step") for event in events) == 2  # AdamW and Muon, once
    assert any(event["name"] == "aten::mm" for event in events)


def test_deterministic_kernels_are_used_within_the_run(
    run_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    within, step = [], Trainer.step

    def watched(self: Trainer, *args: Any) -> StepResult:
        within.append(
            (torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        )
        return step(self, *args)

    monkeypatch.setattr(Trainer, "step", watched)
    config = changed(run_config, steps=1, tasks={"rounds": 1.0})
    for deterministic in (False, True):
        finetune.train(
            dataclasses.replace(
                config, deterministic=deterministic, run_dir=f"{config.run_dir}-{deterministic}"
            )
        )
        assert not torch.are_deterministic_algorithms_enabled()
    assert within == [(False, None), (True, ":4096:8")]
    one, two = (
        read_metrics(Path(f"{config.run_dir}-{deterministic}"))["state"][1] for deterministic in (False, True)
    )
    assert {k: v for k, v in one.items() if "/" in k} == {k: v for k, v in two.items() if "/" in k}


@pytest.mark.parametrize(
    ("owner", "method", "named"),
    [
        (StateHead, "forward", r"state \(forward\).*stages\.state\.microbatch_size"),
        (torch.optim.AdamW, "step", r"the optimizer.*mesh\.dp_shard"),
        (Trainer, "start", r"loading of the weights.*mesh\.dp_shard"),
    ],
)
def test_a_device_without_memory_is_a_sentence_with_the_setting_to_change(
    run_config: TrainConfig, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, named: str
) -> None:
    def exhausted(self: Any, *_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(owner, method, exhausted)
    config = changed(run_config, tasks={"rounds": 1.0}, muon_lr=0)
    with pytest.raises(ConfigError, match=named):
        finetune.train(config)


def losses_of_a_step(config: TrainConfig) -> tuple[dict[str, float], Mapping[str, float]]:
    """Run the first step of a run; return its losses and the weights of their parts."""
    mesh = distributed.init(config)
    try:
        run, _ = Trainer.start(config, "state", mesh, None)
        batches = next(iter(loader.batches(config.data, config.model, config.stages["state"], config.seed)))
        return run.step(batches, stop=False).losses, run.root.objective.weights
    finally:
        distributed.shutdown()


def test_parts_of_the_loss_are_weighted_by_the_stage(run_config: TrainConfig) -> None:
    config = changed(run_config, steps=1, tasks={"rounds": 1.0})
    parts, weights = losses_of_a_step(config)
    given = {"changed": 2.0, "named": 0.0}
    expected = sum({**weights, **given}[name] * value for name, value in parts.items() if name in weights)
    again, _ = losses_of_a_step(changed(config, loss_weights=given))
    assert again["loss"] == pytest.approx(expected, rel=1e-5)
    assert again["changed"] == pytest.approx(parts["changed"], rel=1e-5)
    with pytest.raises(ConfigError, match="moved"):
        losses_of_a_step(changed(config, loss_weights={"moved": 2.0}))
    with pytest.raises(ConfigError, match="loss"):
        changed(config, loss_weights={"changed": -1.0})
