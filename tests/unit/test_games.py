"""Games that others made, as environments of Gymnasium, and the policies that record them."""

import importlib
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from worldmodel import recording
from worldmodel.actions import Action
from worldmodel.config import ActionConfig, CodecConfig, DataConfig, SourceConfig, WorldModelConfig
from worldmodel.data.sources import open_source
from worldmodel.games.pusht import AGENT, BLOCK, STEP, Push, progress
from worldmodel.recording.environment import EnvironmentEpisodes
from worldmodel.recording.episode import RecordedEpisode
from worldmodel.recording.settings import EnvironmentSettings


def settings(package: str, env_id: str, policy: str = "random") -> EnvironmentSettings:
    return EnvironmentSettings(f"worldmodel.games.{package}:{env_id}", policy, max_steps=25)


def played(package: str, env_id: str, policy: str, episodes: int = 2) -> list[RecordedEpisode]:
    """The first episodes, which a second environment plays alike."""
    try:
        importlib.import_module(f"worldmodel.games.{package}")
    except ImportError as error:
        pytest.skip(str(error).splitlines()[0])
    found = []
    for _ in range(2):
        opened = EnvironmentEpisodes(settings(package, env_id, policy))
        found.append([opened.episode(index) for index in range(episodes)])
        opened.close()
    for one, two in zip(*found, strict=True):
        assert np.array_equal(one.cameras["render"], two.cameras["render"])
        assert one.actions == two.actions
    assert not np.array_equal(found[0][0].cameras["render"][0], found[0][1].cameras["render"][0])
    return found[0]


@pytest.mark.slow
def test_crafter_has_actions_that_are_words() -> None:
    episode = played("crafter", "Crafter-v1", "sticky")[0]
    assert episode.cameras["render"].shape[1:] == (72, 72, 3)
    names = [spec.name for spec in EnvironmentEpisodes(settings("crafter", "Crafter-v1")).mapping.specs]
    assert len(names) == 17 and names[:3] == ["noop", "move_left", "move_right"]
    assert {len(action.keys) for action in episode.actions} == {1}
    check_env(gymnasium.make("Crafter-v1", render_mode="rgb_array").unwrapped)


@pytest.mark.slow
def test_the_policy_of_crafter_achieves_more_than_chance() -> None:
    played("crafter", "Crafter-v1", "worldmodel.games.crafter.policy:Play")
    achieved = {"worldmodel.games.crafter.policy:Play": 0, "sticky": 0}
    for policy in achieved:
        plays = replace(settings("crafter", "Crafter-v1", policy), max_steps=150)
        opened = EnvironmentEpisodes(plays)
        for index in range(3):
            counts = opened.episode(index).infos[-1]["achievements"]
            achieved[policy] += sum(count > 0 for count in counts.values())
        opened.close()
    assert achieved["worldmodel.games.crafter.policy:Play"] > max(15, 2 * achieved["sticky"])


def test_creatures_of_crafter_are_drawn_in_the_order_of_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    crafter = pytest.importorskip("crafter")
    from worldmodel.games.crafter import Game

    given: list[list[tuple[int, int]]] = []

    def keep(_: object, chunk: object, objs: list[Any]) -> None:
        given.append([tuple(each.pos) for each in objs])

    monkeypatch.setattr(crafter.Env, "_balance_chunk", keep)
    game = Game(seed=3)
    game.reset()
    for _ in range(10):
        game.step(0)
    assert max(map(len, given)) > 3 and all(order == sorted(order) for order in given)


def test_the_maze_of_vizdoom_takes_keys_and_the_mouse() -> None:
    episode = played("vizdoom", "DoomMaze-v0", "worldmodel.games.vizdoom:Walk")[0]
    assert {len(action.mouse or ()) for action in episode.actions} == {2}
    assert {key for action in episode.actions for key in action.keys} <= {
        "forward", "backward", "left", "right",
    }  # fmt: skip
    opened = EnvironmentEpisodes(settings("vizdoom", "DoomMaze-v0"))
    yaw = opened.mapping.specs[4]
    assert (yaw.name, yaw.kind, yaw.unit, yaw.scale, opened.format.fps) == ("yaw", "mouse", "deg", 20, 7)
    start = opened.reset(3)
    distance = []
    for turn in (0.5, -0.5):  # ten degrees to the right, and back
        step = opened.advance(opened.env, Action(mouse=(turn, 0.0)))
        shown = opened.frame(opened.env, step.observation)
        distance.append(np.abs(start.astype(int) - shown).mean())
    assert distance[1] < 0.2 * distance[0]
    opened.close()


def test_every_seed_of_coinrun_is_another_level() -> None:
    episodes = played("coinrun", "CoinRun-v0", "worldmodel.games.coinrun:Run", 3)
    assert len({each.cameras["render"][0].tobytes() for each in episodes}) == 3
    frames = np.concatenate([each.cameras["render"][:-1] for each in episodes])
    after = np.concatenate([each.cameras["render"][1:] for each in episodes])
    assert frames.shape[1:] == (64, 64, 3) and (frames != after).any(axis=(1, 2, 3)).mean() > 0.5


def test_missions_of_babyai_are_actions_in_words(tmp_path: Path) -> None:
    pytest.importorskip("minigrid")
    policy = "worldmodel.games.minigrid:Missions"
    plays = EnvironmentSettings("minigrid:BabyAI-GoToLocalS6N4-v0", policy, size=(48, 48), max_steps=30)
    folder = recording.record_environment(plays, tmp_path / "missions", 5)
    played = EnvironmentEpisodes(plays)
    episodes = [played.episode(index) for index in range(5)]
    assert all(each.terminated and each.rewards[-1] > 0 for each in episodes), "all are carried out"
    model = WorldModelConfig(
        fps=10,
        chunk_frames=1,
        action=ActionConfig(text=True),
        codec=CodecConfig(image_size=48, temporal_factor=1),
    )
    source = open_source("mine", DataConfig({"mine": SourceConfig("lerobot", str(folder))}), model)
    for index, recorded in enumerate(episodes):
        actions = source.at(index).episode("rounds", 0, 0, 30).actions
        assert list(actions) == [Action(text=recorded.text)] * len(recorded.actions)
        assert recorded.text.startswith("go to ")


def test_pusht_can_be_copied() -> None:
    played("pusht", "PushT-v0", "worldmodel.games.pusht:Push")
    opened = EnvironmentEpisodes(settings("pusht", "PushT-v0", "worldmodel.games.pusht:Push"))
    push, env = Push(opened.env), opened.env
    push.reset(0)
    state, _ = env.reset(seed=5)
    for _ in range(30):
        state = env.step(push(state))[0]
    copy, start = deepcopy(env), state
    for step in range(30):
        way = push(state)
        state, *_ = env.step(way)
        if step < 10:  # later on, small differences of the first contacts grow
            twin, *_ = copy.step(way)
            assert np.allclose(state, twin, atol=5)  # of 512
    assert np.hypot(*(state - start)[2:4]) > 40, "the block was pushed"
    target = state[:2] + np.array([STEP, 0])
    for _ in range(20):
        state, *_ = env.step(np.clip(target - state[:2], -STEP, STEP))
    assert np.allclose(state[:2], target, atol=3)


def test_progress_in_pusht_grows_towards_the_goal() -> None:
    """The T stands upright on its bar 4 x 1, turned by 45 degrees to the left, in the middle of the board."""
    y, x = (np.indices((64, 64)) + 0.5) * 8 - 256
    x, y = (x + y) / np.sqrt(2), (y - x) / np.sqrt(2)
    block = ((np.abs(x) < 60) & (y > 0) & (y < 30)) | ((np.abs(x) < 15) & (y >= 30) & (y < 120))

    def score(place: np.ndarray, strength: float = 1.0, patch: tuple[int, ...] | None = None) -> float:
        frame = np.full((1, 64, 64, 3), 255)
        frame[0, place] = BLOCK
        top, left = place.nonzero()[0][0], place.nonzero()[1][0]
        if patch:
            frame[0, 31:34, 31:34] = patch  # on the goal
        frame[0, top - 1, left : left + 2] = AGENT
        return progress((255 - strength * (255 - frame)).astype(np.uint8), Action())

    scores = [score(np.roll(block, shift, axis=0)) for shift in (0, -2, -4, -8, -16)]
    assert -0.01 < scores[0] <= 0 and (np.diff(scores) < 0).all()
    assert score(block[::-1]) < scores[2]  # the place is right, the angle is not
    away = np.roll(block, -16, axis=0)
    assert score(away, 0.5) == pytest.approx(score(away), abs=0.005)  # faded, as models paint it
    assert score(away, patch=(150, 60, 110)) < score(away)  # blurred, and not of the block's shape
    assert progress(np.full((1, 64, 64, 3), 255, np.uint8), Action()) == -1


def test_the_policy_of_pusht_goes_where_the_block_is() -> None:
    policy = Push(gymnasium.Env())
    policy.reset(0)
    state, touched = np.array([30.0, 30, 300, 300, 0]), 0
    for _ in range(400):
        way = policy(state)
        assert way.shape == (2,) and np.hypot(*way) <= STEP + 1
        state[:2] = np.clip(state[:2] + way, 0, 512)
        touched += np.hypot(*(state[:2] - state[2:4])) < 60
    assert touched > 40
