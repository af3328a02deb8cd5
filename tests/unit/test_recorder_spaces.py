"""Names and numbers of action spaces in recordings, and actions of a policy of Stable-Baselines3."""

import dataclasses
import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from pyarrow import parquet

from worldmodel import recording
from worldmodel.actions import Action
from worldmodel.config import ActionSpec
from worldmodel.errors import ConfigError, InputError
from worldmodel.recording.environment import EnvironmentEpisodes
from worldmodel.recording.settings import EnvironmentSettings
from worldmodel.recording.spaces import ActionMapping

SPACES = {
    "Discrete": (spaces.Discrete(3, start=5), 6, ["action_0", "action_1", "action_2"], [0, 1, 0]),
    "MultiBinary": (spaces.MultiBinary(2), np.array([1, 0]), ["action_0", "action_1"], [1, 0]),
    "MultiDiscrete": (
        spaces.MultiDiscrete([2, 3]),
        np.array([1, 0]),
        ["0_0", "0_1", "1_0", "1_1", "1_2"],
        [0, 1, 1, 0, 0],
    ),
    "Box": (spaces.Box(-2, 4, (2,)), np.array([3.0, -1.0], np.float32), ["action_0", "action_1"], [3, -1]),
    "Dict": (
        spaces.Dict({"arm": spaces.Box(-1, 1, (1,)), "grip": spaces.Discrete(2)}),
        {"arm": np.array([0.5], np.float32), "grip": 1},
        ["arm_0", "grip_0", "grip_1"],
        [0.5, 0, 1],
    ),
    "Tuple": (spaces.Tuple([spaces.Discrete(2)]), (0,), ["0_0", "0_1"], [1, 0]),
}


@pytest.mark.parametrize("name", SPACES)
def test_spaces_have_names_and_numbers(name: str) -> None:
    space, value, names, numbers = SPACES[name]
    mapping = ActionMapping(space, 10)
    assert space.contains(value)
    assert [spec.name for spec in mapping.specs] == names
    assert mapping.numbers(value).tolist() == numbers
    assert {spec.rate for spec in mapping.specs} == {10}
    if name == "Box":
        assert [(spec.kind, spec.low, spec.high) for spec in mapping.specs] == [("vector", -2, 4)] * 2
    if name == "Dict":
        assert Action.of_numbers(mapping.specs, numbers) == Action(keys=("grip_1",), vector=(0.5,))


def test_a_box_without_bounds_has_none_and_details_are_added() -> None:
    unit = [{"name": "torque", "unit": "N m", "scale": 2.0, "frame": "joint"}]
    mapping = ActionMapping(spaces.Box(-np.inf, np.inf, (1,)), 10, details=unit)
    assert mapping.specs == (ActionSpec("torque", "vector", "N m", 2.0, None, None, 10, "joint"),)
    with pytest.raises(InputError, match=r"1 entries.*2 numbers"):
        ActionMapping(spaces.MultiBinary(2), 10, details=unit)
    with pytest.raises(ConfigError, match="colour"):
        ActionMapping(spaces.Discrete(1), 10, details=[{"colour": "red"}])


def test_minigrid_has_named_keys_and_its_mission(tmp_path: Path) -> None:
    pytest.importorskip("minigrid")
    made = EnvironmentSettings("minigrid:MiniGrid-Empty-5x5-v0", max_steps=3, size=48)
    folder = recording.record_environment(made, tmp_path / "set", 1)
    info = json.loads((folder / "meta" / "info.json").read_text())
    assert info["features"]["action"]["names"][:3] == ["left", "right", "forward"]
    tasks = parquet.read_table(folder / "meta" / "tasks.parquet").to_pylist()
    assert [list(row.values())[1] for row in tasks] == ["get to the green goal square"]


@pytest.mark.parametrize(("algorithm", "epsilon"), [("PPO", 0.0), ("DQN", 0.5)])
def test_a_policy_of_stable_baselines3(tmp_path: Path, algorithm: str, epsilon: float) -> None:
    kind = getattr(pytest.importorskip("stable_baselines3"), algorithm)
    kind("MlpPolicy", "CartPole-v1", seed=1, device="cpu").save(tmp_path / "model.zip")
    pytest.importorskip("pygame")
    policy = f"sb3:{algorithm}:{tmp_path / 'model.zip'}"
    made = EnvironmentSettings("CartPole-v1", policy, max_steps=12, size=32, epsilon=epsilon)
    folder = recording.record_environment(made, tmp_path / "set", 2)
    model, env = kind.load(tmp_path / "model.zip", device="cpu"), gymnasium.make("CartPole-v1")
    episodes = parquet.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    rows = parquet.read_table(folder / "data/chunk-000/file-000.parquet").to_pylist()
    equal = []
    for episode in episodes:
        observation, _ = env.reset(seed=episode["seed"])
        for row in rows[episode["dataset_from_index"] : episode["dataset_to_index"] - 1]:
            chosen = int(model.predict(observation, deterministic=True)[0])
            equal.append(row["action"][chosen] == 1)
            observation, *_ = env.step(int(np.argmax(row["action"])))
    assert len(equal) > 10 and all(equal) == (epsilon == 0)
    (tmp_path / "broken.zip").write_bytes(b"no zip")
    for name in (f"sb3:{algorithm}:{tmp_path / 'broken.zip'}", "sb3:Nothing:model.zip", f"sb3:{algorithm}"):
        with pytest.raises(InputError):
            EnvironmentEpisodes(dataclasses.replace(made, policy=name))
