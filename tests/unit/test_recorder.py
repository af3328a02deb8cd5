"""Recording of environments: formats, policies, spaces, going on after an interruption, and bad input."""

import dataclasses
import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from pyarrow import parquet

from worldmodel import media, recording
from worldmodel.errors import InputError, OutputError
from worldmodel.recording import lerobot
from worldmodel.recording.environment import EnvironmentEpisodes
from worldmodel.recording.settings import EnvironmentSettings


class Counter(gymnasium.Env):
    """Shows the number of steps as grey; actions have no effect but on a second camera's image."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(
        self,
        render_mode: str | None = None,
        action_space: spaces.Space | None = None,
        bad_reward: float = 1.0,
        length: int = 5,
        prefix: str = "",
    ) -> None:
        image = spaces.Box(0, 255, (32, 32, 3), np.uint8)
        parts = {"top": image, f"{prefix}top": image, "state": spaces.Box(-1, 1, (2,))}
        self.observation_space = spaces.Dict(parts)
        self.action_space = action_space or spaces.Discrete(3)
        self.render_mode, self.bad_reward, self.length = render_mode, bad_reward, length
        self.prefix = prefix

    def _state(self) -> tuple[Any, dict[str, Any]]:
        top = np.full((32, 32, 3), (200 - 10 * self.steps) % 256, np.uint8)
        observation = {"top": top, f"{self.prefix}top": top, "state": np.zeros(2, np.float32)}
        return observation, {"steps": self.steps, "array": np.arange(2)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        self.start = int(self.np_random.integers(40))
        return self._state()

    def step(self, action: Any) -> Any:
        self.steps += 1
        observation, info = self._state()
        reward = self.bad_reward if self.steps == 3 else 1.0
        return observation, reward, self.steps == self.length, False, info

    def render(self) -> np.ndarray:
        return np.full((33, 48, 3), (self.start + 10 * self.steps) % 256, np.uint8)


class InPlace(Counter):
    """Scales an action in place, as environments of continuous control do."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode, spaces.Box(-1, 1, (2,)))

    def step(self, action: Any) -> Any:
        action *= 0.1
        return super().step(action)


class Blind(Counter):
    """Renders nothing, and observes no image."""

    metadata = {"render_modes": ["human"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = spaces.Box(-1, 1, (4,))


def make_counter(render_mode: str | None = None) -> gymnasium.Env:
    """An entry point that is a function, and has no metadata of its own."""
    return Counter(render_mode)


ENTRIES = {
    "Counter-v0": Counter,
    "Blind-v0": Blind,
    "InPlace-v0": InPlace,
    "Made-v0": make_counter,
    "Rendered-v0": lambda: Counter("rgb_array"),
    "BlindMade-v0": lambda render_mode=None: Blind(render_mode),
}
for name, kind in ENTRIES.items():
    if name not in gymnasium.registry:
        gymnasium.register(name, kind)


def settings(**changes: Any) -> EnvironmentSettings:
    return EnvironmentSettings(**{"env_id": "Counter-v0", "max_steps": 8, **changes})


def assert_same(one: Path, other: Path) -> None:
    """Compare all files: videos by their frames, which the encoder may write in other bytes."""
    names = [
        sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        for folder in (one, other)
    ]
    assert names[0] == names[1]
    for name in names[0]:
        if name.endswith(".mp4"):
            frames = [media.read_video(folder / name, 32, None, 9999).astype(int) for folder in (one, other)]
            assert frames[0].shape == frames[1].shape and np.abs(frames[0] - frames[1]).mean() < 0.5
        else:
            assert (one / name).read_bytes() == (other / name).read_bytes(), name


def rows(folder: Path) -> list[dict[str, Any]]:
    paths = sorted((folder / "data").rglob("*.parquet"))
    return [row for path in paths for row in parquet.read_table(path).to_pylist()]


def greys(folder: Path) -> list[int]:
    paths = sorted((folder / "videos").rglob("*.mp4"))
    return [
        round(float(frame.mean())) for path in paths for frame in media.read_video(path, (34, 48), None, 1000)
    ]


def test_a_dataset_has_the_frames_actions_and_rewards_of_the_environment(tmp_path: Path) -> None:
    made = settings(seed=3, policy="random")
    folder = recording.record_environment(made, tmp_path / "set", 3)
    info = json.loads((folder / "meta" / "info.json").read_text())
    assert (info["total_episodes"], info["total_frames"], info["fps"]) == (3, 18, 10)
    assert info["features"]["observation.images.render"]["shape"] == [34, 48, 3]
    assert info["features"]["action"]["names"] == ["action_0", "action_1", "action_2"]
    found, shown = rows(folder), greys(folder)
    episodes = parquet.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    env = gymnasium.make("Counter-v0", render_mode="rgb_array")
    for index, episode in enumerate(episodes):  # played again from the seed alone
        env.reset(seed=episode["seed"])
        env.action_space.seed(episode["seed"])
        part = found[episode["dataset_from_index"] : episode["dataset_to_index"]]
        assert [row["frame_index"] for row in part] == list(range(6))
        for step, row in enumerate(part):
            assert row["episode_index"] == index and row["index"] == 6 * index + step
            assert abs(shown[row["index"]] - env.render().mean()) <= 1
            assert json.loads(row["info"]) == {"steps": step, "array": [0, 1]}
            if step < 5:
                action = env.action_space.sample()
                assert row["action"] == [float(action == key) for key in range(3)]
                _, reward, terminated, truncated, _ = env.step(action)
                assert row["next.reward"] == reward and row["next.truncated"] == truncated
                assert row["next.terminated"] == row["next.done"] == terminated
        assert part[-1]["action"] == [0, 0, 0] and part[-1]["next.done"]
    stats = json.loads((folder / "meta" / "stats.json").read_text())
    rewards = [row["next.reward"] for row in found]
    assert stats["next.reward"]["std"][0] == pytest.approx(np.std(rewards))
    assert stats["action"]["mean"] == pytest.approx(np.mean([row["action"] for row in found], axis=0))


def test_workers_and_an_interruption_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pygame")  # comes with minigrid
    monkeypatch.setattr(lerobot, "EPISODES_PER_FILE", 3)
    made = EnvironmentSettings("CartPole-v1", policy="sticky", size=32, max_steps=4)
    whole = recording.record_environment(made, tmp_path / "whole", 7)
    in_workers = recording.record_environment(made, tmp_path / "workers", 7, num_workers=1)
    assert_same(in_workers, whole)
    parts = tmp_path / "parts"
    for num_episodes in (2, 5, 7):  # each cuts a file short
        recording.record_environment(made, parts, num_episodes)
    assert_same(parts, whole)
    recording.record_environment(made, parts, 7)  # nothing left to do
    assert_same(parts, whole)
    with pytest.raises(OutputError, match=r"policy 'sticky', now 'random'"):
        recording.record_environment(EnvironmentSettings("CartPole-v1", size=32, max_steps=4), parts, 8)


@pytest.mark.parametrize("env_id", ["Made-v0", "Rendered-v0"])
def test_an_environment_may_be_made_by_a_function(env_id: str) -> None:
    made, expected = (
        EnvironmentEpisodes(settings(env_id=name)).episode(0) for name in (env_id, "Counter-v0")
    )
    assert made.cameras.keys() == {"render"} and made.seed == expected.seed
    assert np.array_equal(made.cameras["render"], expected.cameras["render"])
    observed = EnvironmentEpisodes(settings(env_id="Made-v0", cameras=("observation.top",)))
    assert observed.env.render_mode is None and observed.episode(0).cameras.keys() == {"observation.top"}


@pytest.mark.parametrize("form", ["lerobot", "clips"])
def test_the_name_of_a_camera_may_have_a_slash(tmp_path: Path, form: Any) -> None:
    made = settings(cameras=("observation.side/top", "observation.top"), env_args={"prefix": "side/"})
    recording.record_environment(made, tmp_path / "set", 1, form)
    videos = {str(path.relative_to(tmp_path / "set")) for path in tmp_path.rglob("*.mp4")}
    names = ["observation.side_top", "observation.top"]
    dataset, table = "videos/observation.images.{}/chunk-000/file-000.mp4", "clip-00000-{}.mp4"
    assert videos == {(dataset if form == "lerobot" else table).format(name) for name in names}


@pytest.mark.parametrize("frame_skip", [1, 2])
def test_actions_are_those_of_the_policy_even_if_the_environment_changes_them(frame_skip: int) -> None:
    made = settings(env_id="InPlace-v0", frame_skip=frame_skip, fps=10)
    episode = EnvironmentEpisodes(made).episode(0)
    space = spaces.Box(-1, 1, (2,))
    space.seed(episode.seed)
    chosen = np.stack([space.sample() for _ in episode.actions])
    assert np.array_equal(episode.numbers, chosen)
    assert [action.vector for action in episode.actions] == [tuple(row) for row in chosen.tolist()]
    sticky = EnvironmentEpisodes(dataclasses.replace(made, policy="sticky")).episode(0).numbers
    assert all(0 in np.abs(chosen - row).sum(axis=1) for row in sticky)


def test_a_recorder_that_was_killed_before_the_index_goes_on(tmp_path: Path) -> None:
    folder = recording.record_environment(settings(), tmp_path / "set", 3)
    index = folder / "meta" / "info.json"
    before = index.read_bytes()
    recording.record_environment(settings(), folder, 5)
    index.write_bytes(before)  # the last file to be replaced
    recording.record_environment(settings(), folder, 5)
    assert_same(folder, recording.record_environment(settings(), tmp_path / "whole", 5))


def test_a_killed_worker_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pygame")
    kill = "import os, signal\n\n\ndef act(*_):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    (tmp_path / "out_of_memory.py").write_text(kill)
    monkeypatch.syspath_prepend(tmp_path)
    made = EnvironmentSettings("CartPole-v1", policy="out_of_memory:act")
    with pytest.raises(InputError, match="memory"):
        recording.record_environment(made, tmp_path / "set", 3, num_workers=1)
    assert not list((tmp_path / "set").glob(".writing-*"))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["lerobot", "clips"])
def test_a_killed_recorder_goes_on(tmp_path: Path, form: str) -> None:
    pytest.importorskip("pygame")

    def command(name: str) -> list[str]:
        words = f"record CartPole-v1 --out {name} --episodes 120 --size 32 --max-steps 6 --format {form}"
        return [sys.executable, "-P", "-m", "worldmodel", *words.split()]

    environment = os.environ | {"SDL_VIDEODRIVER": "dummy"}
    killed = subprocess.Popen(command("killed"), cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    mark = "meta/info.json" if form == "lerobot" else "clip-00010.mp4"
    deadline = time.monotonic() + 120
    while not (tmp_path / "killed" / mark).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    if form == "lerobot":
        assert json.loads((tmp_path / "killed" / mark).read_text())["total_episodes"] in (50, 100)
    for name in ("killed", "whole"):
        subprocess.run(command(name), cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert_same(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize("form", ["lerobot", "clips"])
def test_a_full_disk_leaves_what_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    monkeypatch.setattr(lerobot, "EPISODES_PER_FILE", 2)
    calls, write = [0], media.VideoWriter.write

    def full(self: Any, frame: Any, keyframe: bool = False) -> None:
        calls[0] += 1
        if calls[0] == 20:  # in the fourth episode
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, frame, keyframe)

    with monkeypatch.context() as patch:
        patch.setattr(media.VideoWriter, "write", full)
        with pytest.raises(OutputError, match="No space left on device"):
            recording.record_environment(settings(), tmp_path / "set", 6, form)
    if form == "lerobot":
        assert {row["episode_index"] for row in rows(tmp_path / "set")} == {0, 1}
        assert len(greys(tmp_path / "set")) == 12
    else:
        table = [json.loads(line) for line in (tmp_path / "set" / "clips.jsonl").read_text().splitlines()]
        assert [row["path"] for row in table] == ["clip-00000.mp4", "clip-00001.mp4", "clip-00002.mp4"]
        assert all(len(media.read_video(tmp_path / "set" / row["path"], 32, None, 99)) == 6 for row in table)
    assert not list((tmp_path / "set").glob(".writing-*"))
    recording.record_environment(settings(), tmp_path / "set", 6, form)
    recording.record_environment(settings(), tmp_path / "whole", 6, form)
    assert_same(tmp_path / "set", tmp_path / "whole")


def test_a_disk_that_is_full_when_a_file_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(lerobot.parquet, "write_table", full)  # the videos of the file are complete by then
        with pytest.raises(OutputError, match="No space left on device"):
            recording.record_environment(settings(), tmp_path / "set", 2)
    assert not list((tmp_path / "set").glob(".writing-*"))
    recording.record_environment(settings(), tmp_path / "set", 2)
    assert_same(tmp_path / "set", recording.record_environment(settings(), tmp_path / "whole", 2))


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_extension_keeps_all_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    folder = recording.record_environment(settings(), tmp_path / "set", 5)
    before = rows(folder)
    episode = EnvironmentEpisodes.episode

    def stopped(self: EnvironmentEpisodes, index: int) -> Any:
        if index == last:
            raise stop
        return episode(self, index)

    monkeypatch.setattr(EnvironmentEpisodes, "episode", stopped)
    last = 2  # the file of the first five is being recorded again
    with pytest.raises(stop):
        recording.record_environment(settings(), folder, 9)
    assert json.loads((folder / "meta" / "info.json").read_text())["total_episodes"] == 5
    assert rows(folder) == before
    last = 7
    with pytest.raises(stop):
        recording.record_environment(settings(), folder, 9)
    assert json.loads((folder / "meta" / "info.json").read_text())["total_episodes"] == 7
    last = -1
    recording.record_environment(settings(), folder, 9)
    assert_same(folder, recording.record_environment(settings(), tmp_path / "whole", 9))


class Stopped(BaseException):
    """What a program's handler raises."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_takes_effect_after_the_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def stop(number: int, frame: object) -> None:
        raise Stopped

    def signalled(self: Any, frame: Any, keyframe: bool = False) -> None:
        write(self, frame, keyframe)
        calls.append(0)
        if len(calls) in at:
            signal.raise_signal(number)

    calls, at, write, before = [], [15], media.VideoWriter.write, signal.signal(number, stop)
    folder, whole = tmp_path / "set", recording.record_environment(settings(), tmp_path / "whole", 5)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(media.VideoWriter, "write", signalled)
            with pytest.raises(Stopped):  # in the third episode
                recording.record_environment(settings(), folder, 5)
            assert signal.getsignal(number) is stop
            kept = rows(folder)
            assert [row["episode_index"] for row in kept] == [index for index in range(3) for _ in range(6)]
            assert len(greys(folder)) == 18 and not list(folder.glob(".writing-*"))
            assert kept == rows(whole)[:18]
            calls, at = [], [25, 27]  # a second one does not wait for the end of the fifth episode
            with pytest.raises(Stopped):
                recording.record_environment(settings(), folder, 5)
            assert rows(folder) == kept and not list(folder.glob(".writing-*"))
    finally:
        signal.signal(number, before)
    recording.record_environment(settings(), folder, 5)
    assert_same(folder, whole)


def test_a_clip_table_is_what_a_source_reads(tmp_path: Path) -> None:
    table = recording.record_environment(settings(seed=1), tmp_path, 2, "clips")
    first = json.loads(table.read_text().splitlines()[0])
    assert first["rewards"] == [1.0] * 5 and first["terminated"] and not first["truncated"]
    assert [info["steps"] for info in first["infos"]] == list(range(6))
    held = [(entry["start"], entry["end"], entry["keys"]) for entry in first["keys"]]
    assert held[0][0] == 0 and held[-1][1] == pytest.approx(0.5)
    with (tmp_path / "clips.jsonl").open("ab") as file:
        file.write(b'{"path": "clip-0000')  # a killed run
    recording.record_environment(settings(seed=1), tmp_path, 3, "clips")
    assert len([json.loads(line) for line in table.read_text().splitlines()]) == 3


def repeat_action_one(observation: Any, space: spaces.Space, rng: np.random.Generator) -> int:
    return 1


def test_policies_and_cameras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_policy.py").write_text(
        "def act(observation, space, rng):\n    return 2\n\n"
        "class Count:\n    def __init__(self, env): self.space = env.action_space\n"
        "    def reset(self, seed): self.steps = 0\n"
        "    def __call__(self, observation):\n"
        "        self.steps += 1\n        return self.steps % self.space.n\n"
    )
    monkeypatch.chdir(tmp_path)
    cameras = ("render", "observation.top")
    always = EnvironmentEpisodes(settings(policy="my_policy:act", cameras=cameras)).episode(0)
    assert {action.keys for action in always.actions} == {("action_2",)}
    assert set(always.cameras) == set(cameras)
    counting = EnvironmentEpisodes(settings(policy="my_policy:Count"))
    for index in range(2):
        keys = [action.keys[0] for action in counting.episode(index).actions]
        assert keys[:4] == ["action_1", "action_2", "action_0", "action_1"]
    assert always.cameras["observation.top"][:, 0, 0, 0].tolist() == [200, 190, 180, 170, 160, 150]
    mixed = EnvironmentEpisodes(settings(policy="my_policy:act", epsilon=0.5, env_args={"length": 40}))
    long = EnvironmentSettings("Counter-v0", "sticky", max_steps=400, env_args={"length": 400})
    assert len({action.keys for action in mixed.episode(0).actions}) > 1
    held = [action.keys for action in EnvironmentEpisodes(long).episode(0).actions]
    repeats = np.mean([first == second for first, second in itertools.pairwise(held)])
    assert 0.77 < repeats < 0.9  # 0.75 + 0.25 / 3
    skipped = EnvironmentEpisodes(settings(frame_skip=2)).episode(0)
    assert skipped.rewards.tolist() == [2, 2, 1] and skipped.terminated
    assert EnvironmentEpisodes(settings(frame_skip=2)).format.fps == 5
    short = EnvironmentEpisodes(settings(max_steps=2)).episode(0)
    assert short.truncated and not short.terminated and len(short.rewards) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env_id": "Blind-v0"}, "Blind-v0 does not render rgb_array.*observations are Box"),
        ({"env_id": "Blind-v0", "cameras": ("render",)}, "renders human and not rgb_array"),
        ({"env_id": "BlindMade-v0"}, "BlindMade-v0 does not render rgb_array"),
        ({"env_id": "BlindMade-v0", "cameras": ("render",)}, "renders human and not rgb_array"),
        ({"env_id": "No-v0"}, "'No-v0' cannot be opened.*module:ID"),
        ({"env_id": "nowhere:No-v0"}, "'nowhere:No-v0' cannot be opened"),
        ({"env_args": {"action_space": spaces.Text(3)}}, r"The action space Text.* has no mapping"),
        ({"frame_skip": 3}, "10 steps per second, which frame_skip 3 does not divide"),
        ({"frame_skip": 0}, "frame_skip is 0"),
        ({"policy": "often"}, "There is no policy 'often'"),
        ({"policy": "json:nothing"}, "'json:nothing' cannot be imported"),
        ({"policy": "json:__name__"}, "is not a function"),
        ({"epsilon": 2.0}, "epsilon is 2"),
    ],
)
def test_environments_that_cannot_be_recorded(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        EnvironmentEpisodes(settings(**changes))
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cameras": ("observation.state",)}, "float32 values of shape .*2.*, not an image"),
        ({"cameras": ("observation.bottom",)}, "'observation.bottom' is not in the observation; it has top"),
        ({"cameras": ("front",)}, "There is no camera 'front'"),
    ],
)
def test_cameras_that_cannot_be_recorded(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        recording.record_environment(settings(**changes), tmp_path / "set", 1)


def test_a_reward_that_is_no_number_keeps_the_episodes_before(tmp_path: Path) -> None:
    made = settings(env_args={"length": 2})
    assert EnvironmentEpisodes(made).episode(0).rewards.tolist() == [1, 1]
    episodes = EnvironmentEpisodes(settings(env_args={"bad_reward": float("nan")}))
    with pytest.raises(InputError, match="Counter-v0 gave the reward nan at step 3 of episode 0"):
        episodes.episode(0)

    class Late(EnvironmentEpisodes):
        def episode(self, index: int) -> Any:
            return episodes.episode(index) if index == 2 else super().episode(index)

    with pytest.raises(InputError, match="nan"):
        recording.record(Late(made), tmp_path / "set", 5, "lerobot")
    assert {row["episode_index"] for row in rows(tmp_path / "set")} == {0, 1}


def test_keys_get_the_names_that_a_user_gives_them(tmp_path: Path) -> None:
    from worldmodel.cli import record

    common = ["CartPole-v1", "--episodes", "1", "--max-steps", "3", "--size", "32"]
    record.main([*common, "--out", str(tmp_path / "named"), "--keys", "left, right"])
    info = json.loads((tmp_path / "named" / "meta" / "info.json").read_text())
    spec = info["worldmodel"]["action_spec"]
    assert [each["name"] for each in spec] == ["left", "right"]
    assert {each["kind"] for each in spec} == {"key"}
    file = tmp_path / "spec.json"
    file.write_text('[{"name": "a"}, {"name": "b"}]')
    for wrong in (["--keys", "left,left"], ["--keys", "left,"], ["--keys", "left,right,up"]):
        with pytest.raises(InputError):
            record.main([*common, "--out", str(tmp_path / "wrong"), *wrong])
    with pytest.raises(InputError):
        record.main([*common, "--out", str(tmp_path / "wrong"), "--keys", "a,b", "--action-spec", str(file)])
    assert not (tmp_path / "wrong").exists()
