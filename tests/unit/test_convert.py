"""Conversion of Minari datasets and of recordings of Minecraft to LeRobot datasets."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import minari
import numpy as np
import pytest
from gymnasium import spaces
from minari.data_collector.episode_buffer import EpisodeBuffer
from minari.dataset.minari_storage import MinariStorage
from PIL import Image

from worldmodel import media, recording
from worldmodel.cli import main
from worldmodel.data.lerobot import LeRobotDataset
from worldmodel.errors import InputError
from worldmodel.media import crop_and_resize
from worldmodel.recording.settings import ConversionSettings
from worldmodel.recording.vpt import VptEpisodes

SIZE = 32


def frames_of(folder: Path, number: int) -> np.ndarray:
    dataset = LeRobotDataset(str(folder))
    episode = dataset.episodes[number]
    (footage,) = episode.footage
    times = footage.start + np.arange(episode.num_rows) / dataset.fps
    return media.shared_video(footage.path).read(SIZE, times.tolist())


def storage(folder: Path, observations: spaces.Space, actions: spaces.Space, **options: Any) -> MinariStorage:
    (folder / "data").mkdir(parents=True)
    made = MinariStorage.new(folder / "data", observations, actions, **options)
    made.update_metadata({"dataset_id": "test/mine-v0", "minari_version": minari.__version__})
    return made


# ---- Minari --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[EpisodeBuffer]]:
    """A dataset whose observations are images, beside other numbers."""
    folder, rng = tmp_path_factory.mktemp("minari") / "mine", np.random.default_rng(0)
    observed = spaces.Dict(
        {"top": spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8), "state": spaces.Box(-1, 1, (2,))}
    )
    episodes = []
    for length in (3, 5):
        grey = rng.integers(0, 256, (length + 1, 1, 1, 1), np.uint8)
        episodes.append(
            EpisodeBuffer(
                observations={
                    "top": np.broadcast_to(grey, (length + 1, SIZE, SIZE, 3)),
                    "state": np.zeros((length + 1, 2), np.float32),
                },
                actions=rng.integers(0, 3, length),
                rewards=[0.0] * (length - 1) + [1.5],
                terminations=[False] * (length - 1) + [length == 3],
                truncations=[False] * (length - 1) + [length == 5],
                infos={},
            )
        )
    storage(folder, observed, spaces.Discrete(3), jpeg_encoding=False).update_episodes(episodes)
    return folder, episodes


def test_images_of_a_minari_dataset_become_frames(
    pictures: tuple[Path, list[EpisodeBuffer]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, episodes = pictures
    out = tmp_path / "out"
    argv = ["convert", f"minari:{folder}", "--out", str(out), "--fps", "5", "--camera", "observation.top"]
    assert main(argv) == 0, capsys.readouterr().err
    assert main(argv) == 0, "nothing is left to convert"
    dataset = LeRobotDataset(str(out))
    assert (len(dataset.episodes), dataset.fps) == (2, 5)
    for number, episode in enumerate(episodes):
        numbers, _, outcomes = dataset.steps(dataset.episodes[number])
        assert numbers.argmax(1).tolist() == list(episode.actions)
        assert numbers.sum(1).tolist() == [1.0] * len(numbers)
        assert outcomes[:, 0].tolist() == episode.rewards
        assert outcomes[:, 1].tolist() == episode.terminations
        shown = frames_of(out, number).astype(int)
        np.testing.assert_allclose(shown, episode.observations["top"].astype(int), atol=3)


@pytest.mark.parametrize("jpeg", [False, True], ids=["arrays", "jpeg"])
def test_an_observation_fewer_and_images_as_files_are_converted(
    pictures: tuple[Path, list[EpisodeBuffer]], tmp_path: Path, jpeg: bool
) -> None:
    """Of a last action without an observation after it nothing can be learned; the others are kept."""
    _, whole = pictures
    cut = [
        replace(each, observations={"top": each.observations["top"][: len(each.rewards)]}) for each in whole
    ]
    observed = spaces.Dict({"top": spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)})
    folder, out = tmp_path / "mine", tmp_path / "out"
    storage(folder, observed, spaces.Discrete(3), jpeg_encoding=jpeg).update_episodes(cut)
    argv = ["convert", f"minari:{folder}", "--out", str(out), "--fps", "5", "--camera", "observation.top"]
    assert main(argv) == 0
    dataset = LeRobotDataset(str(out))
    for number, episode in enumerate(whole):
        numbers, _, outcomes = dataset.steps(dataset.episodes[number])
        assert numbers.argmax(1).tolist() == list(episode.actions)[:-1]
        assert outcomes[:, 1].tolist() == episode.terminations[:-1]
        shown = frames_of(out, number).astype(int)
        np.testing.assert_allclose(shown, episode.observations["top"][:-1].astype(int), atol=4)


def test_an_episode_without_a_step_is_named(
    pictures: tuple[Path, list[EpisodeBuffer]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, (first, _) = pictures
    observed = spaces.Dict({"top": spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)})
    short = replace(
        first, observations={"top": first.observations["top"][:1]}, actions=first.actions[:1],
        rewards=[0.0], terminations=[True], truncations=[False],
    )  # fmt: skip
    storage(tmp_path / "mine", observed, spaces.Discrete(3), jpeg_encoding=False).update_episodes([short])
    argv = ["convert", f"minari:{tmp_path / 'mine'}", "--out", str(tmp_path / "out"), "--fps", "5"]
    assert main([*argv, "--camera", "observation.top"]) == 2
    assert "episode 0" in capsys.readouterr().err


CART = "CartPole-v1"


@pytest.fixture(scope="module")
def poles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset without images: states of CartPole, with the seeds of its episodes."""
    folder, env, episodes = tmp_path_factory.mktemp("minari") / "poles", gymnasium.make(CART), []
    for seed in (3, 4):
        observations, rewards, actions, ended = [env.reset(seed=seed)[0]], [], [], False
        while not ended and len(actions) < 12:
            actions.append(len(actions) % 3 % 2)
            observation, reward, ended, _, _ = env.step(actions[-1])
            observations.append(observation)
            rewards.append(float(reward))
        flags = [False] * (len(actions) - 1)
        episodes.append(
            EpisodeBuffer(
                seed=seed,
                observations=np.stack(observations),
                actions=np.array(actions),
                rewards=rewards,
                terminations=[*flags, ended],
                truncations=[*flags, not ended],
                infos={},
            )
        )
    storage(folder, env.observation_space, env.action_space, env_spec=env.spec).update_episodes(episodes)
    return folder


def test_episodes_without_images_are_played_again(poles: Path, tmp_path: Path) -> None:
    settings = ConversionSettings(str(poles), size=SIZE, env_id=CART)
    recording.convert("minari", settings, tmp_path / "out")
    env = gymnasium.make(CART, render_mode="rgb_array")
    env.reset(seed=4)
    expected = [crop_and_resize(Image.fromarray(np.asarray(env.render())), SIZE)]
    for step in range(12):
        env.step(step % 3 % 2)
        expected.append(crop_and_resize(Image.fromarray(np.asarray(env.render())), SIZE))
    shown = frames_of(tmp_path / "out", 1)
    assert np.abs(shown.astype(int) - np.stack(expected[: len(shown)])).mean() < 1
    assert LeRobotDataset(str(tmp_path / "out")).fps == env.metadata["render_fps"]


def change(folder: Path, target: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """Copy a dataset with other metadata."""
    shutil.copytree(folder, target)
    path = target / "data" / "metadata.json"
    metadata = json.loads(path.read_text())
    edit(metadata)
    path.write_text(json.dumps(metadata))
    return target


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, CART),
        ({"env_id": "Acrobot-v1"}, r"Discrete\(3\)"),
        ({"env_id": "CartPole-v0"}, "observation 0 differs"),
        ({"path": "nowhere-v0"}, "nowhere-v0"),
    ],
)
def test_what_cannot_be_played_again(
    poles: Path, tmp_path: Path, settings: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    if named.endswith("differs"):  # of another seed
        settings = {"env_id": CART, "path": str(change(poles, tmp_path / "moved", lambda metadata: None))}
        with h5py.File(tmp_path / "moved" / "data" / "main_data.hdf5", "a") as file:
            file["episode_0"].attrs["seed"] = 5
    with pytest.raises(InputError, match=named):
        recording.convert(
            "minari", ConversionSettings(**{"path": str(poles), "size": SIZE, **settings}), tmp_path / "out"
        )


@pytest.mark.parametrize("step", [0, 3, -1])
def test_every_observation_must_be_the_recorded_one(poles: Path, tmp_path: Path, step: int) -> None:
    changed = change(poles, tmp_path / "changed", lambda metadata: None)
    with h5py.File(changed / "data" / "main_data.hdf5", "a") as file:
        file["episode_1"]["observations"][step] += 0.01
    with pytest.raises(InputError, match="differs"):
        recording.convert(
            "minari", ConversionSettings(str(changed), size=SIZE, env_id=CART), tmp_path / "out"
        )


def test_a_dataset_cannot_call_functions(poles: Path, tmp_path: Path) -> None:
    """Without stated spaces, Minari would make the environment of the dataset, whatever its entry point."""
    called = tmp_path / "called"

    def harm(metadata: dict[str, Any]) -> None:
        del metadata["action_space"]
        spec = json.loads(metadata["env_spec"])
        spec |= {"entry_point": "os:mkdir", "kwargs": {"path": str(called)}}
        metadata["env_spec"] = json.dumps(spec)

    harmed = change(poles, tmp_path / "harmed", harm)
    with pytest.raises(InputError, match="action_space"):
        recording.convert("minari", ConversionSettings(str(harmed), size=SIZE, env_id=CART), tmp_path / "out")
    assert not called.exists()


# ---- Minecraft -----------------------------------------------------------------------------------------

TICKS = 7


def tick(number: int) -> dict[str, Any]:
    """Line of a recording: forward is held, the mouse turns further each time, slot 3 is chosen at tick 4."""
    return {
        "mouse": {
            "x": 640,
            "y": 360,
            "dx": 10.0 * number,
            "dy": -1000.0 if number == 2 else 0.0,
            "buttons": [0] if number < 5 else [1],
            "newButtons": [0] if number in (0, 3) else [],
        },
        "keyboard": {"keys": ["key.keyboard.w", "key.keyboard.f3"], "newKeys": [], "chars": ""},
        "isGuiOpen": False,
        "hotbar": 2 if number >= 4 else 0,
        "tick": number,
    }


@pytest.fixture
def minecraft(tmp_path: Path) -> Path:
    """One recording of 7 ticks, whose frames become brighter."""
    folder = tmp_path / "vpt"
    folder.mkdir()
    frames = np.stack([np.full((SIZE, SIZE, 3), 30 * number, np.uint8) for number in range(TICKS)])
    media.write_video(frames, folder / "run.mp4", 20, scale=1)
    (folder / "run.jsonl").write_text("\n".join(json.dumps(tick(number)) for number in range(TICKS)) + "\n")
    (folder / "alone.jsonl").write_text("{}")
    return folder


def test_recordings_of_minecraft_become_keys_and_mouse(minecraft: Path, tmp_path: Path) -> None:
    recording.convert("vpt", ConversionSettings(str(minecraft), size=SIZE, max_steps=4), tmp_path / "out")
    dataset = LeRobotDataset(str(tmp_path / "out"))
    assert [episode.num_rows for episode in dataset.episodes] == [5, 3], "two episodes share a frame"
    assert not dataset.states_outcomes, "rewards are unknown"
    brightness = [frames_of(tmp_path / "out", number).mean((1, 2, 3)) for number in (0, 1)]
    np.testing.assert_allclose(brightness[0], [0, 30, 60, 90, 120], atol=3)
    np.testing.assert_allclose(brightness[1], [120, 150, 180], atol=3)
    numbers = np.concatenate([dataset.steps(episode)[0] for episode in dataset.episodes])
    column = {spec.name: numbers[:, place] for place, spec in enumerate(dataset.specs)}
    assert column["forward"].tolist() == [1] * 6
    assert column["attack"].tolist() == [0, 0, 0, 1, 1, 0], "it is stuck until it is pressed"
    assert column["use"].tolist() == [0, 0, 0, 0, 0, 1]
    assert column["hotbar_3"].tolist() == [0, 0, 0, 0, 1, 0]
    np.testing.assert_allclose(column["right"], [0, 0.15, 0.3, 0.45, 0.6, 0.75], atol=1e-6)
    assert column["down"].tolist() == [0, 0, -1, 0, 0, 0], "larger turns are clipped"
    mouse = [spec for spec in dataset.specs if spec.kind == "mouse"]
    assert [(spec.unit, spec.scale, spec.low, spec.high) for spec in mouse] == [("deg", 10, -1, 1)] * 2


@pytest.mark.parametrize(
    ("line", "named"),
    [("{", "Line 3"), ('{"mouse": {}}', "newButtons"), (json.dumps({**tick(2), "hotbar": None}), "Line 3")],
)
def test_a_damaged_line_is_named(minecraft: Path, tmp_path: Path, line: str, named: str) -> None:
    path = minecraft / "run.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[3:]]))
    with pytest.raises(InputError, match=named):
        recording.convert("vpt", ConversionSettings(str(minecraft), size=SIZE), tmp_path / "out")


def test_wrong_settings_of_a_conversion(minecraft: Path, tmp_path: Path) -> None:
    for settings, named in (
        (ConversionSettings(str(minecraft)), "--size"),
        (ConversionSettings(str(minecraft), size=SIZE, fps=30), "20 fps"),
        (ConversionSettings(str(tmp_path), size=SIZE), "NAME.mp4"),
    ):
        with pytest.raises(InputError, match=named):
            VptEpisodes(settings)
    with pytest.raises(InputError, match="hdf6"):
        recording.convert("hdf6", ConversionSettings(str(minecraft)), tmp_path / "out")
    assert main(["convert", "minari", "--out", str(tmp_path / "out")]) == 2
