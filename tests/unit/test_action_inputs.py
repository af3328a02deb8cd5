"""Actions in sessions, environments, training data and on the command line."""

import io
import json
import math
import re
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from steering import ALL, FORWARD, FULL

from worldmodel.actions import Action, Camera, Pose
from worldmodel.cli.info import action_facts, model_facts
from worldmodel.config import ActionConfig, CodecConfig, DataConfig, SourceConfig, WorldModelConfig
from worldmodel.data.sources import Source, open_source
from worldmodel.errors import ConfigError, InputError
from worldmodel.eval.runner import ModelSubject
from worldmodel.models.action import WAVE_OCTAVES, ActionAdapter, with_waves
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.action_list import parse_action

QUARTER = (0.0, math.sqrt(0.5), 0.0, math.sqrt(0.5))
"""A quarter turn to the right."""


def target(*translation: float, rotation: tuple[float, ...] = (0.0, 0.0, 0.0, 1.0)) -> dict[str, Any]:
    return {"mode": "target", "data": {"translation": list(translation), "rotation": list(rotation)}}


# ---- sessions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FULL)
def test_every_action_type_steers_a_session(world: WorldModel, image: np.ndarray, kind: str) -> None:
    session = world.session(seed=1)
    session.reset(image)
    still = session.fork().step(None).frames
    frames = session.step({kind: FULL[kind]}).frames
    assert frames.shape == still.shape
    assert not np.array_equal(frames, still)
    assert session.actions == (Action.of({kind: FULL[kind]}),)


def test_camera_target_equals_the_motion_to_it(world: WorldModel, image: np.ndarray) -> None:
    by_target, by_motion = world.session(seed=1), world.session(seed=1)
    for session in (by_target, by_motion):
        session.reset(image)
        session.step({"camera": FORWARD})
        session.step("go on")  # the camera stays where it is
    kept = by_target.snapshot()
    way = {"mode": "velocity", "data": {"translation": [-1, 0, 0], "rotation": QUARTER}}
    expected = by_motion.step({"camera": way}).frames
    assert np.array_equal(by_target.step({"camera": target(-1, 0, 1, rotation=QUARTER)}).frames, expected)
    # After the turn to the right, the z axis of the world points left. Snapshots hold the pose of the camera.
    back = {"mode": "velocity", "data": {"translation": [-1, 0, 0]}}
    assert np.array_equal(
        by_target.step({"camera": target(-1, 0, 2, rotation=QUARTER)}).frames,
        by_motion.step({"camera": back}).frames,
    )
    by_target.restore(kept)
    assert np.array_equal(by_target.step({"camera": target(-1, 0, 1, rotation=QUARTER)}).frames, expected)


def test_evaluation_resolves_camera_targets(world: WorldModel, image: np.ndarray) -> None:
    actions = [Action.of({"camera": pose}) for pose in (target(0, 0, 1), target(0, 0, 3), target(2, 0, 3))]
    evaluated = ModelSubject(world).open(image[None], [1])
    session = world.session(seed=1)
    session.reset(image)
    for action in actions:
        assert np.array_equal(evaluated.step([action])[0], session.step(action).frames)


def test_training_resolves_camera_targets(world: WorldModel) -> None:
    poses = [target(0, 0, 1), target(0, 0, 3), target(0, 0, 3)]
    steps = [
        FORWARD,
        {"mode": "velocity", "data": {"translation": [0, 0, 2]}},
        {"mode": "velocity", "data": {}},
    ]
    latents = (world.config.codec.latent_channels, *world.config.codec.grid)
    context = torch.randn(1, 3, world.config.context_latents, *latents, generator=torch.manual_seed(0))
    targets, motions = ([[Action.of({"camera": each}) for each in cameras]] for cameras in (poses, steps))
    assert torch.equal(world(context, targets).hidden, world(context, motions).hidden)


def test_model_folder_keeps_the_action_config(world: WorldModel, tmp_path: Path) -> None:
    folder = world.save_pretrained(tmp_path / "steerable", dtype=torch.float32)
    again = WorldModel.from_pretrained(folder)
    assert again.config.action == ALL
    action = Action.of(FULL)
    assert torch.equal(again.encode_action([action]).tokens[0], world.encode_action([action]).tokens[0])
    facts = model_facts(str(folder))
    assert facts["actions"]["camera"].startswith("target or velocity")
    assert facts["actions"] == action_facts(ALL)


# ---- environments --------------------------------------------------------------------------------------


def test_samples_of_every_action_space_are_valid(world: WorldModel) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    from worldmodel.env import WorldEnv
    from worldmodel.env.actions import action_space, to_action

    kinds: tuple[Any, ...] = ("keys", "vector", "mouse", "camera", "text")
    for kind in (*kinds, kinds, kinds[::2]):
        space = action_space(kind, ALL)
        space.seed(0)
        for _ in range(20):
            world.action.validate(to_action(kind, space.sample(), ALL), world.backbone)
    env = WorldEnv(world, start="shapes", actions=("mouse", "keys"))
    assert env.action_space == gymnasium.spaces.Dict(
        {"mouse": gymnasium.spaces.Box(-1, 1, (2,)), "keys": gymnasium.spaces.MultiBinary(4)}
    )
    env.reset(seed=0)
    session = env.unwrapped.world.fork()  # type: ignore[attr-defined]
    made = env.step({"mouse": [0.5, -1.0], "keys": [1, 0, 0, 1]})[0]
    assert np.array_equal(made, session.step({"mouse": [0.5, -1.0], "keys": ["w", "d"]}).frames[-1])
    assert np.array_equal(action_space("vector", ALL).high, np.float32([2, 1]))  # type: ignore[attr-defined]


def test_camera_action_is_a_rotation_vector() -> None:
    pytest.importorskip("gymnasium")
    from worldmodel.env.actions import to_action

    turned = to_action("camera", [0, 0, 1, 0, math.pi / 2, 0], ALL).camera
    assert turned is not None
    assert (turned.mode, turned.pose.translation) == ("velocity", (0.0, 0.0, 1.0))
    assert turned.pose.rotation == pytest.approx(QUARTER)
    assert to_action("camera", np.zeros(6), ALL) == Action(camera=Camera("velocity", Pose()))


@pytest.mark.parametrize(
    ("kind", "value", "named"),
    [
        ("mouse", [0.5], "[0.5]"),
        ("camera", [0] * 7, "[0, 0, 0, 0, 0, 0, 0]"),
        ("camera", [0, 0, math.inf, 0, 0, 0], "inf"),
        ("camera", [0, 0, 1e9, 0, 0, 0], "1000000000.0"),
        (("keys", "mouse"), [[0, 0, 0, 0], [0, 0]], "[[0, 0, 0, 0], [0, 0]]"),
        (("keys", "mouse"), {"keys": [0, 0, 0, 0]}, "{'keys': [0, 0, 0, 0]}"),
        (("keys", "mouse"), {"keys": [0, 0, 0, 2], "mouse": [0, 0]}, "[0, 0, 0, 2]"),
    ],
    ids=str,
)
def test_value_outside_the_action_space(kind: Any, value: Any, named: str) -> None:
    pytest.importorskip("gymnasium")
    from worldmodel.env.actions import to_action

    with pytest.raises(InputError, match=re.escape(named)):
        to_action(kind, value, ALL)


def test_action_types_of_a_model() -> None:
    pytest.importorskip("gymnasium")
    from worldmodel.env.actions import parse_action_schema, resolve_action_types

    assert resolve_action_types(None, ALL) == "keys"
    assert resolve_action_types(["camera", "text"], ALL) == ("camera", "text")  # type: ignore[list-item]
    for requested, named in (
        (("keys", "mice"), "'mice'"),
        ((), "[]"),
        (3, "3"),
        (("keys", "keys"), "'keys'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(named)):
            resolve_action_types(requested, ALL)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no actions"):
        resolve_action_types(None, ActionConfig(text=False))
    published = {"per_round": 2, "kinds": {"mouse": True, "newer": 1}}
    assert parse_action_schema(published) == ActionConfig(text=False, mouse=True, per_round=2)
    with pytest.raises(ConfigError):
        parse_action_schema({"per_round": 1, "kinds": {"vector": "many"}})


def test_batched_actions_are_split_by_world() -> None:
    pytest.importorskip("gymnasium")
    from gymnasium.vector.utils import batch_space

    from worldmodel.env.actions import action_space, split_actions

    space = batch_space(action_space(("text", "mouse"), ALL), 3)
    space.seed(0)
    drawn = space.sample()
    split = split_actions(drawn)
    assert [each["text"] for each in split] == list(drawn["text"])
    assert np.array_equal([each["mouse"] for each in split], drawn["mouse"])
    assert split_actions(split) == split
    for bad in (3, None, "go", {"text": ["a"], "mouse": [1, 2]}, {"text": 3}, {}):
        assert split_actions(bad) == []


# ---- training data -------------------------------------------------------------------------------------


MODEL = WorldModelConfig(codec=CodecConfig(image_size=32), action=ALL, fps=8, chunk_frames=8)


def clips(counting: Path, folder: Path, model: WorldModelConfig = MODEL, **row: Any) -> Source:
    """A table with one row about the counting clip."""
    path = folder / f"{len(list(folder.iterdir()))}.jsonl"
    path.write_text(json.dumps({"path": counting.name, **row}) + "\n")
    columns = {"video": "path", **{field: field for field in row}}
    source = SourceConfig(kind="clips", path=str(path), root=str(counting.parent), columns=columns)
    return open_source("mine", DataConfig({"mine": source}), model)


def played(source: Source, index: int, rounds: int = 2) -> tuple[int, list[Action]]:
    """The first frame's number, and the actions of an episode."""
    episode = source.at(index).episode("rounds", 0, index, rounds)
    return round((float(episode.observations[0].mean()) - 20) / 3), list(episode.actions)


def test_mouse_and_camera_columns(counting: Path, tmp_path: Path) -> None:
    source = clips(counting, tmp_path, **{**FULL, "mouse": [[0.5, 0], None, [-0.5, 1], *[None] * 4]})
    for index in range(10):
        first, actions = played(source, index)
        assert first % 8 == 0
        mice = [(0.5, 0.0), None, (-0.5, 1.0), *[None] * 5]
        whole = replace(Action.of(FULL), mouse=None)
        assert actions == [replace(whole, mouse=mouse) for mouse in mice[first // 8 :][:2]]


def test_camera_targets_of_a_clip_become_motions(counting: Path, tmp_path: Path) -> None:
    positions = [0.0, 1.0, 3.0, 6.0, 6.0, 4.0, 4.5]
    by_round = clips(counting, tmp_path, camera=[target(0, 0, z) for z in positions])
    timed = [{"start": i, "end": i + 1, "camera": target(0, 0, z)} for i, z in enumerate(positions)]
    by_time = clips(counting, tmp_path, camera=timed)
    # One pose per frame: the last pose of a round is its target.
    per_frame = [
        {
            "start": i / 8,
            "end": (i + 1) / 8,
            "camera": target(0, 0, np.interp((i + 1) / 8, range(8), [0, *positions])),
        }
        for i in range(56)
    ]
    by_frame = clips(counting, tmp_path, camera=per_frame)
    firsts = set()
    for source in (by_round, by_time, by_frame):
        for index in range(8):
            first, actions = played(source, index, 3)
            firsts.add(first)
            ends = np.interp(first / 8 + np.arange(4), range(8), [0, *positions])
            for action, way in zip(actions, np.diff(ends), strict=True):
                assert action.camera is not None
                assert action.camera.mode == "velocity"
                assert action.camera.pose.translation == pytest.approx((0, 0, way), abs=1e-6)
    assert len(firsts) > 8


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"mouse": [2, 0]}, "[2.0, 0.0]"),
        ({"mouse": [[0, 0], [0, 0, 0]]}, "3 numbers"),
        ({"mouse": "left"}, "'left'"),
        ({"vector": [3, 0]}, "reach"),
        ({"camera": "forward"}, "'forward'"),
        ({"camera": "{forward}"}, "JSON"),
        ({"camera": [1, 2, 3]}, "mode"),
        ({"camera": [{"data": {"rotation": [0, 0, 0, 2]}}]}, "unit quaternion"),
        ({"camera": [target(0, 0, 1), FORWARD]}, "target"),
        ({"camera": target(0, 0, 1)}, "target"),
        ({"camera": [{"camera": FORWARD}]}, "start and end"),
    ],
    ids=lambda each: str(each)[:60],
)
def test_invalid_row(counting: Path, tmp_path: Path, row: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.sources\.mine: 0\.jsonl row 1.*{re.escape(named)}"):
        clips(counting, tmp_path, **row)


def test_column_that_the_model_does_not_support(counting: Path, tmp_path: Path) -> None:
    plain = replace(MODEL, action=ActionConfig())
    for field in ("keys", "mouse", "vector", "camera"):
        with pytest.raises(ConfigError, match=field):
            clips(counting, tmp_path, plain, **{field: FULL[field]})


def test_tar_records_need_no_column_mapping(counting: Path, tmp_path: Path) -> None:
    record = json.dumps({"mouse": [0.5, -1], "camera": FORWARD}).encode()
    with tarfile.open(tmp_path / "one.tar", "w") as tar:
        tar.add(counting, "clip.mp4")
        entry = tarfile.TarInfo("clip.json")
        entry.size = len(record)
        tar.addfile(entry, io.BytesIO(record))
    source = SourceConfig(kind="webdataset", path=str(tmp_path / "one.tar"))
    for model, action in (
        (MODEL, Action.of({"mouse": [0.5, -1], "camera": FORWARD})),
        (replace(MODEL, action=ActionConfig()), Action()),
    ):
        opened = open_source("mine", DataConfig({"mine": source}), model)
        assert played(opened, 0)[1] == [action] * 2


# ---- command line --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "action"),
    [
        ("mouse:0.5, -1", Action(mouse=(0.5, -1.0))),
        (json.dumps(FULL), Action.of(FULL)),
        ('{"keys": "w"}', Action(keys=("w",))),
        ("{}", Action()),
    ],
)
def test_actions_of_the_command_line(word: str, action: Action) -> None:
    assert parse_action(word) == action


@pytest.mark.parametrize(
    "word", ["mouse:", "mouse:left", "{", '{"keys": 3}', '{"a": 1}', "{" * 100_000, "[1"]
)
def test_invalid_actions_of_the_command_line(word: str) -> None:
    if word == "[1":
        assert parse_action(word) == Action("[1")  # a sentence may begin with a bracket
        return
    with pytest.raises(InputError):
        parse_action(word)


def test_a_mouse_that_drags_begins_at_a_place() -> None:
    takes = ActionConfig(mouse="drag")
    assert ActionConfig.of(takes.as_dict()) == takes
    Action(mouse=(0, 1, -1, 0.5)).check(takes)
    for wrong in ((0.5, 0.5), (-0.1, 0, 0, 0), (0, 1.5, 0, 0), (0, 0, 0, -2)):
        with pytest.raises(InputError, match="mouse"):
            Action(mouse=wrong).check(takes)
    with pytest.raises(InputError, match="4 numbers"):
        Action(mouse=(0, 0, 0, 0)).check(ActionConfig(mouse=True))
    with pytest.raises(ConfigError, match="'hover'"):
        ActionConfig(mouse="hover")


@pytest.mark.parametrize(
    ("takes", "kind", "zero", "near", "far"),
    [
        ({"mouse": "drag"}, "mouse", (0.5, 0.5, 0.0, 0.0), (0.5 + 1 / 64, 0.5, 0.0, 0.0), (0.75, 0.5, 0, 0)),
        ({"mouse": "drag"}, "mouse", (0.5, 0.5, 0.0, 0.0), (0.5, 0.5, 0.0, 1 / 64), (0.5, 0.5, 0, 0.25)),
        ({"vector": {"low": [-24], "high": [24]}}, "vector", (0.0,), (1.0,), (16.0,)),
        ({"camera": True}, "camera", Pose(), Pose((1 / 64, 0, 0)), Pose((0.25, 0, 0))),
    ],
    ids=["place", "way", "vector", "camera"],
)
def test_near_numbers_have_different_tokens(
    takes: dict[str, Any], kind: str, zero: Any, near: Any, far: Any
) -> None:
    torch.manual_seed(0)
    adapter = ActionAdapter(ActionConfig(text=False, **takes), 32)
    values = [Camera("velocity", each) if kind == "camera" else each for each in (zero, near, far)]
    (of_kind,) = (each for each in adapter.kinds if each.name == kind)
    numbers = torch.tensor([of_kind.features(each, adapter.config.kinds[kind]) for each in values])
    tokens = adapter.get_submodule(kind)(numbers)
    # A pixel is not a 16th of 16 pixels, as it would be by a line.
    assert (tokens[1] - tokens[0]).norm() > 0.1 * (tokens[2] - tokens[0]).norm()


def test_waves_of_nothing_are_zero_and_those_of_numbers_are_turns() -> None:
    found = with_waves(torch.tensor([[0.0, 0.25, 7.0]], dtype=torch.bfloat16), 2).float()
    assert found.shape == (1, 3 + 2 * 2 * WAVE_OCTAVES)
    angles = torch.tensor([[math.pi * 2**octave * x for octave in range(5) for x in (0.0, 0.25)]])
    truth = torch.cat([torch.tensor([[0.0, 0.25, 7.0]]), angles.sin(), angles.cos() - 1], dim=1)
    torch.testing.assert_close(found, truth, atol=0.005, rtol=0.005)
    assert not found[:, 3::2].any()
    assert ActionAdapter(ActionConfig(text=False, vector=1), 32).get_submodule("vector.0").in_features == 1


def test_drags_begin_with_the_weights_of_motions() -> None:
    torch.manual_seed(0)
    drags = ActionAdapter(ActionConfig(text=False, mouse="drag"), 32)
    moves = ActionAdapter(ActionConfig(text=False, mouse=True), 32)
    taken = drags.adapted(moves.state_dict(), moves.config, lambda name: True)["mouse.0.weight"]
    assert {name for name in drags.new_weights if "mouse" in name} == {"mouse.0.weight"}
    theirs = moves.state_dict()["mouse.0.weight"]
    assert torch.equal(taken[:, 2:4], theirs[:, :2])
    torch.testing.assert_close(
        taken[:, 4:].unflatten(1, (-1, 4))[:, :, 2:], theirs[:, 2:].unflatten(1, (-1, 2))
    )


def test_info_lists_the_actions_of_a_model() -> None:
    assert action_facts(ALL) == {
        "text": "up to 64 tokens",
        "keys": ["w", "a", "s", "d"],
        "mouse": "right and down, -1 to 1, in units of the image size",
        "vector": "2 numbers: reach (-2 to 2), grip (0 to 1)",
        "camera": "target or velocity: translation [x, y, z], rotation [x, y, z, w]",
    }
    assert set(action_facts(ActionConfig(text=False)).values()) == {"none"}
    assert (
        action_facts(replace(ALL, vector=replace(ALL.vector, names=())))["vector"]
        == "2 numbers: 1 (-2 to 2), 2 (0 to 1)"
    )
    assert (
        action_facts(replace(ALL, vector=replace(ALL.vector, low=(), high=())))["vector"]
        == "2 numbers: reach, grip"
    )
