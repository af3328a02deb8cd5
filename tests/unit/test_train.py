"""Training: every objective learns with the parts it names, and a run that was stopped goes on exactly."""

import dataclasses
import json
import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from worldmodel import config as configs
from worldmodel.config import StageConfig, TrainConfig
from worldmodel.data import loader
from worldmodel.data.sources import ShapesSource
from worldmodel.errors import ConfigError, ModelError
from worldmodel.models.world_model import WorldModel
from worldmodel.train import checkpoint, finetune, optim
from worldmodel.train.objectives import OBJECTIVES
from worldmodel.types import Episode

SPEAKING = ("backbone", "vision", "action", "queries", "unseen", "ask", "answer", "adapter")
STAGES = {
    "codec": StageConfig("codec", tasks={"rounds": 1.0}, train=("codec",), muon_lr=0, rounds=1),
    "language": StageConfig("language", tasks={"document": 1.0}, train=("backbone",)),
    "alignment": StageConfig("alignment", tasks={"rounds": 1.0}, train=("vision",), muon_lr=0, rounds=1),
    "state": StageConfig("state", tasks={"rounds": 1.0}, train=SPEAKING, self_rollout=(1.0, 1.0)),
    "describe": StageConfig("state", tasks={"describe": 1.0}, train=SPEAKING),
    "inverse": StageConfig("state", tasks={"inverse": 1.0}, train=SPEAKING),
    "imagine": StageConfig("state", tasks={"imagine": 1.0}, train=SPEAKING, rounds=1),
    "generator": StageConfig("generator", tasks={"rounds": 1.0}, train=("adapter", "generator"), rounds=1),
    "joint": StageConfig(
        "joint", tasks={"rounds": 1.0}, train=(*SPEAKING, "generator"), rounds=2, self_rollout=(1.0, 1.0)
    ),
}


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Gives back the signal handlers that a run takes."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture
def run_config(
    make_model: Callable[..., WorldModel],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> TrainConfig:
    """A run of six steps of state alignment, with text among them."""
    monkeypatch.setattr(finetune, "build_tokenizer", lambda config: tokenizer)
    stage = StageConfig(
        "state",
        steps=6,
        batch_size=2,
        warmup_steps=2,
        tasks={"rounds": 0.6, "describe": 0.4},
        train=SPEAKING,
        self_rollout=(0.5, 0.5),
    )
    model = make_model(image_size=64).config
    return TrainConfig(model=model, stages={"state": stage}, run_dir=str(tmp_path / "run"), precision="fp32")


@pytest.mark.parametrize("name", STAGES)
def test_every_objective_moves_the_parts_it_names(make_model: Callable[..., WorldModel], name: str) -> None:
    stage = dataclasses.replace(STAGES[name], steps=2, batch_size=2)
    model = make_model(image_size=64)
    objective = OBJECTIVES[stage.objective](model)
    finetune.freeze(model, stage.train)
    both = torch.nn.ModuleDict({"model": model, "objective": objective})
    optimizers = optim.build(both, stage)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for batch in loader.batches(ShapesSource(), stage, seed=0, first_step=0):
        optim.set_rates(optimizers, stage, batch.step)
        losses = objective(model, batch, torch.Generator().manual_seed(batch.step))
        assert all(math.isfinite(float(value.detach())) for value in losses.values())
        losses["loss"].backward()
        touched = {key.split(".")[0] for key, p in model.named_parameters() if p.grad is not None}
        assert touched <= set(stage.train)
        assert all(p.grad.isfinite().all() for p in both.parameters() if p.grad is not None)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    moved = {key.split(".")[0] for key, t in model.state_dict().items() if not torch.equal(t, before[key])}
    assert moved
    assert moved <= set(stage.train)
    if name in ("codec", "language", "alignment", "generator"):
        assert moved == set(stage.train)


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    newest = checkpoint.latest(run)
    assert newest is not None
    assert newest[1] == {"stage": "state", "step": 6, "end_of_stage": True}
    return load_file(newest[0] / "weights.safetensors")


def test_a_stopped_run_goes_on_bit_for_bit(
    run_config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = finetune.train(run_config)
    assert (model / "config.json").is_file()

    class StopsAfterThree(finetune.StopSignal):
        asked_for = 0

        def agreed(self, processes: object) -> bool:
            self.asked_for += 1
            self.asked = self.asked_for == 3
            return self.asked

    halves = dataclasses.replace(run_config, run_dir=str(tmp_path / "halves"))
    with monkeypatch.context() as patch:
        patch.setattr(finetune, "StopSignal", StopsAfterThree)
        assert finetune.train(halves) == tmp_path / "halves"
    newest = checkpoint.latest(tmp_path / "halves")
    assert newest is not None
    assert newest[1] == {"stage": "state", "step": 3, "end_of_stage": False}
    assert not (tmp_path / "halves" / "model").exists()

    torch.manual_seed(99)  # nothing may depend on what the process drew before
    finetune.train(halves)
    straight, resumed = final_weights(tmp_path / "run"), final_weights(tmp_path / "halves")
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())
    for file in model.rglob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "halves" / "model" / file.relative_to(model)).read_bytes()


def test_a_finished_run_starts_no_work(run_config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    one_step = dataclasses.replace(
        run_config, stages={"state": dataclasses.replace(run_config.stages["state"], steps=1)}
    )
    model = finetune.train(one_step)
    before = (model / "adapter" / "model.safetensors").read_bytes()
    monkeypatch.setattr(loader, "batches", None)
    assert finetune.train(one_step) == model
    assert (model / "adapter" / "model.safetensors").read_bytes() == before
    written = json.loads((model.parent / "config.json").read_text())
    assert configs.build(TrainConfig, written) == one_step


def test_a_checkpoint_of_another_model_is_refused(
    run_config: TrainConfig, make_model: Callable[..., WorldModel], tmp_path: Path
) -> None:
    folder = checkpoint.save(tmp_path, "state", 1, make_model(), {}, keep=True)
    with pytest.raises((ModelError, RuntimeError)):
        checkpoint.restore(folder, torch.nn.Linear(2, 2), None)


def test_old_checkpoints_go_and_ends_of_stages_stay(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    checkpoint.save(tmp_path, "codec", 9, model, {}, keep=True)
    for step in range(1, 5):
        checkpoint.save(tmp_path, "state", step, model, {}, keep=False)
    names = [path.name.split("-", 1)[1] for path in sorted((tmp_path / "checkpoints").iterdir())]
    assert names == ["codec-9", "state-3", "state-4"]


# The order of samples


def names(
    first_step: int, rank: int = 0, world_size: int = 1, seed: int = 3, num_workers: int = 0
) -> list[list[str]]:
    stage = StageConfig(steps=6, batch_size=2, rounds=1, tasks={"rounds": 0.5, "describe": 0.5})
    stream = loader.batches(ShapesSource(), stage, seed, first_step, rank, world_size, num_workers)
    return [[episode.name for episode in batch.episodes] for batch in stream]


def test_order_is_a_function_of_seed_and_step() -> None:
    whole = names(0)
    assert len(whole) == 6
    assert len({name for batch in whole for name in batch}) == 12
    assert names(4) == whole[4:]
    assert names(0, num_workers=2) == whole
    assert names(0, seed=4) != whole


def test_processes_share_a_step_without_overlap() -> None:
    one, two = names(0, rank=0, world_size=2), names(0, rank=1, world_size=2)
    for first, second in zip(one, two, strict=True):
        assert first[0].split("/")[1] == second[0].split("/")[1]
        assert not set(first) & set(second)


def test_an_episode_is_the_same_every_time() -> None:
    def pixels(episode: Episode) -> list[np.ndarray]:
        return list(episode.observations)

    for task in ("rounds", "imagine", "describe", "ask", "inverse", "document"):
        one, two = (ShapesSource().episode(task, 1, 7, 2) for _ in range(2))
        assert (one.actions, one.prompt, one.answer) == (two.actions, two.prompt, two.answer)
        assert all(np.array_equal(a, b) for a, b in zip(pixels(one), pixels(two), strict=True))


# Rates, parts and settings


def test_rates_warm_up_stay_and_fall() -> None:
    stage = StageConfig(steps=100, warmup_steps=10, constant_fraction=0.5, tasks={"rounds": 1.0})
    factors = [optim.schedule(step, stage) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[10:51] == [1.0] * 41
    assert factors[51] < 1
    assert factors[51:] == sorted(factors[51:], reverse=True)
    assert factors[99] == pytest.approx(0.01, abs=0.025)


def test_muon_takes_the_matrices_of_layers_only(make_model: Callable[..., WorldModel]) -> None:
    model = make_model()
    model.requires_grad_(True)
    optimizers = optim.build(model, STAGES["joint"])
    muon = {id(p) for group in optimizers["muon"].param_groups for p in group["params"]}
    chosen = [name for name, p in model.named_parameters() if id(p) in muon]
    assert chosen
    assert all(".layers." in name for name in chosen)
    assert not any("embed_tokens" in name or "norm" in name for name in chosen)
    everything = [p for o in optimizers.values() for group in o.param_groups for p in group["params"]]
    assert len(everything) == len({id(p) for p in everything}) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("stage", "told"),
    [
        (StageConfig("stat", steps=1, tasks={"rounds": 1.0}), "'stat'"),
        (StageConfig("state", steps=1, tasks={"rounds": 1.0}, train=("brain",)), "'brain'"),
    ],
)
def test_a_stage_that_cannot_be(run_config: TrainConfig, stage: StageConfig, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        finetune.train(dataclasses.replace(run_config, stages={"state": stage}))


@pytest.mark.parametrize(
    "overrides",
    [
        ["sead=1"],
        ["seed=one"],
        ["stages.state.stepz=3"],
        ["stages.state.steps=0"],
        ["model.codec.image_size=30"],
        ["model.chunk_frames=7"],
        ["stages.fresh.steps=3"],
    ],
    ids=str,
)
def test_a_wrong_setting_is_one_sentence(overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        configs.load("shapes_tiny", overrides)
    assert "\n" not in str(caught.value)


def test_overrides_win_and_keep_their_types() -> None:
    config = configs.load("shapes_tiny", ["seed=5", "stages.state.lr=1e-4", "model.action.keys=[red]"])
    assert config.seed == 5
    assert config.stages["state"].lr == 1e-4
    assert config.model.action.keys == ("red",)
    assert list(config.stages) == list(configs.load("shapes_tiny").stages)


def test_a_run_starts_from_a_saved_model(make_model: Callable[..., WorldModel], tmp_path: Path) -> None:
    model = make_model(image_size=64)
    folder = model.save_pretrained(tmp_path / "before")
    stage = StageConfig("state", steps=1, batch_size=1, tasks={"rounds": 1.0}, train=("vision",), rounds=1)
    config = TrainConfig(
        model=model.config, stages={"state": stage}, init_from=str(folder), run_dir=str(tmp_path / "run")
    )
    after = WorldModel.from_pretrained(finetune.train(config))
    kept, moved = model.codec.state_dict(), model.vision.state_dict()
    for name, tensor in after.codec.state_dict().items():
        torch.testing.assert_close(tensor, kept[name], rtol=1e-2, atol=1e-3)
    assert any(not torch.equal(tensor, moved[name]) for name, tensor in after.vision.state_dict().items())
    assert after.backbone.token_ids("the red ball") == model.backbone.token_ids("the red ball")
