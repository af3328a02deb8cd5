"""Environments and policies that misbehave, or give pictures in another form, while they are recorded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from worldmodel import config as configs
from worldmodel import recording
from worldmodel.actions import Action
from worldmodel.cli import main
from worldmodel.errors import InputError
from worldmodel.recording.environment import EnvironmentEpisodes
from worldmodel.recording.settings import EnvironmentSettings

SIDE = 32


class Mover(gymnasium.Env):
    """A square on the ground that the action moves; options make it odd."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space, action_space = spaces.Box(0, 1, (2,)), spaces.Discrete(3)

    def __init__(
        self,
        render_mode: str | None = None,
        form: str = "rgb",
        length: int = 8,
        raises: tuple[str, int] = ("", 0),
        still: bool = False,
        old: str = "",
    ) -> None:
        self.render_mode, self.form, self.length = render_mode, form, length
        self.raises, self.still, self.old = tuple(raises), still, old
        self.resets = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.place = 0, int(self.np_random.integers(4, 20))
        self.resets += 1
        self._raise("reset", self.resets)
        observation = np.zeros(2, np.float32)
        return observation if self.old == "reset" else (observation, {})

    def step(self, action: Any) -> Any:
        self.steps += 1
        self._raise("step", self.steps)
        self.place = int(np.clip(self.place + 3 * (int(action) - 1), 0, SIDE - 8))
        done, observation = self.steps >= self.length, np.zeros(2, np.float32)
        return (observation, 0.0, done, {}) if self.old == "step" else (observation, 0.0, done, False, {})

    def render(self) -> Any:
        self._raise("render", self.steps)
        frame = np.full((SIDE, SIDE, 3), 30, np.uint8)
        if not self.still:
            frame[20:28, self.place : self.place + 8] = (250, 80, 20)
        forms = {
            "grey": lambda: frame[..., 0],
            "grey1": lambda: frame[..., :1],
            "rgba": lambda: np.concatenate([frame, np.full((SIDE, SIDE, 1), 255, np.uint8)], -1),
            "list": lambda: [frame * 0, frame],
            "floats": lambda: frame / 255,
            "large floats": lambda: frame / 1.0,
            "grows": lambda: np.pad(frame, ((0, 2 * self.steps), (0, 0), (0, 0))),
            "empty": list,
        }
        return forms.get(self.form, lambda: frame)()

    def _raise(self, what: str, now: int) -> None:
        if self.raises == (what, now):
            raise RuntimeError("physics exploded")


class GreyObservations(Mover):
    """Renders nothing; observes a grey image."""

    metadata = {"render_modes": [], "render_fps": 10}  # noqa: RUF012
    observation_space = spaces.Box(0, 255, (SIDE, SIDE), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.full((SIDE, SIDE), 90, np.uint8), {}

    def step(self, action: Any) -> Any:
        _, *rest = super().step(action)
        return np.full((SIDE, SIDE), 90 + self.steps, np.uint8), *rest


for name, kind in (("Mover-v0", Mover), ("GreyObservations-v0", GreyObservations)):
    if name not in gymnasium.registry:
        gymnasium.register(name, kind)


def settings(policy: str = "random", **arguments: Any) -> EnvironmentSettings:
    return EnvironmentSettings("Mover-v0", policy, env_args=arguments)


def num_recorded(folder: Path) -> int:
    info = folder / "meta" / "info.json"
    return json.loads(info.read_text())["total_episodes"] if info.is_file() else 0


def test_pixels_of_boards_are_repeated() -> None:
    """MinAtar draws one pixel per cell; interpolation would blur what stands beside each other."""
    sizes = [replace(settings(), size=size) for size in (None, 2 * SIDE, 3 * SIDE // 2)]
    plain, twice, other = (
        next(iter(EnvironmentEpisodes(each).episode(0).cameras.values())) for each in sizes
    )
    assert np.array_equal(twice, plain.repeat(2, axis=1).repeat(2, axis=2))
    assert len(np.unique(other[0].reshape(-1, 3), axis=0)) > len(np.unique(plain[0].reshape(-1, 3), axis=0))


def test_floats_beyond_one_are_no_pictures() -> None:
    with pytest.raises(InputError, match="float64 values"):
        EnvironmentEpisodes(settings(form="large floats")).episode(0)


@pytest.mark.parametrize("form", ["grey", "grey1", "rgba", "list", "floats"])
def test_pictures_of_other_forms_are_converted(form: str) -> None:
    plain, other = (EnvironmentEpisodes(settings(form=each)).episode(0) for each in ("rgb", form))
    (found,), (wanted,) = other.cameras.values(), plain.cameras.values()
    assert found.shape == (9, SIDE, SIDE, 3) and found.dtype == np.uint8
    if form.startswith("grey"):
        wanted = np.repeat(wanted[..., :1], 3, axis=-1)
    assert np.array_equal(found, wanted)


def test_a_grey_observation_is_recorded() -> None:
    (frames,) = EnvironmentEpisodes(EnvironmentSettings("GreyObservations-v0")).episode(0).cameras.values()
    assert frames[:, 0, 0].tolist() == [[90 + step] * 3 for step in range(9)]


@pytest.mark.parametrize(
    ("what", "number", "place", "kept"),
    [
        ("reset", 2, r"RuntimeError \(physics exploded\) at the beginning of episode 1", 1),
        ("step", 5, r"RuntimeError \(physics exploded\) at step 5 of episode 0", 0),
        ("render", 3, r"RuntimeError \(physics exploded\) at step 3 of episode 0", 0),
    ],
)
def test_an_error_of_the_environment_names_episode_and_step(
    tmp_path: Path, what: str, number: int, place: str, kept: int
) -> None:
    with pytest.raises(InputError, match=f"Mover-v0 raised {place}") as caught:
        recording.record_environment(settings(raises=(what, number)), tmp_path / "set", 3)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert num_recorded(tmp_path / "set") == kept


POLICY = """
class Late:
    def __init__(self, env): self.episodes = 0
    def reset(self, seed): self.episodes, self.steps = self.episodes + 1, 0
    def __call__(self, observation):
        self.steps += 1
        if (self.episodes, self.steps) == (3, 4):
            raise KeyError("no plan")
        return self.steps % 3
"""


@pytest.mark.parametrize("form", ["lerobot", "clips"])
def test_an_error_of_the_policy_keeps_the_episodes_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    (tmp_path / "late_policy.py").write_text(POLICY)
    monkeypatch.syspath_prepend(tmp_path)
    said = r"policy 'late_policy:Late' raised KeyError \('no plan'\) at step 4 of episode 2"
    with pytest.raises(InputError, match=said):
        recording.record_environment(settings("late_policy:Late"), tmp_path / "set", 6, form)
    table = tmp_path / "set" / "clips.jsonl"
    kept = num_recorded(tmp_path / "set") if form == "lerobot" else len(table.read_text().splitlines())
    assert kept == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"form": "grows"}, r"\(34, 32\).* at step 1 of episode 0, and the first .*\(32, 32\)"),
        ({"form": "empty"}, "not an image"),
        ({"old": "reset"}, r"does not return \(observation, info\) from reset"),
        ({"old": "step"}, "from step"),
        ({"still": True}, "picture of Mover-v0 did not change in the first 5 episodes"),
        ({"length": 1}, "first 5 episodes of Mover-v0 ended with its first step"),
    ],
)
def test_odd_environments_are_refused_before_hours_are_spent(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said) as caught:
        recording.record_environment(settings(**changes), tmp_path / "set", 20)
    assert str(caught.value).count("\n") == 0
    assert num_recorded(tmp_path / "set") == (5 if {"still", "length"} & changes.keys() else 0)


def test_with_a_size_frames_may_grow() -> None:
    made = EnvironmentSettings("Mover-v0", size=32, env_args={"form": "grows"})
    assert EnvironmentEpisodes(made).episode(0).cameras["render"].shape == (9, 32, 32, 3)


def test_planning_names_an_environment_of_the_old_interface() -> None:
    played = EnvironmentEpisodes(settings(old="step"))
    played.reset(0)
    with pytest.raises(InputError, match="from step"):
        played.advance(played.env, Action(keys=("action_1",)))


@pytest.mark.parametrize("num_keys", [3, 300])
def test_a_config_with_an_action_spec_is_printed_as_it_is(
    num_keys: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one whose spec is longer than a line of YAML may be."""
    spec = [{"name": f"key_{i}", "kind": "key", "low": 0, "high": 1, "rate": 10.0} for i in range(num_keys)]
    keys = [each["name"] for each in spec]
    mine, printed = tmp_path / "mine.yaml", tmp_path / "printed.yaml"
    mine.write_text(json.dumps({"model": {"action": {"text": False, "keys": keys, "spec": spec}}}))
    assert main(["config", str(mine)]) == 0
    printed.write_text(capsys.readouterr().out)
    assert configs.load(printed).model == configs.load(mine).model
    assert len(configs.load(printed).model.action.spec) == num_keys
