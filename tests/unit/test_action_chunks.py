"""Rounds with several actions, one per frame: types, tokens, data, sessions, environments, training."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from worldmodel.actions import Action, Camera, Pose
from worldmodel.config import (
    ActionConfig,
    ActionSpec,
    CodecConfig,
    ConditionAdapterConfig,
    DataConfig,
    SourceConfig,
    StageConfig,
    TrainConfig,
    TrainedConfig,
    VisionConfig,
    WorldModelConfig,
)
from worldmodel.data.sources import open_source
from worldmodel.env import WorldEnv, WorldVectorEnv
from worldmodel.episodes import Outcome
from worldmodel.errors import ConfigError, InputError
from worldmodel.models.world_model import WorldModel
from worldmodel.planning import Box, Choices, action_set
from worldmodel.recording.episode import RecordedEpisode, RecordingFormat
from worldmodel.recording.lerobot import LeRobotStore
from worldmodel.rollout import WorldState
from worldmodel.train import finetune

SIDE, KEYS = 32, ("left", "right")
LEFT, RIGHT = (Action(keys=(key,)) for key in KEYS)
SPECS = tuple(ActionSpec(name, "key", rate=10) for name in KEYS)
TAKES = ActionConfig(text=False, keys=KEYS, vector=2, camera=True, per_round=2)


@pytest.fixture(scope="module")
def chunked(make_model: Callable[..., WorldModel]) -> WorldModel:
    """A model with two actions in a round of eight frames; tests must not change it."""
    return make_model(action=TAKES)


# ---- actions ---------------------------------------------------------------------------------------------


def test_a_list_is_a_chunk_and_survives_json() -> None:
    action = Action.of([{"keys": ["left"]}, None, "go on"])
    assert action.chunk == (LEFT, Action(), Action("go on"))
    assert Action.of(json.loads(json.dumps(action.as_dict()))) == action
    assert Action.of(action.as_dict()["chunk"]) == action
    assert str(action) == "left, (wait), go on"
    assert LEFT.of_round(3) == Action(chunk=(LEFT,) * 3) and LEFT.of_round(1) == LEFT
    assert Action(chunk=(LEFT,)).of_round(1) == LEFT


@pytest.mark.parametrize(
    "value", [[], {"chunk": "left"}, {"chunk": [["left"]]}, {"chunk": ["x"], "text": "y"}]
)
def test_chunks_that_are_none(value: Any) -> None:
    with pytest.raises(InputError, match="chunk"):
        Action.of(value)


def test_the_number_of_actions_must_be_that_of_a_round() -> None:
    for count in (1, 3):
        with pytest.raises(InputError, match=rf"{count} actions.* 2"):
            Action(chunk=(LEFT,) * count).check(TAKES)
    with pytest.raises(InputError, match=r"3 actions.* 1"):
        Action(chunk=(LEFT,) * 3).check(replace(TAKES, per_round=1))
    with pytest.raises(InputError, match="'up'"):
        Action(chunk=(LEFT, Action(keys=("up",)))).check(TAKES)


def test_settings_of_chunks() -> None:
    for per_round in (0, 3):
        with pytest.raises(ConfigError, match=f"per_round is {per_round}"):
            WorldModelConfig(action=replace(TAKES, per_round=per_round))
    with pytest.raises(ConfigError, match="text"):
        WorldModelConfig(action=TAKES, condition_adapter=ConditionAdapterConfig("prompt", text=True))


def test_tokens_depend_on_the_order(chunked: WorldModel) -> None:
    actions = [Action(chunk=(LEFT, RIGHT)), Action(chunk=(RIGHT, LEFT)), Action(chunk=(LEFT, LEFT)), LEFT]
    mixed, swapped, twice, once = chunked.encode_action(actions).tokens
    assert len(mixed) % chunked.action.slot == 0
    first, second = mixed[-4:].split(2)  # a marker and a key each
    assert not torch.equal(first[0], second[0])  # markers say which is the first
    assert torch.equal(swapped[-4:], torch.stack([first[0], second[1], second[0], first[1]]))
    assert torch.equal(once, twice)


def test_motions_of_the_camera_add_up(chunked: WorldModel, image: np.ndarray) -> None:
    step = Camera("velocity", Pose((0.0, 0.0, 1.0)))
    there = Camera("target", Pose((0.0, 0.0, 1.5)))
    chunk = Action(chunk=(Action(camera=step), Action(camera=there)))
    session = chunked.session()
    session.reset(image)
    session.step(chunk)
    assert session.state.cameras[0].translation == pytest.approx((0, 0, 1.5))
    session.step(Action(camera=step))  # for both halves of the round
    assert session.state.cameras[0].translation == pytest.approx((0, 0, 3.5))
    (resolved,) = (each.relative_to(Pose()) for each in [chunk])
    assert resolved.chunk[1].camera == Camera("velocity", Pose((0.0, 0.0, 0.5)))


# ---- rounds ----------------------------------------------------------------------------------------------


def test_a_session_takes_a_list_of_actions(chunked: WorldModel, image: np.ndarray) -> None:
    session = chunked.session()
    session.reset(image)
    mirrored, held, repeated = (session.fork() for _ in range(3))
    made = session.step([LEFT, {"keys": ["right"]}]).frames
    assert not np.array_equal(made, mirrored.step([RIGHT, LEFT]).frames)
    assert np.array_equal(held.step(LEFT).frames, repeated.step([LEFT, LEFT]).frames)
    assert session.actions == (Action(chunk=(LEFT, RIGHT)),)
    before = session.state
    with pytest.raises(InputError, match="3 actions"):
        session.step([LEFT] * 3)
    assert session.state is before


def test_training_sees_the_rounds_of_a_session(chunked: WorldModel, image: np.ndarray) -> None:
    chunk = Action(chunk=(LEFT, RIGHT))
    session = chunked.session(num_inference_steps=0)
    session.reset(image)
    state: WorldState = session.state
    session.step(chunk)
    made = chunked(state.context[:, None], [[chunk]])
    torch.testing.assert_close(made.condition.forecast, session.state.latents, atol=1e-4, rtol=1e-4)


def test_plans_hold_an_action_for_a_round(chunked: WorldModel) -> None:
    config = replace(chunked.config, action=replace(TAKES, vector=0), pace="on_action")
    assert action_set(config) == Choices((LEFT.of_round(2), RIGHT.of_round(2)))
    box = action_set(chunked.config)
    assert isinstance(box, Box)
    proposal = box.proposal(3)
    (sample,) = proposal.sample(1, np.random.default_rng(0))
    assert proposal.actions(sample)[0] == Action(vector=tuple(sample[0])).of_round(2)


# ---- environments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "space"),
    [
        ("key", spaces.MultiDiscrete([2, 2])),
        ("keys", spaces.Box(0, 1, (2, 2), np.int8)),
        ("vector", spaces.Box(-1, 1, (2, 2), np.float32)),
        (("key", "vector"), None),
    ],
)
def test_an_environment_takes_the_actions_of_a_round(
    chunked: WorldModel, image: np.ndarray, kind: Any, space: spaces.Space | None
) -> None:
    start = {"observation": image}
    env = WorldEnv(chunked, actions=kind, start=start)
    many = WorldVectorEnv(chunked, 2, actions=kind, start=start)
    assert space is None or env.action_space == space
    env.reset(seed=0)
    many.reset(seed=0)
    many.action_space.seed(0)
    for _ in range(2):
        actions: Any = many.action_space.sample()
        first = {name: each[0] for name, each in actions.items()} if isinstance(actions, dict) else actions[0]
        assert env.action_space.contains(first) and len(env.to_action(first).chunk) == 2
        together, alone = many.step(actions)[0][0], env.step(first)[0]
        assert np.abs(together.astype(int) - alone).max() <= 1


def test_an_environment_refuses_another_number_of_actions(chunked: WorldModel, image: np.ndarray) -> None:
    env = WorldEnv(chunked, actions="key", start={"observation": image})
    env.reset(seed=0)
    assert env.to_action([0, 1]) == Action(chunk=(LEFT, RIGHT))
    for value in (0, [0], [0, 1, 1]):
        with pytest.raises(InputError, match="2 actions"):
            env.step(value)


# ---- data and training -----------------------------------------------------------------------------------


def walk(seed: int, steps: int = 8) -> RecordedEpisode:
    """A square that its actions move by its width, round a corridor without ends."""
    rng = np.random.default_rng(seed)
    chosen, place, frames = rng.integers(0, 2, steps), 8, []
    for action in [*chosen, None]:
        frame = np.full((SIDE, SIDE, 3), 40, np.uint8)
        frame[12:20, place : place + 8] = (230, 60, 60)
        frames.append(frame)
        place = place if action is None else (place + (8 if action else -8)) % SIDE
    numbers = np.eye(2, dtype=np.float32)[chosen]
    rewards = np.arange(steps, dtype=np.float32)
    actions = tuple(Action.of_numbers(SPECS, row) for row in numbers)
    return RecordedEpisode(
        {"render": np.stack(frames)}, actions, numbers, rewards, terminated=True, truncated=False, seed=seed
    )


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded walks of eight steps at ten per second."""
    folder = tmp_path_factory.mktemp("recorded") / "walks"
    store = LeRobotStore(folder, RecordingFormat(10, SPECS, {}))
    for seed in range(12):
        store.write(walk(seed))
    store.finish()
    return folder


def framed(chunk: int, fps: int = 10, per_round: int = 0) -> WorldModelConfig:
    """A config for rounds of `chunk` frames with an action each."""
    return WorldModelConfig(
        codec=CodecConfig(image_size=SIDE, temporal_factor=1),
        action=ActionConfig(text=False, keys=KEYS, per_round=per_round or chunk),
        vision=VisionConfig(max_frames=16),
        fps=fps,
        chunk_frames=chunk,
    )


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_a_recording_is_read_in_rounds_of_any_length(walks: Path, chunk: int) -> None:
    data = DataConfig({"mine": SourceConfig("lerobot", str(walks))})
    source, truth, offsets = open_source("mine", data, framed(chunk)), walk(0), set()
    for index in range(0, 12 * 20, 12):
        episode = source.at(index).episode("rounds", 0, index, 1)
        (action,), (outcome,) = episode.actions, episode.outcomes
        first = int(outcome.reward - sum(range(chunk))) // chunk  # the rewards count the steps
        assert (action.chunk or (action,)) == truth.actions[first : first + chunk]
        assert outcome == Outcome(sum(range(first, first + chunk)), first + chunk == 8)
        seen = np.concatenate(episode.observations).astype(int)
        assert np.abs(seen - truth.cameras["render"][first : first + chunk + 1]).max() < 60
        offsets.add(first)
    assert len(offsets) >= 4  # rounds begin with any action
    longer = open_source("mine", data, framed(2 * chunk, fps=20, per_round=chunk)).at(0)
    (action, *_) = longer.episode("rounds", 0, 0, 9).actions
    assert (action.chunk or (action,)) == truth.actions[:chunk]


def test_a_recording_of_another_rate_is_drawn_by_time_with_a_warning(
    walks: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = DataConfig({"mine": SourceConfig("lerobot", str(walks))})
    source = open_source("mine", data, framed(2, per_round=1))
    assert "10 actions per second" in caplog.text
    episode = source.at(0).episode("rounds", 0, 0, 4)
    starts = [index for index, action in enumerate(walk(0).actions) if action == episode.actions[0]]
    assert any(
        episode.actions == walk(0).actions[start::2][: len(episode.actions)] for start in starts
    )  # every second action


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [2, 4])
def test_the_order_of_actions_is_learned(
    make_model: Callable[..., WorldModel],
    tokenizer_folder: str,
    tmp_path: Path,
    walks: Path,
    chunk: int,
) -> None:
    tiny, wanted = make_model().config, framed(chunk)
    model = replace(
        tiny,
        codec=replace(tiny.codec, image_size=SIDE, temporal_factor=1),
        action=wanted.action,
        fps=10,
        chunk_frames=chunk,
        generator=None,
        num_inference_steps=0,
    )
    common = StageConfig(batch_size=16, tasks={"rounds": 1.0}, rounds=1, lr=3e-3, muon_lr=0.02)
    stages: dict[str, Any] = {
        "codec": replace(common, objective="codec", steps=120, train={"codec": TrainedConfig()}, muon_lr=0),
        "state": replace(
            common,
            objective="state",
            steps=150,
            train={"backbone": TrainedConfig(), "adapters": TrainedConfig()},
        ),
    }
    data = DataConfig({"mine": SourceConfig("lerobot", str(walks))})
    config = TrainConfig(
        model=model,
        stages=stages,
        data=data,
        tokenizer=tokenizer_folder,
        run_dir=str(tmp_path / "run"),
        precision="fp32",
    )
    session = WorldModel.from_pretrained(str(finetune.train(config))).session()
    session.reset(walk(0).cameras["render"][0])

    def places(actions: list[Action]) -> list[int]:
        """Where the square is in each frame of a round, in its own widths."""
        frames = session.fork().step(actions).frames[:, 12:20].astype(int)
        red = (frames[..., 0] - frames[..., 2]).clip(min=0).sum(axis=1)
        return [int(row.reshape(SIDE // 8, 8).sum(axis=1).argmax()) for row in red]

    turns = [LEFT, RIGHT] * (chunk // 2)
    assert places(turns) == [0, 1] * (chunk // 2)
    assert places(turns[::-1]) == [2, 1] * (chunk // 2)
