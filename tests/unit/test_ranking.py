"""Ranking of policies: the environment as its own world gives the same returns, and order is measured."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("minigrid")

from worldmodel.actions import Action
from worldmodel.cli import main
from worldmodel.episodes import Outcome
from worldmodel.errors import InputError
from worldmodel.games.minigrid import Player
from worldmodel.media import Frame
from worldmodel.planning.environment import EnvironmentSimulator, EnvironmentState
from worldmodel.planning.ranking import FramesOnly, RankedPolicy, agreement, rank_policies, spearman
from worldmodel.recording.environment import EnvironmentEpisodes
from worldmodel.recording.settings import EnvironmentSettings

DOORKEY = "minigrid:MiniGrid-DoorKey-6x6-v0"
PLAYER = "worldmodel.games.minigrid:Player"


@pytest.fixture(scope="module")
def played() -> EnvironmentEpisodes:
    return EnvironmentEpisodes(EnvironmentSettings(DOORKEY, max_steps=40, size=48))


def test_the_environment_as_its_own_world_gives_the_same_returns(played: EnvironmentEpisodes) -> None:
    steps: list[int] = []
    ranked = rank_policies(
        [f"{PLAYER}@0.2", "sticky"], played, EnvironmentSimulator(played), range(2), progress=steps.append
    )
    assert [each.name for each in ranked] == [f"{PLAYER}@0.2", "sticky"]
    for each in ranked:
        assert each.imagined == pytest.approx(each.real)
    assert min(ranked[0].real) > 0.8  # it solves every board
    assert sum(steps) < 2 * 2 * 2 * 40  # episodes that end are played no further


def test_policies_see_frames_alone(played: EnvironmentEpisodes) -> None:
    seen: list[Any] = []

    class Watches(Player):
        def __call__(self, observation: Frame) -> int:
            seen.append(observation)
            return super().__call__(observation)

    env = FramesOnly(played.env.action_space, (48, 48, 3))
    policy = Watches(env)
    policy.reset(0)
    assert policy(played.reset(0)) in range(int(env.action_space.n))  # type: ignore[attr-defined]
    assert seen[0].shape == env.observation_space.shape and seen[0].dtype == np.uint8
    with pytest.raises(InputError, match="see a frame"):  # BabyAI's bot plays from the board itself
        rank_policies(["worldmodel.games.minigrid:Missions"], played, EnvironmentSimulator(played), range(1))


class WithoutRewards(EnvironmentSimulator):
    def outcome(self, state: EnvironmentState) -> Outcome | None:
        return None


class Backwards(EnvironmentSimulator):
    """A world that takes every action for no action."""

    def step(self, states: Sequence[EnvironmentState], actions: Sequence[Action]) -> list[EnvironmentState]:
        return super().step(states, [Action(keys=("done",))] * len(actions))


def test_a_world_that_does_not_obey_gives_other_returns(played: EnvironmentEpisodes) -> None:
    (player,) = rank_policies([PLAYER], played, Backwards(played), range(2))
    assert player.imagined == (0, 0) and min(player.real) > 0.9


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("walk", "no policy 'walk'"),
        ("random@half", "'half'"),
        ("random@2", "epsilon is 2"),
    ],
)
def test_unknown_policies_are_refused(played: EnvironmentEpisodes, policy: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rank_policies([policy], played, EnvironmentSimulator(played), range(1))


def test_a_world_without_rewards_is_refused(played: EnvironmentEpisodes) -> None:
    with pytest.raises(InputError, match="outcomes: true"):
        rank_policies(["random"], played, WithoutRewards(played), range(1))


def test_spearman_is_scipys() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        left, right = rng.integers(6, size=(2, 12)).tolist()  # with equal values
        assert spearman(left, right) == pytest.approx(stats.spearmanr(left, right)[0])
    assert math.isnan(spearman([1, 1], [1, 2]))


def test_the_interval_is_narrow_where_policies_differ_and_wide_where_they_do_not() -> None:
    rng = np.random.default_rng(1)

    def policies(spread: float) -> list[RankedPolicy]:
        found = []
        for number in range(12):
            imagined, real = rng.normal(spread * number, 1, size=(2, 20)).tolist()
            found.append(RankedPolicy(str(number), tuple(imagined), tuple(real)))
        return found

    clear, noise = agreement(policies(5.0)), agreement(policies(0.0))
    assert clear["value"] == 1 and clear["low"] > 0.95 and clear["n"] == 12
    assert noise["low"] < 0 < noise["high"] and abs(noise["value"]) < 0.7


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ranked.json"
    command = ["rank", "random", PLAYER, "--world", "minigrid-doorkey", "--env", DOORKEY]
    assert main([*command, "--episodes", "2", "--max-steps", "30", "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["policy", PLAYER, "random"]  # the best is first
    written = json.loads(out.read_text())
    assert written["spearman"]["value"] == 1
    assert all(len(each["real"]) == 2 for each in written["policies"].values())
    assert main([*command, "--json", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    alike = ["rank", "random", "sticky", *command[3:], "--episodes", "1", "--max-steps", "2"]
    assert main([*alike, "--json", str(out)]) == 0  # neither solves a board in two steps
    assert "unknown" in capsys.readouterr().out
    assert json.loads(out.read_text())["spearman"] is None
    assert main([*command[:2], *command[3:]]) == 2
    assert "2 or more policies" in capsys.readouterr().err
