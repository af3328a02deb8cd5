"""Sources whose vectors have other widths in one run: numbers are matched by name, and others are absent."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clip_tables import write_table

from worldmodel.actions import Action, action_kind
from worldmodel.config import (
    ActionConfig,
    ActionSpec,
    DataConfig,
    SourceConfig,
    TrainConfig,
    WorldModelConfig,
)
from worldmodel.data.lerobot import with_action_spec
from worldmodel.data.loader import Batch
from worldmodel.data.sources import Source, open_source, open_sources
from worldmodel.errors import ConfigError
from worldmodel.models.world_model import WorldModel
from worldmodel.recording.episode import RecordedEpisode, RecordingFormat
from worldmodel.recording.lerobot import LeRobotStore
from worldmodel.train.objectives.base import SampleRng
from worldmodel.train.objectives.state import StateObjective

FPS, STEPS = 8, 6
NAMES = ("x", "y", "grip", "turn")
BOUNDED = {"names": NAMES, "low": [-1, -1, 0, -2], "high": [3, 1, 1, 2]}


def recorded(folder: Path, names: Sequence[str], padding: Sequence[float] = ()) -> str:
    """A LeRobot dataset with one episode, whose number `k` at step `i` is `(i + k) / 10`, then padding."""
    specs = tuple(ActionSpec(name, rate=FPS) for name in names)
    store = LeRobotStore(folder, RecordingFormat(FPS, specs, {}))
    own = len(names) - len(padding)
    numbers = np.array([[*((i + k) / 10 for k in range(own)), *padding] for i in range(STEPS)], np.float32)
    frames = np.random.default_rng(0).integers(0, 255, (STEPS + 1, 32, 32, 3), dtype=np.uint8)
    actions = tuple(Action.of_numbers(specs, row) for row in numbers)
    store.write(RecordedEpisode({"render": frames}, actions, numbers, np.zeros(STEPS, np.float32), True))
    store.finish()
    return str(folder)


def takes(model: WorldModelConfig, vector: Any) -> WorldModelConfig:
    action = ActionConfig(vector=vector, text=False, per_round=2)
    return dataclasses.replace(model, action=action, fps=FPS, chunk_frames=2)


def opened(model: WorldModelConfig, path: str, numbers: Sequence[str] = ()) -> Source:
    source = SourceConfig("lerobot", path, numbers=tuple(numbers))
    return open_source("mine", DataConfig({"mine": source}), model)


def vectors(source: Source) -> list[Any]:
    episode = source.at(0).episode("rounds", 0, 0, 3)
    return [each.vector for action in episode.actions for each in action.chunk]


def test_sets_of_other_widths_are_read_in_one_run(tmp_path: Path, tiny: WorldModelConfig) -> None:
    two, three = recorded(tmp_path / "two", ("turn", "x")), recorded(tmp_path / "three", ("x", "y", "grip"))
    model = takes(tiny, {"names": NAMES})
    sources = {"two": SourceConfig("lerobot", two), "three": SourceConfig("lerobot", three)}
    both = open_sources(DataConfig(sources), model)
    assert vectors(both["two"])[0] == pytest.approx((0.1, None, None, 0.0))
    assert vectors(both["three"])[1] == pytest.approx((0.1, 0.2, 0.3, None))
    told = with_action_spec(TrainConfig(model=model, data=DataConfig(sources))).model.action
    assert {spec.name for spec in told.spec} == {*NAMES}


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("query_actions", [False, True])
def test_padding_has_no_effect_and_no_gradient(
    make_model: Callable[..., WorldModel],
    tmp_path: Path,
    bounded: bool,
    query_actions: bool,
) -> None:
    names = ("y", "x", "pad_0", "pad_1")
    action = ActionConfig(vector=BOUNDED if bounded else {"names": NAMES}, text=False, per_round=2)
    found = []
    for number, garbage in enumerate(((0.0, 0.0), (9e5, -7e5))):
        torch.manual_seed(0)
        world = make_model(action=action, query_actions=query_actions, fps=FPS, chunk_frames=2)
        world.requires_grad_(True)
        path = recorded(tmp_path / str(number), names, garbage)
        source = opened(world.config, path, ("y", "x", "", ""))
        episodes = [source.at(0).episode("rounds", 0, index, 2) for index in range(2)]
        batch = Batch(0, "rounds", (0, 1), episodes)
        objective = StateObjective(world)
        inputs = objective.prepare(world, batch, SampleRng([(0, 0), (0, 1)]))
        losses = objective(world, inputs)
        sum(losses.values(), torch.zeros(())).backward()
        gradients = {name: each.grad for name, each in world.named_parameters() if each.grad is not None}
        found.append(({name: float(loss.detach()) for name, loss in losses.items()}, gradients))
    (losses, gradients), (others, again) = found
    assert losses == others
    assert gradients.keys() == again.keys()
    assert all(torch.equal(each, again[name]) for name, each in gradients.items())
    layer = gradients["action.vector.0.weight"]
    assert not layer[:, [2, 3]].any()
    assert layer[:, [0, 1]].any(dim=0).all()
    if query_actions:
        assert not gradients["action.to_queries.weight"].view(-1, 2, 4)[:, :, [2, 3]].any()


@pytest.fixture
def tiny(model: WorldModel) -> WorldModelConfig:
    """The config of the tiny model."""
    return model.config


def test_columns_of_tables_are_named_by_the_source(
    counting: Path, tmp_path: Path, tiny: WorldModelConfig
) -> None:
    rows = [{"path": str(counting), "vector": [[0.25 * i, 0.5, 7e5] for i in range(63)]}]
    table = write_table(tmp_path, rows)
    config = SourceConfig(
        "clips",
        str(table),
        root="/",
        columns={"video": "path", "vector": "vector"},
        numbers=("grip", "x", ""),
    )
    model = takes(tiny, {"names": NAMES})
    source = open_source("mine", DataConfig({"mine": config}), model)
    first = vectors(source)[0]
    assert (first[0], first[1], first[3]) == (0.5, None, None)
    assert first[2] % 0.25 == 0
    other = dataclasses.replace(config, numbers=("grip", "x"))
    with pytest.raises(ConfigError, match="its vector has 3 numbers, and there are 2 names"):
        open_source("mine", DataConfig({"mine": other}), model)


@pytest.mark.parametrize(
    ("vector", "numbers", "named"),
    [
        ({"names": ["x", "grip"]}, (), "vectors with y, and the model knows x, grip; add"),
        ({"names": ["x", "grip"]}, ("x", "gripper"), "gripper, and the model"),
        ({"names": ["x", "grip"]}, ("x", "x"), "two numbers of one name"),
        ({"names": ["x", "grip"]}, ("x",), "numbers has 1 names; use 2"),
        (2, ("x", "y"), "needs names in model.action.vector"),
        (False, ("x", "y"), "needs names in model.action.vector"),
        (3, (), "set model.action.vector to {size: 2"),
    ],
)
def test_names_that_do_not_fit_are_one_sentence(
    tmp_path: Path, tiny: WorldModelConfig, vector: Any, numbers: tuple[str, ...], named: str
) -> None:
    path = recorded(tmp_path / "set", ("x", "y"))
    with pytest.raises(ConfigError, match=named.replace("{", r"\{")):
        opened(takes(tiny, vector), path, numbers)


def test_absent_numbers_are_told_from_zeros_in_words_and_files() -> None:
    kind, settings = action_kind("vector"), ActionConfig(vector=BOUNDED).vector
    value = (0.5, None, None, -1.0)
    assert kind.say(value) == "0.5 - - -1"
    assert kind.understand(kind.say(value), settings) == value
    assert kind.understand("0.5 - - -9", settings) == (0.5, None, None, -2.0)
    assert kind.understand("0.5 - -9", settings) is None
    action = Action(vector=value)
    assert Action.of(action.as_dict()) == action
    action.check(ActionConfig(vector=BOUNDED))
    assert kind.features(value, settings) == [-0.25, 0.0, 0.0, -0.5]
    middle = [(low + high) / 2 for low, high in zip(BOUNDED["low"], BOUNDED["high"], strict=True)]
    for absent in itertools.product((True, False), repeat=4):
        some = tuple(None if gone else x for gone, x in zip(absent, middle, strict=True))
        assert kind.features(some, settings) == kind.features(tuple(middle), settings)
