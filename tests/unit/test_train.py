"""Training: every objective learns with the parts it names, and a run that was stopped goes on exactly."""

import dataclasses
import json
import math
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

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
from worldmodel.train.trainer import Learner, Outcome, freeze
from worldmodel.types import Action, Episode


def parts(*names: str, **how: TrainedConfig) -> dict[str, TrainedConfig]:
    """What a stage trains."""
    return {name: TrainedConfig() for name in names} | how


SPEAKING = parts(
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
    "codec": StageConfig("codec", tasks={"rounds": 1.0}, train=parts("codec"), muon_lr=0, rounds=1),
    "language": StageConfig("language", tasks={"document": 1.0}, train=parts("backbone")),
    "alignment": StageConfig("alignment", tasks={"rounds": 1.0}, train=parts("vision"), muon_lr=0, rounds=1),
    "state": StageConfig("state", tasks={"rounds": 1.0}, train=SPEAKING, self_rollout=(1.0, 1.0)),
    "describe": StageConfig("state", tasks={"describe": 1.0}, train=SPEAKING),
    "inverse": StageConfig("state", tasks={"inverse": 1.0}, train=SPEAKING),
    "imagine": StageConfig("state", tasks={"imagine": 1.0}, train=SPEAKING, rounds=1),
    "generator": StageConfig(
        "generator", tasks={"rounds": 1.0}, train=parts("condition_adapter", "generator"), rounds=1
    ),
    "joint": StageConfig(
        "joint",
        tasks={"rounds": 1.0},
        train=SPEAKING | parts("generator"),
        rounds=2,
        self_rollout=(1.0, 1.0),
    ),
    "lora": StageConfig(
        "state", tasks={"rounds": 1.0}, train=parts("vision", backbone=TrainedConfig(lora_rank=2)), rounds=1
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
    monkeypatch.setattr(trainer, "build_tokenizer", lambda config: tokenizer)
    stage = StageConfig(
        "state",
        steps=6,
        batch_size=3,
        microbatch_size=2,
        warmup_steps=2,
        ema_decay=0.9,
        tasks={"rounds": 0.6, "describe": 0.4},
        train=SPEAKING,
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
def test_every_objective_moves_the_parts_it_names(run_config: TrainConfig, name: str) -> None:
    stage = dataclasses.replace(STAGES[name], steps=2, batch_size=2)
    config = dataclasses.replace(run_config, stages={name: stage})
    mesh = distributed.start(config)
    try:
        learns, _ = Learner.start(config, name, mesh, None)
        model = learns.root.model
        before = {key: distributed.whole(t).clone() for key, t in model.state_dict().items()}
        for batches in loader.batches(config.data, config.model, stage, seed=0):
            outcome = learns.step(batches, stop=False)
            assert all(math.isfinite(value) for value in outcome.terms.values())
            assert outcome.terms["loss"] > 0
        learns.finish(outcome.prepared)
        after = {key: distributed.whole(t) for key, t in model.state_dict().items()}
    finally:
        distributed.stop()
    moved = {key for key, tensor in after.items() if not torch.equal(tensor, before[key])}
    components = {key.split(".")[0] for key in moved}
    assert components
    assert components <= set(stage.train)
    if name in ("codec", "language", "alignment", "generator", "lora"):
        assert components == set(stage.train)
    if name == "lora":
        assert all(".lora_" in key for key in moved if key.startswith("backbone"))


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    newest = checkpointer.latest(run)
    assert newest is not None
    progress = checkpointer.load(newest, {})
    assert (progress["stage"], progress["step"], progress["ended"]) == ("state", 6, True)
    return load_file(next(newest.glob("*.safetensors")))


def test_a_stopped_run_goes_on_bit_for_bit(
    run_config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = finetune.train(run_config)
    assert (model / "config.json").is_file()

    step = Learner.step

    def asked(self: Learner, batches: list[Batch], stop: bool, left_out: list[tuple[str, str]]) -> Outcome:
        if batches[0].step == 2:  # the signal arrives while the third step is running
            signal.raise_signal(signal.SIGTERM)
            stop = True
        return step(self, batches, stop, left_out)

    halves = dataclasses.replace(run_config, run_dir=str(tmp_path / "halves"))
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", asked)
        assert finetune.train(halves) == tmp_path / "halves"
    newest = checkpointer.latest(tmp_path / "halves")
    assert newest is not None
    progress = checkpointer.load(newest, {})
    assert (progress["stage"], progress["step"], progress["ended"]) == ("state", 3, False)
    assert not (tmp_path / "halves" / "model").exists()

    torch.manual_seed(99)  # nothing may depend on what the process drew before
    finetune.train(halves)
    straight, resumed = final_weights(tmp_path / "run"), final_weights(tmp_path / "halves")
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())
    one, two = (read_metrics(tmp_path / name)["state"] for name in ("run", "halves"))
    assert [line["step"] for line in one.values()] == [1, 2, 3, 4, 5, 6]
    for step_done, line in one.items():
        told = {key for key in line if "/" in key}
        assert {key: line[key] for key in told} == {key: two[step_done][key] for key in told}
    for file in model.rglob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "halves" / "model" / file.relative_to(model)).read_bytes()


def test_a_run_shows_itself(run_config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    run = finetune.train(run_config).parent
    assert (run / "losses.png").stat().st_size > 5000
    pictures = sorted(path.name for path in (run / "samples").iterdir())
    assert pictures
    assert set(pictures) <= {f"state-{step:06d}.png" for step in (2, 4, 6)}
    line = read_metrics(run)["state"][6]
    assert {"samples_per_s", "tokens_per_s", "stall_share"} <= line.keys()
    assert json.loads((run / "config.json").read_text())["seed"] == 0
    said = capsys.readouterr()
    assert "parameters" in said.err + said.out
    assert "1 processes on" in said.err + said.out


def test_microbatches_change_nothing(run_config: TrainConfig, tmp_path: Path) -> None:
    losses = []
    for size in (0, 1, 2):
        config = changed(run_config, microbatch_size=size, steps=2, tasks={"rounds": 1.0})
        run = finetune.train(dataclasses.replace(config, run_dir=str(tmp_path / str(size)))).parent
        losses.append([line["rounds/loss"] for line in read_metrics(run)["state"].values()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_recomputing_activations_changes_nothing(
    run_config: TrainConfig, tmp_path: Path, activations: str
) -> None:
    losses = []
    for policy in ("keep", activations):
        config = changed(run_config, steps=2, tasks={"rounds": 1.0})
        config = dataclasses.replace(config, activations=policy, run_dir=str(tmp_path / policy))
        run = finetune.train(config).parent
        losses.append([line["rounds/loss"] for line in read_metrics(run)["state"].values()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_average_lags_and_is_what_the_stage_ends_with(run_config: TrainConfig, tmp_path: Path) -> None:
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
    average = optim.Average([("a", weights[0])], decay=0.5)
    weights[0].data.fill_(1.0)
    average.update(step=100)
    torch.testing.assert_close(average.weights["a"], torch.full((3,), 0.5))
    average.swap()
    torch.testing.assert_close(weights[0].data, torch.full((3,), 0.5))
    torch.testing.assert_close(average.weights["a"], torch.ones(3))


def test_what_lora_learned_is_in_the_exported_weights(run_config: TrainConfig, tmp_path: Path) -> None:
    how = {"backbone": TrainedConfig(lora_rank=2, lr=1e-2)}
    run = finetune.train(changed(run_config, train=how, ema_decay=0.0, tasks={"rounds": 1.0})).parent
    model = WorldModel.from_pretrained(run / "model")
    assert not any("lora" in name for name in model.state_dict())
    start = trainer.start_model(run_config)
    moved = {
        name
        for name, tensor in model.state_dict().items()
        if not torch.equal(tensor, start.state_dict()[name].bfloat16().float())
    }
    assert moved
    assert all(name.startswith("backbone.model") and "proj" in name for name in moved)


def test_merging_lora_keeps_what_the_model_computes(make_model: Callable[..., WorldModel]) -> None:
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


def test_a_finished_run_starts_no_work(run_config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    one_step = changed(run_config, steps=1)
    model = finetune.train(one_step)
    before = (model / "condition_adapter" / "model.safetensors").read_bytes()
    monkeypatch.setattr(loader, "batches", None)
    assert finetune.train(one_step) == model
    assert (model / "condition_adapter" / "model.safetensors").read_bytes() == before
    written = json.loads((model.parent / "config.json").read_text())
    assert written.pop("origin")["num_processes"] == 1
    assert configs.build(TrainConfig, written) == one_step


def test_a_run_remembers_how_it_was_started(
    run_config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(json.dumps(configs.to_dict(changed(run_config, steps=2))))
    assert finetune.main([str(config), "seed=5"]) == 0
    made = publish.how_trained(Path(run_config.run_dir))
    assert made["command"] == f"worldmodel train {config} seed=5"
    assert [stage["steps"] for stage in made["stages"].values()] == [2]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert finetune.command_line("my.yaml") == (
        "torchrun --nproc-per-node 2 -m worldmodel.train.finetune my.yaml"
    )
    monkeypatch.setenv("GROUP_WORLD_SIZE", "4")
    assert "--nnodes 4 --nproc-per-node 2" in finetune.command_line("my.yaml")


def test_a_checkpoint_becomes_a_model(run_config: TrainConfig, tmp_path: Path) -> None:
    run = finetune.train(dataclasses.replace(run_config, checkpoint_every=2)).parent
    folders = sorted((run / "checkpoints").iterdir())
    assert len(folders) == 3  # two of the stage, and its end
    for place, folder in enumerate(folders):
        assert export.main([str(folder), str(tmp_path / str(place))]) == 0
        WorldModel.from_pretrained(tmp_path / str(place))
    last = (tmp_path / "2" / "vision" / "model.safetensors").read_bytes()
    assert last == (run / "model" / "vision" / "model.safetensors").read_bytes()


def test_a_run_of_another_model_is_refused(run_config: TrainConfig) -> None:
    finetune.train(changed(run_config, steps=1))
    other = dataclasses.replace(
        run_config, model=dataclasses.replace(run_config.model, generator=configs.GeneratorConfig(width=96))
    )
    with pytest.raises(ModelError, match="run_dir"):
        finetune.train(dataclasses.replace(other, stages={**run_config.stages, "more": STAGES["state"]}))


def test_chance_belongs_to_the_sample() -> None:
    together = SampleRng([(5, 1), (5, 2), (5, 3)])
    alone = SampleRng([(5, 2)])
    for draw in (lambda c: c.normal(2, 3), lambda c: c.uniform(4), lambda c: c.below(7, 5)):
        assert torch.equal(draw(together)[1:2], draw(alone))
    assert not torch.equal(SampleRng([(5, 1)]).normal(8), SampleRng([(6, 1)]).normal(8))


def test_a_gradient_that_is_not_finite_moves_nothing(
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
    root = torch.nn.ModuleDict({"model": model})
    optimizers = optim.build(root, STAGES["joint"])
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
        (StageConfig("state", steps=1, tasks={"rounds": 1.0}, train=parts("brain")), "'brain'"),
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
        ["mesh.sp=0"],
        ["stages.state.train=[backbone]"],
        ["precision=fp8"],
        ["activations=some"],
        ["stages.state.train.backbone.lora_rank=-1"],
        ["keep_checkpoints=1"],
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
    stage = StageConfig(
        "state", steps=1, batch_size=1, tasks={"rounds": 1.0}, train=parts("vision"), rounds=1
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


def test_components_may_have_rates_of_their_own(make_model: Callable[..., WorldModel]) -> None:
    train = parts("vision", "generator", backbone=TrainedConfig(lr=1e-5, muon_lr=0.0))
    stage = StageConfig(tasks={"rounds": 1.0}, train=train, lr=1e-3, muon_lr=0.02, warmup_steps=10)
    model = make_model()
    freeze(model, stage)
    optimizers = optim.build(torch.nn.ModuleDict({"model": model}), stage)
    optim.set_rates(optimizers, stage, step=4)
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


def test_a_mesh_that_does_not_fit_is_one_sentence(
    run_config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"mesh\.sp 3"):
        finetune.train(dataclasses.replace(run_config, mesh=MeshConfig(sp=3)))
    assert not dist.is_initialized()
    assert finetune.main(["no_such_config"]) == 2
    assert "no_such_config" in capsys.readouterr().err


def test_the_work_of_a_step_is_what_torch_counts(model: WorldModel) -> None:
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
    # Forward alone, a third of the whole; torch counts attention as a square, of which the mask leaves half.
    assert counted / (backbone / 3) == pytest.approx(1, abs=0.3)
    assert generator > 0


def test_a_share_of_the_actions_is_dropped() -> None:
    actions = (Action("it jumps"),) * 5
    episodes = [Episode(f"{index}", actions=actions) for index in range(200)]
    batch = Batch(step=0, task="rounds", indices=tuple(range(200)), episodes=episodes, own=False)

    def kept(batch: Batch) -> list[tuple[Action, ...]]:
        return [episode.actions for episode in batch.episodes]

    def chance(rows: range) -> SampleRng:
        return SampleRng([(7, index) for index in rows])

    assert base.drop_actions(batch, chance(range(200)), 0.0) is batch
    dropped = kept(base.drop_actions(batch, chance(range(200)), 0.3))
    share = sum(act == Action() for row in dropped for act in row) / 1000
    assert share == pytest.approx(0.3, abs=0.05)
    alone = dataclasses.replace(batch, episodes=episodes[9:11], indices=(9, 10))
    assert kept(base.drop_actions(alone, chance(range(9, 11)), 0.3)) == dropped[9:11]
