"""Gymnasium environments: gymnasium's checker, and vector environments against single ones."""

import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# ruff: noqa: E402 -- gymnasium is an extra

gymnasium = pytest.importorskip("gymnasium")

from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit

import worldmodel
from worldmodel.actions import Action
from worldmodel.env import SessionLike, WorldEnv, WorldSpec, WorldVectorEnv
from worldmodel.env.actions import action_space, to_action
from worldmodel.episodes import StepResult
from worldmodel.errors import ConfigError, InputError, ModelError
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout import Session
from worldmodel.worlds import get_world

KINDS = ("keys", "vector", "text")
NAME = "worldmodel/Tiny-v0"


def ends(frames: np.ndarray, action: Action) -> bool:
    """End when both keys are pressed."""
    return len(action.keys) == 2


def brightness(frames: np.ndarray, action: Action) -> float:
    return float(frames[-1].mean()) + len(action.keys)


@pytest.fixture
def registered(model_folder: Path) -> Iterator[str]:
    """An id under which the tiny model is registered as the shipped one is under its own."""
    gymnasium.register(
        NAME,
        entry_point="worldmodel.env:WorldEnv",
        vector_entry_point="worldmodel.env:WorldVectorEnv",
        max_episode_steps=3,
        kwargs={"world": str(model_folder), "start": "shapes"},
    )
    yield NAME
    del gymnasium.registry[NAME]


# ---- single environments -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_environment_passes_the_checker_of_gymnasium(model: WorldModel, kind: str) -> None:
    gymnasium.register(
        NAME,
        entry_point=lambda **settings: WorldEnv(model, **settings),
        kwargs={"actions": kind, "start": "shapes", "obs_type": "clip" if kind == "text" else "frame"},
    )
    gymnasium.spec(NAME).entry_point.metadata = WorldEnv.metadata
    try:
        env = gymnasium.make(NAME, render_mode="rgb_array").unwrapped
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(env)
    finally:
        del gymnasium.registry[NAME]


@pytest.mark.parametrize(
    ("kind", "space"),
    [
        (None, gymnasium.spaces.MultiBinary(2)),
        ("keys", gymnasium.spaces.MultiBinary(2)),
        ("key", gymnasium.spaces.Discrete(2)),
        ("vector", gymnasium.spaces.Box(-1, 1, (3,), np.float32)),
    ],
)
def test_action_space_follows_the_config_of_the_model(model: WorldModel, kind: Any, space: Any) -> None:
    assert WorldEnv(model, actions=kind).action_space == space


def test_a_key_is_pressed_alone(model: WorldModel, image: np.ndarray) -> None:
    env = WorldEnv(model, actions="key")
    _, info = env.reset(seed=5, options={"observation": image})
    session = model.session(info["world_seed"])
    session.reset(image)
    for number, key in enumerate(("left", "right")):
        assert np.array_equal(env.step(np.int64(number))[0], session.step({"keys": [key]}).frames[-1])
    with pytest.raises(ConfigError, match="once"):
        WorldEnv(model, actions=("key", "keys"))


def test_samples_of_the_text_space_are_valid_actions(model: WorldModel) -> None:
    space = action_space("text", model.config.action)
    space.seed(0)
    assert "the red ball moves left, and the box jumps" in space
    for _ in range(300):
        action = to_action("text", space.sample(), model.config.action)
        model.action.validate(action, model.backbone)
    longest = space.sample(mask=(space.max_length, None))
    model.action.validate(Action(longest), model.backbone)


def test_episode_equals_session(model: WorldModel, image: np.ndarray) -> None:
    env = WorldEnv(model, obs_type="clip")
    first, info = env.reset(seed=5, options={"observation": image})
    session = model.session(info["world_seed"])
    assert np.array_equal(first[-1], session.reset(image)[-1])
    assert first.shape == (8, 32, 32, 3)
    assert np.array_equal(first[0], first[-1])
    for keys in ([1, 0], [0, 0], [1, 1], [0, 1]):
        names = [key for key, on in zip(("left", "right"), keys, strict=True) if on]
        observation, reward, terminated, truncated, _ = env.step(np.array(keys, np.int8))
        assert np.array_equal(observation, session.step({"keys": names}).frames)
        assert (reward, terminated, truncated) == (0.0, False, False)


def test_frame_observation_is_the_last_frame_of_the_clip(model: WorldModel) -> None:
    frame, clip = (WorldEnv(model, start="shapes", obs_type=what) for what in ("frame", "clip"))
    assert np.array_equal(frame.reset(seed=1)[0], clip.reset(seed=1)[0][-1])
    assert np.array_equal(frame.step([1, 0])[0], clip.step([1, 0])[0][-1])


def test_episodes_depend_on_the_seed(model: WorldModel) -> None:
    def played(seed: int) -> list[np.ndarray]:
        env = WorldEnv(model, start="shapes", actions="vector")
        seen = [env.reset(seed=seed)[0]]
        seen += [env.step(vector)[0] for vector in ([0, 0.5, 1], [1, 1, 1])]
        return [*seen, env.reset()[0], env.step([0, 0, 0])[0]]

    one, again, other = played(1), played(1), played(2)
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert not np.array_equal(one[0], one[3]), "the second episode starts as the first did"


def test_episode_starts_from_observation_text_or_function(
    model: WorldModel, image: np.ndarray, tmp_path: Path
) -> None:
    env = WorldEnv(model, start={"observation": image})
    assert np.array_equal(env.reset()[0], image)
    assert np.array_equal(env.reset(seed=3)[0], image)
    imagined, info = env.reset(options={"text": "a red ball at the left"})
    session = model.session(info["world_seed"])
    assert np.array_equal(imagined, session.reset(text="a red ball at the left")[-1])
    drawn = WorldEnv(model, start=lambda rng: {"observation": image[:: int(rng.choice([-1, 1]))]})
    assert {drawn.reset(seed=seed)[0].tobytes() for seed in range(8)} == {
        image.tobytes(),
        image[::-1].tobytes(),
    }


def test_reward_fn_and_termination_fn(model: WorldModel) -> None:
    env = WorldEnv(model, start="shapes", reward_fn=brightness, termination_fn=ends)
    env.reset(seed=0)
    seen, reward, terminated, _, _ = env.step([1, 0])
    assert reward == pytest.approx(seen.mean() + 1)
    assert terminated is False
    assert env.step([1, 1])[2] is True


def test_render_returns_every_frame_once(model: WorldModel) -> None:
    env = WorldEnv(model, start="shapes", render_mode="rgb_array_list", obs_type="clip")
    assert env.metadata["render_fps"] == model.config.fps
    env.reset(seed=0)
    clips = [env.step([1, 0])[0], env.step([0, 1])[0]]
    shown = env.render()
    assert isinstance(shown, list)
    assert np.array_equal(np.stack(shown[1:]), np.concatenate(clips))
    assert env.render() == []
    env.step([0, 0])
    env.reset()
    assert len(env.render()) == 1
    still = WorldEnv(model, start="shapes", render_mode="rgb_array")
    assert np.array_equal(still.reset(seed=0)[0], still.render())
    assert np.array_equal(still.step([1, 0])[0], still.render())
    assert WorldEnv(model).render() is None


def test_memory_does_not_grow_with_the_episode(model: WorldModel) -> None:
    env = WorldEnv(model, start="shapes")
    env.reset(seed=0)
    for _ in range(5):
        env.step([0, 1])
    assert isinstance(env.world, Session)
    assert len(env.world.clips) == 1
    assert env.world.state.round == 5


@pytest.mark.parametrize("way", ["session", "steps"])
def test_environment_of_an_open_session(model: WorldModel, image: np.ndarray, way: str) -> None:
    session = model.session(seed=9, num_inference_steps=1)

    class Remote:
        """The methods of a client's world, and none of the others of a session."""

        def reset(self, frames: Any = None, *, text: str | None = None) -> np.ndarray:
            return session.reset(frames, text=text)

        def step(self, action: Action) -> StepResult:
            return session.step(action)

    assert isinstance(Remote(), SessionLike)
    with pytest.raises(ConfigError, match="world_spec="):
        WorldEnv(Remote())
    known = WorldSpec(32, 8, 8, model.config.action)
    with pytest.raises(ConfigError, match=r"\(64, 64\)"):
        WorldEnv(Remote(), start={"observation": image}, world_spec=replace(known, image_size=64)).reset()
    env = WorldEnv(session) if way == "session" else WorldEnv(Remote(), world_spec=known)
    assert env.world_spec == known
    env.reset(seed=1, options={"observation": image})
    alone = model.session(seed=9, num_inference_steps=1)
    alone.reset(image)
    for keys in ([1, 0], [0, 1]):
        seen = env.step(keys)[0]
        assert np.array_equal(seen, alone.step({"keys": ["left" if keys[0] else "right"]}).frames[-1])
    assert len(session.clips) == 3, "an open session keeps all its clips"


# ---- vector environments -------------------------------------------------------------------------------


def actions_of(kind: str, rounds: int, seed: int = 0) -> list[Any]:
    """Actions for three worlds, among them null actions and texts of different lengths."""
    rng = np.random.default_rng(seed)
    if kind == "keys":
        return [rng.integers(0, 2, (3, 2), dtype=np.int8) for _ in range(rounds)]
    if kind == "vector":
        return [rng.uniform(-1, 1, (3, 3)).astype(np.float32) for _ in range(rounds)]
    # The longest takes two slots of action tokens, so its sequence is longer than the others'.
    texts = ["", "the red ball moves left", "the big blue box turns green and a cross jumps at the top"]
    return [tuple(rng.permutation(texts).tolist()) for _ in range(rounds)]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_vector_environment_equals_single_ones(model: WorldModel, kind: str, mode: AutoresetMode) -> None:
    """Reference: gymnasium's SyncVectorEnv over single environments with TimeLimit."""
    settings = {
        "start": "shapes",
        "actions": kind,
        "termination_fn": ends,
        "reward_fn": lambda f, a: len(a.keys),
    }
    many = WorldVectorEnv(model, 3, max_episode_steps=4, autoreset_mode=mode, **settings)
    singly = SyncVectorEnv([lambda: TimeLimit(WorldEnv(model, **settings), 4)] * 3, autoreset_mode=mode)
    assert many.observation_space == singly.observation_space
    assert many.action_space == singly.action_space
    assert many.metadata["autoreset_mode"] is mode
    pairs = [(many.reset(seed=7), singly.reset(seed=7))]
    played = actions_of(kind, 7)
    pairs += [(many.step(each), singly.step(each)) for each in played]
    ended = 0
    for (seen, *rest), (expected, *others) in pairs:
        np.testing.assert_allclose(seen.astype(int), expected, atol=1)
        assert seen.dtype == np.uint8
        for one, other in zip(rest[:-1], others[:-1], strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
        ended += int(sum(rest[1] | rest[2])) if len(rest) > 1 else 0
        assert rest[-1].keys() == others[-1].keys()
        for name in rest[-1].keys() - {"final_obs"}:
            np.testing.assert_equal(rest[-1][name], others[-1][name])
        for one, other in zip(rest[-1].get("final_obs", ()), others[-1].get("final_obs", ()), strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                np.testing.assert_allclose(one.astype(int), other, atol=1)
    assert ended >= 3


def test_round_of_a_vector_environment_is_one_batch(
    model: WorldModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = WorldVectorEnv(model, 4, start="shapes")
    env.reset(seed=0)
    batches: dict[str, list[int]] = {"backbone": [], "generator": [], "decode": []}

    def counted(name: str, row: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            batches[name].append(len(args[row]))
            return call(*args, **kwargs)

        return count

    monkeypatch.setattr(model.backbone, "forward", counted("backbone", 0, model.backbone.forward))
    monkeypatch.setattr(model.generator, "forward", counted("generator", 0, model.generator.forward))
    monkeypatch.setattr(model, "decode", counted("decode", 0, model.decode))
    for _ in range(2):
        env.step(np.zeros((4, 2), np.int8))
    assert batches == {"backbone": [4, 4], "generator": [4, 4], "decode": [4, 4]}


def test_reset_mask_without_autoreset(model: WorldModel) -> None:
    env = WorldVectorEnv(
        model, 2, start="shapes", termination_fn=ends, max_episode_steps=-1, autoreset_mode="Disabled"
    )
    env.reset(seed=[3, None])
    seen, _, terminated, _, _ = env.step([[0, 0], [1, 1]])
    assert terminated.tolist() == [False, True]
    with pytest.raises(InputError, match="world 1"):
        env.step([[0, 0], [0, 0]])
    options = {"reset_mask": np.array([False, True])}
    again, info = env.reset(options=options)
    assert "reset_mask" in options, "the caller's options are the caller's"
    assert np.array_equal(again[0], seen[0])
    assert not np.array_equal(again[1], seen[1])
    assert info["_world_seed"].tolist() == [False, True]
    env.step([[0, 0], [0, 0]])


def test_vector_environment_of_open_sessions(model: WorldModel) -> None:
    sessions = [model.session(seed) for seed in (1, 2)]
    env = WorldVectorEnv(sessions, 2, start="shapes")
    seen = [env.reset(seed=0)[0], env.step([[1, 0], [0, 1]])[0]]
    for row, seed in enumerate((1, 2)):
        alone = WorldEnv(model.session(seed), start="shapes")
        assert np.array_equal(alone.reset(seed=row)[0], seen[0][row])
        assert np.array_equal(alone.step([row == 0, row == 1])[0], seen[1][row])
    with pytest.raises(InputError, match=r"\b2\b"):
        env.step([[1, 0], [0, 2]])
    env.close()
    env.close()


def test_invalid_action_leaves_all_worlds_unchanged(model: WorldModel) -> None:
    env = WorldVectorEnv(model, 2, start="shapes", actions="text")
    env.reset(seed=0)
    with pytest.raises(InputError, match="tokens"):
        env.step(["the red ball moves left", "a " * 300])
    assert [each.world.state.round for each in env.envs if isinstance(each.world, Session)] == [0, 0]


def test_render_of_a_vector_environment_is_a_tuple(model: WorldModel) -> None:
    env = WorldVectorEnv(model, 2, start="shapes", render_mode="rgb_array")
    seen, _ = env.reset(seed=0)
    shown = env.render()
    assert isinstance(shown, tuple)
    assert np.array_equal(np.stack(shown), seen)


# ---- registration --------------------------------------------------------------------------------------


def test_environment_is_made_by_its_id(registered: str) -> None:
    env = gymnasium.make(f"worldmodel.env:{registered}")  # as one who has not imported the module
    env.reset(seed=0)
    assert [env.step(np.array([1, 0]))[3] for _ in range(3)] == [False, False, True]
    assert gymnasium.make(registered, actions="text", max_episode_steps=-1).action_space.max_length == 63
    many = gymnasium.make_vec(registered, num_envs=2)
    assert isinstance(many, WorldVectorEnv)
    many.reset(seed=0)
    for _ in range(3):
        _, _, _, truncated, _ = many.step(np.zeros((2, 2), np.int8))
    assert truncated.tolist() == [True, True]
    again = gymnasium.make_vec(many.spec)
    assert again.num_envs == 2


def test_shipped_environment_is_registered() -> None:
    spec = gymnasium.spec("worldmodel/ShapesTiny-v0")
    assert spec.kwargs == {"world": "shapes-tiny", "start": "shapes"}
    assert gymnasium.envs.registration.load_env_creator(spec.entry_point) is WorldEnv
    assert gymnasium.envs.registration.load_env_creator(spec.vector_entry_point) is WorldVectorEnv
    assert gymnasium.envs.registration.EnvSpec.from_json(spec.to_json()) == spec
    frame = get_world("shapes").start(np.random.default_rng(0))["observation"]
    assert frame.shape == (64, 64, 3)


def run(code: str) -> str:
    return subprocess.check_output([sys.executable, "-c", code], text=True, timeout=120).strip()


def test_gymnasium_is_imported_only_where_environments_are_played() -> None:
    library = Path(worldmodel.__file__).parent
    needing = {library / name for name in ("env", "games", "recording")} | {
        library / "planning" / name for name in ("environment.py", "ranking.py")
    }
    others = [path for path in library.rglob("*.py") if not needing & {path, *path.parents}]
    assert len(others) > 20
    # Kinds of action import it when a space is asked for.
    needs = re.compile(
        r"^(import|from) (gymnasium|worldmodel\.env|worldmodel import .*\benv\b)", re.MULTILINE
    )
    assert [path for path in others if needs.search(path.read_text(encoding="utf-8"))] == []
    message = run(
        "import sys; sys.modules['gymnasium'] = None\n"
        "try:\n    import worldmodel.env\nexcept ImportError as error:\n    print(error)"
    )
    assert "pip install 'openworldmodel[gym]'" in message
    # Recording a world of the library does not need it.
    run("import sys; sys.modules['gymnasium'] = None\nimport worldmodel.recording")


# ---- errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "action", "value"),
    [
        ("keys", "left", "'left'"),
        ("keys", [1, 0, 1], "[1, 0, 1]"),
        ("keys", [0.5, 0], "[0.5, 0]"),
        ("keys", None, "None"),
        ("key", 2, "2"),
        ("key", [0, 1], "[0, 1]"),
        ("keys", np.zeros((32, 32, 3)), "(32, 32, 3)"),
        ("vector", [1, 2], "[1, 2]"),
        ("vector", [1, 2, float("nan")], "nan"),
        ("vector", {"vector": [1, 2, 3]}, "{'vector': [1, 2, 3]}"),
        ("vector", [[1], [2, 3]], "[[1], [2, 3]]"),
        ("text", 3, "3"),
        ("text", "red " * 300, "64"),
    ],
)
def test_invalid_action(model: WorldModel, kind: Any, action: Any, value: str) -> None:
    env = WorldEnv(model, start="shapes", actions=kind)
    env.reset(seed=0)
    with pytest.raises(InputError, match=re.escape(value)):
        env.step(action)
    env.step(env.action_space.sample())


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"obs_type": "frames"}, "'frames'"),
        ({"render_mode": "human"}, "'human'"),
        ({"actions": "mouse"}, "'mouse'"),
        ({"start": "cubes"}, "'cubes'"),
        ({"start": 3}, "start is a int"),
        ({"num_inference_steps": -1}, "num_inference_steps is -1"),
        ({"world": 3}, "world is a int"),
    ],
)
def test_invalid_setting(model: WorldModel, settings: dict[str, Any], value: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(value)):
        WorldEnv(**{"world": model, **settings})


def test_errors_of_a_single_environment(model: WorldModel, image: np.ndarray) -> None:
    env = WorldEnv(model)
    with pytest.raises(InputError, match="start="):
        env.reset()
    with pytest.raises(InputError, match="call reset"):
        env.step([0, 0])
    with pytest.raises(InputError, match="'image'"):
        env.reset(options={"image": image})
    with pytest.raises(InputError, match="call reset"):
        WorldEnv(model, render_mode="rgb_array").render()
    with pytest.raises(InputError, match="text"):
        env.reset(options={"observation": image, "text": "a ball"})
    with pytest.raises(ConfigError, match="guidance_scale"):
        WorldEnv(model.session(), guidance_scale=2.0)
    with pytest.raises(ModelError, match="no-such-world"):
        WorldEnv("no-such-world")


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"num_envs": 0}, "num_envs is 0"),
        ({"max_episode_steps": 0}, "max_episode_steps 0"),
        ({"autoreset_mode": "Never"}, "'Never'"),
        ({"world": []}, "list of 2"),
        ({"world": 3}, "list of 2"),
    ],
)
def test_invalid_setting_of_a_vector_environment(
    model: WorldModel, settings: dict[str, Any], value: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(value)):
        WorldVectorEnv(**{"world": model, "num_envs": 2, **settings})


def test_errors_of_a_vector_environment(model: WorldModel) -> None:
    env = WorldVectorEnv(model, 2, start="shapes")
    with pytest.raises(InputError, match="call reset"):
        env.step([[0, 0], [0, 0]])
    with pytest.raises(InputError, match="3 seeds"):
        env.reset(seed=[1, 2, 3])
    for mask in ([True], [1, 0], [False, False]):
        with pytest.raises(InputError, match="2 booleans"):
            env.reset(options={"reset_mask": np.array(mask)})
    env.reset(seed=0)
    for actions in ("ab", 3, None, [[0, 0]], np.zeros((3, 2))):
        with pytest.raises(InputError, match="pass 2"):
            env.step(actions)
    session = model.session()
    with pytest.raises(ConfigError, match="twice"):
        WorldVectorEnv([session, session], 2)
