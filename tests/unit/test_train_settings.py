"""Settings of training: learning rates, components, configs, random numbers and the summary of a stage."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from worldmodel import config as configs
from worldmodel.actions import Action
from worldmodel.config import ActionConfig, BackboneConfig, StageConfig, TrainConfig, TrainedConfig
from worldmodel.data.loader import Batch
from worldmodel.episodes import Episode
from worldmodel.errors import ConfigError
from worldmodel.models import lora
from worldmodel.models.loading import deferred
from worldmodel.models.world_model import WorldModel
from worldmodel.parallel.mesh import Mesh
from worldmodel.train import start
from worldmodel.train.components import check_components, settings_of
from worldmodel.train.objectives import base
from worldmodel.train.objectives.base import SampleRng
from worldmodel.train.optim.average import EMA
from worldmodel.train.optim.optimizers import build_optimizers, learning_rates
from worldmodel.train.optim.schedule import set_learning_rates, warmup_stable_decay
from worldmodel.train.run import summary
from worldmodel.train.trainer import build_root, freeze


def components(*names: str, **settings: TrainedConfig) -> dict[str, TrainedConfig]:
    """The `train` of a stage."""
    return {name: TrainedConfig() for name in names} | settings


def test_learning_rates_warm_up_stay_and_decay() -> None:
    stage = StageConfig(steps=100, warmup_steps=10, constant_fraction=0.5, tasks={"rounds": 1.0})
    factors = [warmup_stable_decay(step, stage) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[10:51] == [1.0] * 41
    assert factors[51] < 1
    assert factors[51:] == sorted(factors[51:], reverse=True)
    assert factors[99] == pytest.approx(0.01, abs=0.025)


def test_a_cosine_schedule_and_betas_are_settings_of_a_stage() -> None:
    stage = StageConfig(
        steps=110, warmup_steps=10, schedule="cosine", betas=(0.8, 0.9), tasks={"rounds": 1.0}
    )
    root = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"vision": torch.nn.Linear(2, 2)})})
    optimizers = build_optimizers(root, stage)
    assert all(group["betas"] == (0.8, 0.9) for group in optimizers["adamw"].param_groups)
    rates = []
    for step in (0, 9, 10, 60, 109):
        set_learning_rates(optimizers, stage, step)
        rates.append(learning_rates(root, optimizers)["lr/vision"] / stage.lr)
    assert rates == pytest.approx([0.1, 1, 1, 0.505, 0.01], abs=1e-3)
    with pytest.raises(ConfigError, match="betas"):
        StageConfig(betas=(0.9, 1.0), tasks={"rounds": 1.0})


def test_muon_gets_the_matrices_of_layers(make_model: Callable[..., WorldModel]) -> None:
    model = make_model()
    model.requires_grad_(True)
    root = torch.nn.ModuleDict({"model": model})
    optimizers = build_optimizers(root, StageConfig(tasks={"rounds": 1.0}, train=components("all")))
    muon = {id(p) for group in optimizers["muon"].param_groups for p in group["params"]}
    chosen = [name for name, p in model.named_parameters() if id(p) in muon]
    assert chosen
    assert all(".layers." in name for name in chosen)
    assert not any("embed_tokens" in name or "norm" in name for name in chosen)
    everything = [p for o in optimizers.values() for group in o.param_groups for p in group["params"]]
    assert len(everything) == len({id(p) for p in everything}) == len(list(model.parameters()))


def test_groups_of_components(make_model: Callable[..., WorldModel]) -> None:
    names = [name for name, _ in make_model().named_parameters()]
    vision, condition, everything = (TrainedConfig(lr=rate) for rate in (1e-3, 1e-4, 1e-5))
    train = components("adapters") | {"vision": vision, "condition_adapter": condition, "all": everything}
    large = ("backbone.", "generator.", "codec.")
    for name in names:
        expected = everything if name.startswith(large) else train["adapters"]
        expected = vision if name.startswith("vision.") else expected
        expected = condition if name.startswith("condition_adapter.") else expected
        assert settings_of(name, train) == expected, name
        assert settings_of(name, components("adapters")) == (
            None if name.startswith(large) else TrainedConfig()
        )
    assert settings_of("vision.encoder.weight", components("adapters")) is None


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (components("brain"), "'brain'"),
        (components("backbon"), "did you mean 'backbone'"),
        (components(adapters=TrainedConfig(lora_rank=2)), "adapters"),
        (
            components("generator.layers.0", generator=TrainedConfig(lora_rank=4)),
            r"generator\.layers\.0 has linear layers below train\.generator",
        ),
    ],
)
def test_wrong_components_are_refused(
    model: WorldModel, train: dict[str, TrainedConfig], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_components(model, train)


def test_settings_with_few_values_offer_the_closest() -> None:
    with pytest.raises(ConfigError, match=r"objective .*'stat'.*\bstate\b"):
        StageConfig("stat", tasks={"rounds": 1.0})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"model\.condition_adapter\.kind .*'streams'.*\bstream\b"):
        configs.load("shapes_tiny", ["model.condition_adapter.kind=streams"])
    with pytest.raises(ConfigError, match=r"stages\.state\.stepz .*\bsteps\b"):
        configs.load("shapes_tiny", ["stages.state.stepz=3"])


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
        ["checkpoint_every=0"],
        ["log_every=0"],
        ["sample_every=-1"],
        ["seed=-1"],
        ["hang_timeout_s=0"],
        ["hang_timeout_s=-1"],
        ["hang_timeout_s=.inf"],
        ["hang_timeout_s=1e12"],
        ["diagnostics.peak_tflops=.nan"],
        ["init_from={codec: 5}"],
        ["init_from={generator: [a]}"],
        ["stages.state.max_gradient_norm=0"],
        ["stages.state.max_gradient_norm=-1"],
        ["stages.state.max_gradient_norm=.nan"],
        ["stages.state.lr=-1"],
        ["stages.state.lr=.inf"],
        ["stages.state.muon_lr=-0.02"],
        ["stages.state.weight_decay=-1"],
        ["stages.state.self_rollout=[0,2]"],
        ["stages.state.train.backbone.lora_alpha=0"],
        ["stages.state.train.backbone.lr=-1"],
        ["stages.state.train.backbone.muon_lr=.nan"],
    ],
    ids=str,
)
def test_a_wrong_setting_is_reported_in_one_line(overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        configs.load("shapes_tiny", overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a/b", "", "..", "-x", "a\0"])
def test_names_of_stages_are_parts_of_names_of_files(name: str) -> None:
    stage = StageConfig(tasks={"rounds": 1.0})
    with pytest.raises(ConfigError, match="stage is named"):
        TrainConfig(stages={name: stage})
    assert TrainConfig(stages={"second 2.1_größer-x": stage})


def test_the_summary_warns_of_default_rates_for_pretrained_parts(
    make_model: Callable[..., WorldModel], tmp_path: Path
) -> None:
    model = make_model()
    model.backbone.save_pretrained(tmp_path / "base")
    config = dataclasses.replace(model.config, backbone=BackboneConfig(pretrained=str(tmp_path / "base")))
    stages = {
        "default": StageConfig(tasks={"rounds": 1.0}, train=components("backbone", "adapters")),
        "own": StageConfig(
            tasks={"rounds": 1.0}, train=components("adapters", backbone=TrainedConfig(lr=1e-5, muon_lr=0))
        ),
        "frozen": StageConfig(tasks={"rounds": 1.0}, train=components("adapters")),
    }
    run = TrainConfig(model=config, stages=stages)
    found = {name: summary.describe(build_root(run, name), stages[name], Mesh()) for name in stages}
    (rates,) = [line for line in found["own"] if line.startswith("  rates")]
    assert "backbone lr 1e-05;" in rates and "state lr 0.002, muon_lr 0.02" in rates
    warned = {name: [line for line in lines if line.startswith("  warning")] for name, lines in found.items()}
    assert warned["own"] == warned["frozen"] == []
    (line,) = warned["default"]
    assert "train.backbone" in line and "0.002" in line and "0.02" in line


@pytest.mark.parametrize("kind", ["wan", "ltx", "cog"])
def test_muon_gets_the_matrices_of_transformers_of_diffusers(kind: str) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed: openworldmodel[diffusers]")
    import diffusers

    sizes = {"num_layers": 1, "num_attention_heads": 2}
    network = {
        "wan": lambda: diffusers.WanTransformer3DModel(
            attention_head_dim=12, text_dim=8, freq_dim=8, ffn_dim=16, **sizes
        ),
        "ltx": lambda: diffusers.LTXVideoTransformer3DModel(
            attention_head_dim=12, cross_attention_dim=24, caption_channels=8, **sizes
        ),
        "cog": lambda: diffusers.CogVideoXTransformer3DModel(
            attention_head_dim=16, time_embed_dim=8, text_embed_dim=8, **sizes
        ),
    }[kind]()
    root = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"generator": network})})
    stage = StageConfig(tasks={"rounds": 1.0}, train=components("generator"))
    muon = {id(p) for group in build_optimizers(root, stage)["muon"].param_groups for p in group["params"]}
    chosen = {name for name, p in network.named_parameters() if id(p) in muon}
    linear = {
        f"{name}.weight"
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.Linear) and "blocks.0." in name and ".norm" not in name
    }
    assert chosen == linear and len(chosen) >= 6


def test_overrides_take_precedence_and_keep_their_types() -> None:
    config = configs.load("shapes_tiny", ["seed=5", "stages.state.lr=1e-4", "model.action.keys=[red]"])
    assert config.seed == 5
    assert config.stages["state"].lr == 1e-4
    assert config.model.action.keys == ("red",)
    assert list(config.stages) == list(configs.load("shapes_tiny").stages)


def test_components_have_their_own_learning_rates(make_model: Callable[..., WorldModel]) -> None:
    train = components("vision", "generator", backbone=TrainedConfig(lr=1e-5, muon_lr=0.0))
    stage = StageConfig(tasks={"rounds": 1.0}, train=train, lr=1e-3, muon_lr=0.02, warmup_steps=10)
    model = make_model()
    freeze(model, stage)
    optimizers = build_optimizers(torch.nn.ModuleDict({"model": model}), stage)
    set_learning_rates(optimizers, stage, step=4)
    rates = {
        id(p): group["lr"] for o in optimizers.values() for group in o.param_groups for p in group["params"]
    }
    for name, parameter in model.named_parameters():
        if name.startswith("backbone"):
            assert rates[id(parameter)] == pytest.approx(0.5e-5)
        elif name.startswith("vision"):
            assert rates[id(parameter)] == pytest.approx(0.5e-3)
        elif name.startswith("generator.layers") and name.endswith("qkv.weight"):
            assert rates[id(parameter)] == pytest.approx(0.01)


@pytest.mark.parametrize(("muon_lr", "optimizer"), [(None, "adamw"), (0.0, "adamw"), (0.01, "muon")])
def test_muon_trains_lora_where_the_component_has_a_rate_for_it(
    make_model: Callable[..., WorldModel], muon_lr: float | None, optimizer: str
) -> None:
    train = components("generator", backbone=TrainedConfig(lora_rank=4, lr=1e-5, muon_lr=muon_lr))
    stage = StageConfig(tasks={"rounds": 1.0}, train=train, lr=1e-3, muon_lr=0.02)
    model = make_model()
    lora.add(model, stage.train)
    freeze(model, stage)
    optimizers = build_optimizers(torch.nn.ModuleDict({"model": model}), stage)
    peaks = {
        id(p): (name, group["peak"])
        for name, each in optimizers.items()
        for group in each.param_groups
        for p in group["params"]
    }
    factors = [p for name, p in model.named_parameters() if name.startswith("backbone") and p.requires_grad]
    assert len(factors) > 10
    assert {peaks[id(factor)] for factor in factors} == {(optimizer, muon_lr or 1e-5)}


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


def test_random_numbers_depend_on_the_sample_alone() -> None:
    together = SampleRng([(5, 1), (5, 2), (5, 3)])
    alone = SampleRng([(5, 2)])
    for draw in (lambda c: c.normal(2, 3), lambda c: c.uniform(4), lambda c: c.integers(7, 5)):
        assert torch.equal(draw(together)[1:2], draw(alone))
    assert not torch.equal(SampleRng([(5, 1)]).normal(8), SampleRng([(6, 1)]).normal(8))


def test_the_average_follows_the_weights() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    ema = EMA([("a", weight)], decay=0.5)
    weight.data.fill_(1.0)
    ema.update(step=100)
    torch.testing.assert_close(ema.weights["a"], torch.full((3,), 0.5))
    ema.swap()
    torch.testing.assert_close(weight.data, torch.full((3,), 0.5))
    torch.testing.assert_close(ema.weights["a"], torch.ones(3))


def test_weights_of_actions_are_taken_by_name(make_model: Callable[..., WorldModel], tmp_path: Path) -> None:
    action = ActionConfig(keys=("left", "right"), per_round=2, vector={"names": ("x", "y")})
    saved = make_model(action=action)
    folder = str(saved.save_pretrained(tmp_path / "before", dtype=torch.float32))

    def started(init_from: Any = folder, **changes: Any) -> tuple[WorldModel, dict[str, torch.Tensor]]:
        config = dataclasses.replace(saved.config, action=dataclasses.replace(saved.config.action, **changes))
        model = start.build_model(TrainConfig(model=config, init_from=init_from, seed=9))
        deferred.load_shards(model)
        return model, model.action.state_dict()

    before = saved.action.state_dict()
    model, same = started()
    assert all(torch.equal(same[name], tensor) for name, tensor in before.items())
    assert model.action.new_weights == set()
    names = ("y", "grip", "x")
    model, state = started(keys=("jump", "right", "left"), per_round=4, mouse=True, vector={"names": names})
    assert torch.equal(state["keys.weight"][1:], before["keys.weight"].flip(0))
    assert torch.equal(state["places.weight"][:2], before["places.weight"])
    assert torch.equal(state["vector.0.weight"][:, ::2], before["vector.0.weight"].flip(1))
    for name in ("marker", "vector.0.bias", "vector.2.weight"):
        assert torch.equal(state[name], before[name])
    assert (
        state["keys.weight"][0].any() and not (state["keys.weight"][0] == before["keys.weight"]).all(1).any()
    )
    partly = {"keys.weight", "places.weight", "vector.0.weight"}
    assert model.action.new_weights == partly | {name for name in state if name.startswith("mouse.")}
    assert (
        not {f"action.{name}" for name in partly} & start.Files.of(model, TrainConfig(init_from=folder)).names
    )
    everything = saved.state_dict()
    for name, tensor in model.state_dict().items():
        assert name.startswith("action.") or torch.equal(tensor, everything[name]), name

    model, state = started(keys=(), vector=5)  # which number is which is unknown
    assert model.action.new_weights == {name for name in state if name.startswith("vector.")}
    assert state["vector.0.weight"].shape[1] == 5 and "keys.weight" not in state
    model, state = started(vector=2)  # of the same size
    assert torch.equal(state["vector.0.weight"], before["vector.0.weight"])
    nameless = make_model(action=ActionConfig(vector=2)).save_pretrained(tmp_path / "nameless")
    model, state = started(str(nameless), vector=5)
    assert state["vector.0.weight"].shape[1] == 5 and "vector.0.weight" in model.action.new_weights
    model, state = started({"all": folder, "action.keys": None}, keys=("left", "up"))
    assert not torch.equal(state["keys.weight"][0], before["keys.weight"][0])


def test_a_model_for_larger_frames_has_queries_of_its_own(
    make_model: Callable[..., WorldModel], model: WorldModel, model_folder: Path
) -> None:
    larger = make_model(image_size=64)
    own, others = larger.state_dict(), model.state_dict()
    names = {"queries", "blank_latents", "vision.token_position"}  # as documented
    assert {name for name in own if own[name].shape != others[name].shape} == names
    sources = {"all": str(model_folder), **dict.fromkeys(names)}
    made = start.build_model(TrainConfig(model=larger.config, init_from=sources))
    assert len(made.queries) == 4 * len(model.queries)
    assert torch.equal(made.codec.state_dict()["latent_mean"], others["codec.latent_mean"])
