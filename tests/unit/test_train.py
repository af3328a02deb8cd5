"""Training: objectives train the components they name, and a stopped run resumes exactly."""

import dataclasses
import json
import math
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedTokenizerBase

from worldmodel import config as configs
from worldmodel.config import MeshConfig, StageConfig, TrainConfig, TrainedConfig
from worldmodel.data import loader
from worldmodel.data.loader import Batch
from worldmodel.errors import ConfigError, ModelError
from worldmodel.models import lora
from worldmodel.models.world_model import WorldModel
from worldmodel.report import read_metrics
from worldmodel.train import distributed, finetune, optim, publish, summary, trainer
from worldmodel.train.checkpoint import checkpointer, export
from worldmodel.train.objectives import base
from worldmodel.train.objectives.base import SampleRng
from worldmodel.train.trainer import StepResult, Trainer, freeze
from worldmodel.types import Action, Episode


def components(*names: str, **settings: TrainedConfig) -> dict[str, TrainedConfig]:
    """The `train` of a stage."""
    return {name: TrainedConfig() for name in names} | settings


ALIGNED = components(
    "backbone",
    "vision",
    "action",
    "queries",
    "blank_latents",
    "prompt_marker",
    "answer_marker",
    "condition_adapter",
)
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
    "lora": StageConfig(
        "state",
        tasks={"rounds": 1.0},
        train=components("vision", backbone=TrainedConfig(lora_rank=2)),
        rounds=1,
    ),
}


@pytest.fixture
def run_config(
    make_model: Callable[..., WorldModel],
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> TrainConfig:
    """A run of six steps of state alignment, mixed with text tasks."""
    monkeypatch.setattr(trainer, "build_tokenizer", lambda config: tokenizer)
    stage = StageConfig(
        "state",
        steps=6,
        batch_size=3,
        microbatch_size=2,
        warmup_steps=2,
        ema_decay=0.9,
        tasks={"rounds": 0.6, "describe": 0.4},
        train=ALIGNED,
        self_rollout=(0.5, 0.5),
    )
    return TrainConfig(
        model=make_model(image_size=64, world="shapes").config,
        stages={"state": stage},
        run_dir=str(tmp_path / "run"),
        precision="fp32",
        log_every=1,
        sample_every=2,
    )


def changed(config: TrainConfig, **values: object) -> TrainConfig:
    """Change the one stage of a run."""
    return dataclasses.replace(
        config, stages={"state": dataclasses.replace(config.stages["state"], **values)}
    )


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
    trained = {key.split(".")[0] for key in moved}
    assert trained
    assert trained <= set(stage.train)
    if name in ("codec", "language", "alignment", "generator", "lora"):
        assert trained == set(stage.train)
    if name == "lora":
        assert all(".lora_" in key for key in moved if key.startswith("backbone"))


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    newest = checkpointer.latest(run)
    assert newest is not None
    progress = checkpointer.load(newest, {})
    assert (progress["stage"], progress["step"], progress["ended"]) == ("state", 6, True)
    return load_file(next(newest.glob("*.safetensors")))


def test_a_stopped_run_resumes_bit_for_bit(run_config: TrainConfig, tmp_path: Path) -> None:
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
    assert [line["step"] for line in one.values()] == [1, 2, 3, 4, 5, 6]
    for step_done, line in one.items():
        losses = {key for key in line if "/" in key}
        assert {key: line[key] for key in losses} == {key: two[step_done][key] for key in losses}
    for file in model.rglob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "halves" / "model" / file.relative_to(model)).read_bytes()


def test_sigterm_stops_a_run_and_its_handler_is_restored(
    run_config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    step = Trainer.step

    def terminated(self: Trainer, batches: list[Batch], stop: bool, *rest: Any) -> StepResult:
        if batches[0].step == 0:
            signal.raise_signal(signal.SIGTERM)
        return step(self, batches, stop, *rest)

    monkeypatch.setattr(Trainer, "step", terminated)
    config = changed(run_config, steps=3, tasks={"rounds": 1.0})
    with finetune.StopSignal() as stop:
        assert finetune.train(config, stop=lambda: stop.received) == tmp_path / "run"
    assert stop.received
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_run_inside_another_program_leaves_its_signal_handlers(
    run_config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, during = signal.getsignal(signal.SIGTERM), []
    step = Trainer.step

    def watched(self: Trainer, *args: Any) -> StepResult:
        during.append(signal.getsignal(signal.SIGTERM))
        return step(self, *args)

    monkeypatch.setattr(Trainer, "step", watched)
    finetune.train(changed(run_config, steps=1, tasks={"rounds": 1.0}))
    assert [*during, signal.getsignal(signal.SIGTERM)] == [before, before]


def test_a_run_writes_metrics_plots_and_previews(
    run_config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finetune.train(run_config).parent
    assert (run / "losses.png").stat().st_size > 5000
    previews = sorted(path.name for path in (run / "samples").iterdir())
    assert previews
    assert set(previews) <= {f"state-{step:06d}.png" for step in (2, 4, 6)}
    line = read_metrics(run)["state"][6]
    assert {"samples_per_s", "tokens_per_s", "stall_share"} <= line.keys()
    assert json.loads((run / "config.json").read_text())["seed"] == 0
    printed = capsys.readouterr()
    assert "parameters" in printed.err + printed.out
    assert "1 processes on" in printed.err + printed.out


def test_losses_do_not_depend_on_the_microbatch_size(run_config: TrainConfig, tmp_path: Path) -> None:
    losses = []
    for size in (0, 1, 2):
        config = changed(run_config, microbatch_size=size, steps=2, tasks={"rounds": 1.0})
        run = finetune.train(dataclasses.replace(config, run_dir=str(tmp_path / str(size)))).parent
        losses.append([line["rounds/loss"] for line in read_metrics(run)["state"].values()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_losses_do_not_depend_on_activation_checkpointing(
    run_config: TrainConfig, tmp_path: Path, activations: str
) -> None:
    losses = []
    for policy in ("keep", activations):
        config = changed(run_config, steps=2, tasks={"rounds": 1.0})
        config = dataclasses.replace(config, activations=policy, run_dir=str(tmp_path / policy))
        run = finetune.train(config).parent
        losses.append([line["rounds/loss"] for line in read_metrics(run)["state"].values()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_stage_ends_with_the_average_of_its_weights(run_config: TrainConfig, tmp_path: Path) -> None:
    ends = []
    for decay in (0.0, 0.9):
        config = changed(run_config, ema_decay=decay, steps=3, tasks={"rounds": 1.0})
        finetune.train(dataclasses.replace(config, run_dir=str(tmp_path / str(decay))))
        newest = checkpointer.latest(tmp_path / str(decay))
        assert newest is not None
        ends.append(load_file(next(newest.glob("*.safetensors"))))
    name = "model.vision.merge.weight"
    assert ends[0][name].shape == ends[1][name].shape
    assert not torch.equal(ends[0][name], ends[1][name])
    weights = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    ema = optim.EMA([("a", weights[0])], decay=0.5)
    weights[0].data.fill_(1.0)
    ema.update(step=100)
    torch.testing.assert_close(ema.weights["a"], torch.full((3,), 0.5))
    ema.swap()
    torch.testing.assert_close(weights[0].data, torch.full((3,), 0.5))
    torch.testing.assert_close(ema.weights["a"], torch.ones(3))


def test_exported_weights_include_lora(run_config: TrainConfig, tmp_path: Path) -> None:
    train = {"backbone": TrainedConfig(lora_rank=2, lr=1e-2)}
    run = finetune.train(changed(run_config, train=train, ema_decay=0.0, tasks={"rounds": 1.0})).parent
    model = WorldModel.from_pretrained(run / "model")
    assert not any("lora" in name for name in model.state_dict())
    start = trainer.build_model(run_config)
    moved = {
        name
        for name, tensor in model.state_dict().items()
        if not torch.equal(tensor, start.state_dict()[name].bfloat16().float())
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
    assert finetune.main([str(config), "seed=5"]) == 0
    record = publish.training_record(Path(run_config.run_dir))
    assert record["command"] == f"worldmodel train {config} seed=5"
    assert [stage["steps"] for stage in record["stages"].values()] == [2]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert finetune.command_line("my.yaml") == (
        "torchrun --nproc-per-node 2 -m worldmodel.train.finetune my.yaml"
    )
    monkeypatch.setenv("GROUP_WORLD_SIZE", "4")
    assert "--nnodes 4 --nproc-per-node 2" in finetune.command_line("my.yaml")


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
    with pytest.raises(ModelError, match="run_dir"):
        finetune.train(dataclasses.replace(other, stages={**run_config.stages, "more": STAGES["state"]}))


def test_random_numbers_depend_on_the_sample_alone() -> None:
    together = SampleRng([(5, 1), (5, 2), (5, 3)])
    alone = SampleRng([(5, 2)])
    for draw in (lambda c: c.normal(2, 3), lambda c: c.uniform(4), lambda c: c.integers(7, 5)):
        assert torch.equal(draw(together)[1:2], draw(alone))
    assert not torch.equal(SampleRng([(5, 1)]).normal(8), SampleRng([(6, 1)]).normal(8))


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


# Learning rates, components and settings


def test_learning_rates_warm_up_stay_and_decay() -> None:
    stage = StageConfig(steps=100, warmup_steps=10, constant_fraction=0.5, tasks={"rounds": 1.0})
    factors = [optim.lr_factor(step, stage) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[10:51] == [1.0] * 41
    assert factors[51] < 1
    assert factors[51:] == sorted(factors[51:], reverse=True)
    assert factors[99] == pytest.approx(0.01, abs=0.025)


def test_muon_gets_the_matrices_of_layers(make_model: Callable[..., WorldModel]) -> None:
    model = make_model()
    model.requires_grad_(True)
    root = torch.nn.ModuleDict({"model": model})
    optimizers = optim.build_optimizers(root, STAGES["joint"])
    muon = {id(p) for group in optimizers["muon"].param_groups for p in group["params"]}
    chosen = [name for name, p in model.named_parameters() if id(p) in muon]
    assert chosen
    assert all(".layers." in name for name in chosen)
    assert not any("embed_tokens" in name or "norm" in name for name in chosen)
    everything = [p for o in optimizers.values() for group in o.param_groups for p in group["params"]]
    assert len(everything) == len({id(p) for p in everything}) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("stage", "value"),
    [
        (StageConfig("stat", steps=1, tasks={"rounds": 1.0}), "'stat'"),
        (StageConfig("state", steps=1, tasks={"rounds": 1.0}, train=components("brain")), "'brain'"),
    ],
)
def test_a_stage_with_an_unknown_name_is_refused(
    run_config: TrainConfig, stage: StageConfig, value: str
) -> None:
    with pytest.raises(ConfigError, match=value):
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
        ["mesh.sp=0"],
        ["stages.state.train=[backbone]"],
        ["precision=fp8"],
        ["activations=some"],
        ["stages.state.train.backbone.lora_rank=-1"],
        ["keep_checkpoints=1"],
    ],
    ids=str,
)
def test_a_wrong_setting_is_reported_in_one_line(overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        configs.load("shapes_tiny", overrides)
    assert "\n" not in str(caught.value)


def test_overrides_take_precedence_and_keep_their_types() -> None:
    config = configs.load("shapes_tiny", ["seed=5", "stages.state.lr=1e-4", "model.action.keys=[red]"])
    assert config.seed == 5
    assert config.stages["state"].lr == 1e-4
    assert config.model.action.keys == ("red",)
    assert list(config.stages) == list(configs.load("shapes_tiny").stages)


def test_a_run_starts_from_a_saved_model(make_model: Callable[..., WorldModel], tmp_path: Path) -> None:
    model = make_model(image_size=64)
    folder = model.save_pretrained(tmp_path / "before")
    stage = StageConfig(
        "state", steps=1, batch_size=1, tasks={"rounds": 1.0}, train=components("vision"), rounds=1
    )
    config = TrainConfig(
        model=model.config, stages={"state": stage}, init_from=str(folder), run_dir=str(tmp_path / "run")
    )
    after = WorldModel.from_pretrained(finetune.train(config))
    kept, moved = model.codec.state_dict(), model.vision.state_dict()
    for name, tensor in after.codec.state_dict().items():
        torch.testing.assert_close(tensor, kept[name], rtol=1e-2, atol=1e-3)
    assert any(not torch.equal(tensor, moved[name]) for name, tensor in after.vision.state_dict().items())
    assert after.backbone.token_ids("the red ball") == model.backbone.token_ids("the red ball")


def test_components_have_their_own_learning_rates(make_model: Callable[..., WorldModel]) -> None:
    train = components("vision", "generator", backbone=TrainedConfig(lr=1e-5, muon_lr=0.0))
    stage = StageConfig(tasks={"rounds": 1.0}, train=train, lr=1e-3, muon_lr=0.02, warmup_steps=10)
    model = make_model()
    freeze(model, stage)
    optimizers = optim.build_optimizers(torch.nn.ModuleDict({"model": model}), stage)
    optim.set_learning_rates(optimizers, stage, step=4)
    rates = {
        id(p): group["lr"] for o in optimizers.values() for group in o.param_groups for p in group["params"]
    }
    for name, parameter in model.named_parameters():
        if name.startswith("backbone"):
            assert rates[id(parameter)] == pytest.approx(0.5e-5)
        elif name.startswith("vision"):
            assert rates[id(parameter)] == pytest.approx(0.5e-3)
        elif name.startswith("generator") and optim.is_layer_matrix(name, parameter):
            assert rates[id(parameter)] == pytest.approx(0.01)


def test_a_mesh_of_the_wrong_size_is_refused(
    run_config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"mesh\.sp 3"):
        finetune.train(dataclasses.replace(run_config, mesh=MeshConfig(sp=3)))
    assert not dist.is_initialized()
    assert finetune.main(["no_such_config"]) == 2
    assert "no_such_config" in capsys.readouterr().err


def test_flops_of_a_step_match_the_count_of_torch(model: WorldModel) -> None:
    stage = StageConfig(batch_size=2, rounds=2, tasks={"rounds": 1.0})
    context = torch.randn(2, 2, 1, *model.blank_latents.shape)
    with FlopCounterMode(display=False) as counter:
        model(context, [[Action(), Action()]] * 2)
    counted = sum(
        sum(found.values())
        for name, found in counter.get_flop_counts().items()
        if re.fullmatch(r"WorldModel\.backbone\.model\.model\.layers\.\d+", name)
    )
    backbone, generator = summary.step_flops(model, stage)
    # Only the forward pass, a third of the total; torch counts attention without the causal mask.
    assert counted / (backbone / 3) == pytest.approx(1, abs=0.3)
    assert generator > 0


def test_a_share_of_the_actions_is_dropped() -> None:
    actions = (Action("it jumps"),) * 5
    episodes = [Episode(f"{index}", actions=actions) for index in range(200)]
    batch = Batch(step=0, task="rounds", indices=tuple(range(200)), episodes=episodes, self_rollout=False)

    def kept(batch: Batch) -> list[tuple[Action, ...]]:
        return [episode.actions for episode in batch.episodes]

    def rng(rows: range) -> SampleRng:
        return SampleRng([(7, index) for index in rows])

    assert base.drop_actions(batch, rng(range(200)), 0.0) is batch
    dropped = kept(base.drop_actions(batch, rng(range(200)), 0.3))
    share = sum(act == Action() for row in dropped for act in row) / 1000
    assert share == pytest.approx(0.3, abs=0.05)
    alone = dataclasses.replace(batch, episodes=episodes[9:11], indices=(9, 10))
    assert kept(base.drop_actions(alone, rng(range(9, 11)), 0.3)) == dropped[9:11]
