"""Checkpoints hold what a run trains; frozen weights are read again from files that must not have changed."""

import dataclasses
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from worldmodel.config import DataConfig, SourceConfig, StageConfig, TrainConfig, TrainedConfig
from worldmodel.errors import ModelError
from worldmodel.models.world_model import WorldModel
from worldmodel.train import finetune
from worldmodel.train.checkpoint import checkpointer
from worldmodel.train.checkpoint.manifest import Manifest, chain
from worldmodel.train.components import is_trained

pytestmark = pytest.mark.slow

STAGES = {
    "first": {"backbone": TrainedConfig(lora_rank=2, lr=1e-2), "vision": TrainedConfig()},
    "second": {"backbone": TrainedConfig(lora_rank=3, lr=1e-2), "condition_adapter": TrainedConfig()},
}


@pytest.fixture
def config(make_model: Callable[..., WorldModel], tmp_path: Path) -> TrainConfig:
    """Two stages by LoRA, from a saved model."""
    model = make_model(image_size=64, world="shapes")
    folder = model.save_pretrained(tmp_path / "base", dtype=torch.float32)
    return TrainConfig(
        model=model.config,
        stages={
            name: StageConfig(
                "state",
                steps=3,
                batch_size=2,
                warmup_steps=1,
                tasks={"rounds": 1.0},
                train=train,
                ema_decay=0.5,
            )
            for name, train in STAGES.items()
        },
        data=DataConfig({"shapes": SourceConfig("shapes")}),
        init_from=str(folder),
        run_dir=str(tmp_path / "run"),
        precision="fp32",
        checkpoint_every=1,
        keep_checkpoints=9,
    )


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").iterdir())


def stopped_and_resumed(config: TrainConfig, steps: int) -> Path:
    """Stop after a number of steps, then finish."""
    asked = itertools.count(1)
    finetune.train(config, stop=lambda: next(asked) >= steps)
    return finetune.train(config)


def test_checkpoints_hold_no_frozen_weight_and_resume_bit_for_bit(
    config: TrainConfig, tmp_path: Path
) -> None:
    straight = finetune.train(config)
    whole = sum(
        tensor.nbytes
        for file in Path(config.init_from or "").rglob("*.safetensors")
        for tensor in load_file(file).values()
    )
    for folder in checkpoints(Path(config.run_dir)):
        manifest = Manifest.read(folder)
        train = STAGES[manifest.progress["stage"]]
        weights = [name.removeprefix("model.") for name in manifest.tensors if name.startswith("model.")]
        frozen = {name for name in weights if not is_trained(name, train)}
        assert frozen == {"codec.latent_mean", "codec.latent_std"}  # which an objective may set
        assert any(".lora_" in name for name in weights)
        if manifest.progress["ended"]:
            assert sum(file.num_bytes for file in manifest.files) < whole / 2
    for steps in (2, 5):  # in the first stage and in the second, which goes on from the merged first
        halves = dataclasses.replace(config, run_dir=str(tmp_path / f"halves-{steps}"))
        resumed = stopped_and_resumed(halves, steps)
        for file in straight.rglob("*.safetensors"):
            assert file.read_bytes() == (resumed / file.relative_to(straight)).read_bytes(), file


def test_weights_do_not_change_before_they_are_copied(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(config, stages={"first": config.stages["first"]})
    straight = finetune.train(config)
    options = StagingOptions(False, False, use_async_staging=True, use_non_blocking_copy=False)
    monkeypatch.setattr(checkpointer, "pinned_stager", lambda: DefaultStager(options))
    copy = DefaultStager._stage

    def slow(self: DefaultStager, state: Any, **more: Any) -> Any:
        time.sleep(0.5)  # longer than a step
        return copy(self, state, **more)

    monkeypatch.setattr(DefaultStager, "_stage", slow)
    again = finetune.train(dataclasses.replace(config, run_dir=str(tmp_path / "again")))
    pairs = zip(checkpoints(straight.parent), checkpoints(again.parent), strict=True)
    for first, second in pairs:
        found, expected = (load_file(next(each.glob("*.safetensors"))) for each in (second, first))
        assert found.keys() == expected.keys()
        assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


def test_changed_files_are_refused_by_name(config: TrainConfig) -> None:
    finetune.train(config, stop=lambda: True)
    assert len(checkpoints(Path(config.run_dir))) == 1
    file = Path(config.init_from or "") / "generator" / "model.safetensors"
    original = file.read_bytes()
    tensors = load_file(file)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, file)
    with pytest.raises(ModelError, match=r"init_from/generator/model\.safetensors"):
        finetune.train(config)
    file.write_bytes(original)
    assert (finetune.train(config) / "config.json").is_file()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda tensors, name: tensors | {name: tensors[name] * float("nan")}, "not finite"),
        (lambda tensors, name: {key: each for key, each in tensors.items() if key != name}, "generator"),
        (lambda tensors, name: tensors | {"foreign.weight": tensors[name].clone()}, "foreign"),
        (lambda tensors, name: tensors | {name: tensors[name][:1]}, "generator"),
    ],
    ids=["not finite", "missing", "foreign", "another shape"],
)
def test_wrong_weights_end_a_run_before_its_first_step(
    config: TrainConfig, damage: Callable[[dict[str, torch.Tensor], str], dict[str, torch.Tensor]], named: str
) -> None:
    file = Path(config.init_from or "") / "generator" / "model.safetensors"
    save_file(damage(load_file(file), "embed.weight"), file)
    with pytest.raises(ModelError, match=named):
        finetune.train(config)
    assert not list(Path(config.run_dir).rglob("*.safetensors"))


def test_a_checkpoint_needs_those_that_its_stage_started_from(config: TrainConfig) -> None:
    finetune.train(config)
    run = Path(config.run_dir)
    *_, last = folders = checkpoints(run)
    first, second = chain(last)
    assert (second, Manifest.read(first).progress["stage"]) == (last, "first")
    file = next(first.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.warns(UserWarning, match=first.name):
        newest = checkpointer.latest(run)
    assert newest is not None and newest < first and newest in folders
