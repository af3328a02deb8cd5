"""Learning inside a world: starts from recordings, and the learners of Stable-Baselines3."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("stable_baselines3")

from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecMonitor

from worldmodel.actions import Action
from worldmodel.config import ActionConfig, ActionSpec
from worldmodel.env import RecordedStarts, WorldVectorEnv
from worldmodel.env.sb3 import StableBaselinesEnv
from worldmodel.errors import ConfigError, InputError
from worldmodel.models.world_model import WorldModel
from worldmodel.recording.episode import RecordedEpisode, RecordingFormat
from worldmodel.recording.lerobot import LeRobotStore

KEYS = ("left", "right")


@pytest.fixture(scope="module")
def keyed(make_model: Callable[..., WorldModel]) -> WorldModel:
    """A model that takes keys alone; tests must not change it."""
    return make_model(action=ActionConfig(text=False, keys=KEYS), chunk_frames=2)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four episodes of ten steps, whose frame `t` of episode `e` is as bright as 60 e + 6 t."""
    folder = tmp_path_factory.mktemp("recorded") / "set"
    specs = tuple(ActionSpec(name, "key", rate=4) for name in KEYS)
    store = LeRobotStore(folder, RecordingFormat(8, specs, {}))
    for number in range(4):
        grey = np.arange(21) * 3 + 60 * number
        numbers = np.tile(np.eye(2, dtype=np.float32)[[0]], (20, 1))
        actions = tuple(Action.of_numbers(specs, row) for row in numbers)
        frames = np.broadcast_to(grey[:, None, None, None], (21, 32, 32, 3)).astype(np.uint8)
        store.write(
            RecordedEpisode(
                {"render": frames}, actions, numbers, np.zeros(20, np.float32), truncated=True, seed=number
            )
        )
    store.finish()
    return f"lerobot:{folder}"


def test_starts_are_recorded_frames_at_any_time(keyed: WorldModel, recordings: str) -> None:
    starts = RecordedStarts(recordings, keyed.config, count=200, seed=3)
    assert starts.frames.shape == (200, 32, 32, 3) and starts.frames.dtype == np.uint8
    times = {(int(grey) // 60, round(int(grey) % 60 / 6)) for grey in starts.frames.mean(axis=(1, 2, 3))}
    assert len(times) > 30  # of 40 frames before an action
    again = RecordedStarts(recordings, keyed.config, count=200, seed=3)
    assert np.array_equal(starts.frames, again.frames)
    envs = WorldVectorEnv(keyed, 8, actions="key", start=starts)
    observations, _ = envs.reset(seed=0)
    assert all((starts.frames == each).all(axis=(1, 2, 3)).any() for each in observations)
    assert len({int(each.mean()) for each in observations}) > 4


def test_starts_of_unreadable_recordings(keyed: WorldModel, recordings: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing"):
        RecordedStarts("nothing", keyed.config)
    damaged = shutil.copytree(recordings.removeprefix("lerobot:"), tmp_path / "damaged")
    for video in damaged.rglob("*.mp4"):
        video.write_bytes(b"no video")
    with pytest.raises(InputError, match="damaged"):
        RecordedStarts(f"lerobot:{damaged}", keyed.config, count=10)


def ends(frames: np.ndarray, action: Action) -> bool:
    return action.keys == ("left",)


def rightward(frames: np.ndarray, action: Action) -> float:
    return float(action.keys == ("right",))


def test_steps_are_those_of_the_vector_environment(keyed: WorldModel, recordings: str) -> None:
    settings: dict[str, Any] = {
        "actions": "key",
        "start": RecordedStarts(recordings, keyed.config, count=20),
        "reward_fn": rightward,
        "termination_fn": ends,
        "max_episode_steps": 2,
        "autoreset_mode": "SameStep",
    }
    plain = WorldVectorEnv(keyed, 3, **settings)
    wrapped = StableBaselinesEnv(WorldVectorEnv(keyed, 3, **settings))
    wrapped.seed(5)
    expected, infos = plain.reset(seed=5)
    seen: Any = wrapped.reset()
    assert np.array_equal(seen, expected)
    assert [each["world_seed"] for each in wrapped.reset_infos] == infos["world_seed"].tolist()
    for actions in np.array([[1, 0, 1], [1, 1, 0], [0, 1, 1]]):
        expected, rewards, terminated, truncated, info = plain.step(actions)
        seen, got, done, infos = wrapped.step(actions)
        assert np.array_equal(seen, expected)
        assert np.array_equal(got, rewards) and got.dtype == np.float32
        assert np.array_equal(done, terminated | truncated)
        for row in range(3):
            assert ("terminal_observation" in infos[row]) == done[row]
            if done[row]:
                assert np.array_equal(infos[row]["terminal_observation"], info["final_obs"][row])
                assert infos[row]["TimeLimit.truncated"] == (not terminated[row])
        assert done.any()


def test_worlds_are_rendered_and_keep_what_they_need(keyed: WorldModel, recordings: str) -> None:
    starts = RecordedStarts(recordings, keyed.config, count=20)
    worlds = WorldVectorEnv(
        keyed, 2, actions="key", start=starts, autoreset_mode="SameStep", render_mode="rgb_array"
    )
    envs = StableBaselinesEnv(worlds)
    envs.reset()
    shown = envs.get_images()
    assert [each.shape for each in shown if each is not None] == [(32, 32, 3)] * 2
    assert np.asarray(envs.render()).shape == (64, 32, 3)  # one above the other
    held = []
    for _ in range(40):
        envs.step(np.zeros(2, np.int64))
        engine = worlds.envs[0].engine
        held.append(engine.cache.num_bytes if engine else 0)
    assert 0 < max(held[20:]) <= max(held[:20])  # it does not grow with the steps


def test_other_autoreset_modes_are_refused(keyed: WorldModel, image: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="SameStep"):
        StableBaselinesEnv(WorldVectorEnv(keyed, 2, start={"observation": image}))


@pytest.mark.slow
def test_ppo_learns_in_a_world(keyed: WorldModel, recordings: str) -> None:
    starts = RecordedStarts(recordings, keyed.config, count=20)
    worlds = WorldVectorEnv(
        keyed,
        16,
        actions="key",
        start=starts,
        reward_fn=rightward,
        max_episode_steps=4,
        autoreset_mode="SameStep",
    )
    envs = VecMonitor(StableBaselinesEnv(worlds))
    agent = PPO(
        "MlpPolicy", envs, n_steps=8, batch_size=64, n_epochs=8, learning_rate=3e-3, seed=0, device="cpu"
    )
    agent.learn(16 * 8 * 6)
    chosen, _ = agent.predict(starts.frames)
    assert (chosen == 1).mean() > 0.9
    assert np.mean([each["r"] for each in agent.ep_info_buffer or []]) > 2.5
