"""Actions: parsing, validation, camera poses, and tokens."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from steering import ALL, FULL
from torch import Tensor

from worldmodel import config as configs
from worldmodel.actions import Action, Camera, Pose, resolve_camera_targets
from worldmodel.actions.pose import pose_features
from worldmodel.config import ActionConfig
from worldmodel.errors import ConfigError, InputError
from worldmodel.models.action import ActionAdapter
from worldmodel.models.loading import model_folder
from worldmodel.models.world_model import WorldModel

NUMBERS = st.floats(-100, 100, allow_subnormal=False)
ROTATIONS = (
    st.tuples(*[st.floats(-1, 1, allow_subnormal=False)] * 4)
    .filter(lambda q: math.hypot(*q) > 0.01)
    .map(lambda q: tuple(x / math.hypot(*q) for x in q))
)
POSES = st.builds(Pose, st.tuples(NUMBERS, NUMBERS, NUMBERS), ROTATIONS)
CAMERAS = st.builds(Camera, st.sampled_from(["target", "velocity"]), POSES)
ACTIONS = st.builds(
    Action,
    text=st.none() | st.sampled_from(["go on", "the red ball jumps"]),
    keys=st.lists(st.sampled_from(ALL.keys), max_size=3, unique=True).map(tuple),
    vector=st.none() | st.tuples(st.floats(-2, 2), st.floats(0, 1)),
    mouse=st.none() | st.tuples(st.floats(-1, 1), st.floats(-1, 1)),
    camera=st.none() | CAMERAS,
)


@pytest.fixture(scope="module")
def adapter(model: WorldModel) -> ActionAdapter:
    torch.manual_seed(0)
    return ActionAdapter(ALL, model.backbone.width)


# ---- reading ---------------------------------------------------------------------------------------------


@given(action=ACTIONS)
def test_action_round_trips_through_json(action: Action) -> None:
    written = json.loads(json.dumps(action.as_dict()))
    assert Action.of(written) == action
    assert Action.of(action) is action
    Action.of(written).check(ALL)
    assert str(action)


def test_action_of_all_types() -> None:
    action = Action.of(FULL)
    assert action == Action(
        "go on", ("w",), (0.1, 1.0), (0.5, -1.0), Camera("velocity", Pose((0.0, 0.0, 1.0)))
    )
    assert str(action) == "go on w [0.1, 1] mouse 0.5 -1 camera velocity 0 0 1 0 0 0 1"
    assert Action.of({"camera": {"data": {}}}).camera == Camera("target", Pose())
    assert Action.of({name: None for name in FULL}) == Action() == Action.of({})
    assert Action.of({"vector": np.array([0.5, 1.0]), "mouse": torch.zeros(2)}) == Action(
        vector=(0.5, 1.0), mouse=(0.0, 0.0)
    )


BAD: list[tuple[Any, str]] = [
    ({"prompt": "x"}, "'prompt'"),
    ({"text": 3}, "3"),
    ({"text": "x " * 4000}, "words"),
    ({"keys": [1]}, "[1]"),
    ({"keys": ["W"]}, "'W'"),
    ({"mouse": 0.5}, "mouse of an action is 0.5"),
    ({"mouse": "ab"}, "'ab'"),
    ({"mouse": [True, False]}, "[True, False]"),
    ({"mouse": [0.5]}, "1 numbers"),
    ({"mouse": [0.5, 20]}, "[0.5, 20.0]"),
    ({"mouse": [0.5, math.nan]}, "[0.5, nan]"),
    ({"vector": {}}, "{}"),
    ({"vector": ["0.1", 1]}, "['0.1', 1]"),
    ({"vector": [[0.1], [1]]}, "[[0.1], [1]]"),
    ({"vector": [10**400, 1]}, "vector"),
    ({"vector": [0.1, 1, 2]}, "3 numbers"),
    ({"vector": [0, 1e300]}, "1e+300"),
    ({"vector": [2.1, 0]}, "2.1"),
    ({"vector": [0, -0.5]}, "-0.5"),
    ({"camera": [0, 0, 1]}, "[0, 0, 1]"),
    ({"camera": {"mode": "velocity"}}, "data"),
    ({"camera": {"mode": "velocity", "data": [0, 0, 1]}}, "[0, 0, 1]"),
    ({"camera": {"mode": "speed", "data": {}}}, "'speed'"),
    ({"camera": {"mode": ["target"], "data": {}}}, "['target']"),
    ({"camera": {"data": {"actions": ["w"]}}}, "'actions'"),
    ({"camera": {"data": {}, "speed": 1}}, "'speed'"),
    ({"camera": {"data": {"translation": [0, 1]}}}, "2 numbers"),
    ({"camera": {"data": {"translation": [0, 1, math.inf]}}}, "inf"),
    ({"camera": {"data": {"translation": [0, 1, 1e9]}}}, "1000000000.0"),
    ({"camera": {"data": {"rotation": [0, 0, 90]}}}, "3 numbers"),
    ({"camera": {"data": {"rotation": [0, 0, 0, 0]}}}, "[0.0, 0.0, 0.0, 0.0]"),
    ({"camera": {"data": {"rotation": [0, 90, 0, 1]}}}, "[0.0, 90.0, 0.0, 1.0]"),
]


@pytest.mark.parametrize(("value", "named"), BAD, ids=lambda each: str(each)[:60])
def test_invalid_action(model: WorldModel, adapter: ActionAdapter, value: Any, named: str) -> None:
    with pytest.raises(InputError) as raised:
        adapter.validate(Action.of(value), model.backbone)
    assert named in str(raised.value)
    assert str(raised.value).endswith((".", "?"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", FULL)
def test_action_type_that_the_model_does_not_support(kind: str) -> None:
    nothing = ActionConfig(text=False)
    Action().check(nothing)
    with pytest.raises(InputError, match=kind):
        Action.of({kind: FULL[kind]}).check(nothing)
    Action.of({kind: FULL[kind]}).check(ALL)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
DATA = st.fixed_dictionaries({}, optional={"translation": JSON, "rotation": JSON | st.just([0, 0, 0, 1])})
FIELDS = {
    "text": JSON,
    "keys": JSON | st.lists(st.sampled_from(ALL.keys)),
    "mouse": JSON | st.lists(st.floats(), min_size=2, max_size=2),
    "vector": JSON | st.lists(st.floats(), min_size=2, max_size=2),
    "camera": JSON
    | st.fixed_dictionaries({"data": JSON | DATA}, optional={"mode": JSON | st.just("velocity")})
    | st.lists(st.floats(), min_size=3, max_size=3).map(lambda x: {"data": {"translation": x}}),
}


@given(value=JSON | st.fixed_dictionaries({}, optional=FIELDS))
def test_any_value_is_an_action_or_an_input_error(
    model: WorldModel, adapter: ActionAdapter, value: object
) -> None:
    try:
        action = Action.of(value)  # type: ignore[arg-type]
        adapter.validate(action, model.backbone)
    except InputError:
        return
    assert adapter([action], model.backbone).tokens[0].isfinite().all()
    assert Action.of(json.loads(json.dumps(action.as_dict()))) == action


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"text": {"max_tokens": 0}}, "max_tokens is 0"),
        ({"text": {"max_token": 3}}, "did you mean 'max_tokens'"),
        ({"text": "yes"}, "'yes'"),
        ({"mouth": True}, "did you mean 'mouse'"),
        ({"keys": "left"}, "'left'"),
        ({"per_round": "two"}, "'two'"),
        ({"vector": {"size": -1}}, "size is -1"),
        ({"vector": {"sizes": 1}}, "did you mean 'size'"),
        ({"vector": {"size": 1, "low": ["a"], "high": [1]}}, "list of numbers"),
        ({"dropout": 1.0}, "dropout 1.0"),
        ({"dropout": -0.1}, "dropout -0.1"),
        ({"keys": ("w", "w")}, "give each key a name of its own"),
        ({"keys": ("w", "")}, "give each key a name of its own"),
        ({"vector": {"size": 2, "names": ("x",)}}, "names has 1 entries"),
        ({"vector": {"names": ("x", "y"), "low": (0.0,), "high": (1.0,)}}, "low has 1 entries"),
        ({"vector": {"size": 1, "low": (0.0,)}}, "give both"),
        ({"vector": {"low": (0.0,), "high": (0.0,)}}, "each low below its high"),
        ({"vector": {"low": (-math.inf,), "high": (0.0,)}}, "each low below its high"),
        ({"vector": {"low": (math.nan,), "high": (0.0,)}}, "each low below its high"),
    ],
    ids=str,
)
def test_invalid_action_config(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ActionConfig(**settings)


def test_action_config_round_trips_through_yaml() -> None:
    assert configs.build(ActionConfig, json.loads(json.dumps(configs.to_dict(ALL)))) == ALL
    written = {"text": {"max_tokens": 96}, "keys": ["left"], "vector": None, "mouse": False}
    assert configs.build(ActionConfig, written) == ActionConfig(keys=("left",))
    assert configs.build(ActionConfig, {"vector": 2}).vector == ActionConfig(vector={"size": 2}).vector
    with pytest.raises(ConfigError):
        configs.build(ActionConfig, {"mouse": "sometimes"})


# ---- the camera ------------------------------------------------------------------------------------------


def matrix(pose: Pose) -> np.ndarray:
    """The 4 × 4 matrix of a pose, by the textbook's formula."""
    x, y, z, w = pose.rotation
    turn = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    whole = np.eye(4)
    whole[:3, :3], whole[:3, 3] = turn, pose.translation
    return whole


def close(made: Pose, expected: np.ndarray) -> None:
    np.testing.assert_allclose(matrix(made), expected, atol=1e-7 * (1 + np.abs(expected).max()))


@given(here=POSES, there=POSES, motion=POSES)
def test_poses_equal_matrices(here: Pose, there: Pose, motion: Pose) -> None:
    close(here.then(motion), matrix(here) @ matrix(motion))
    close(here.motion_to(there), np.linalg.inv(matrix(here)) @ matrix(there))
    close(here.then(here.motion_to(there)), matrix(there))
    close(here.between(there, 0.0), matrix(here))
    close(here.between(there, 1.0), matrix(there))
    features = pose_features(motion)
    assert features[:3] == list(motion.translation)
    np.testing.assert_allclose(np.reshape(features[3:], (2, 3)), matrix(motion)[:3, :2].T, atol=1e-7)


@given(cameras=st.lists(st.none() | CAMERAS, max_size=6))
def test_resolve_camera_targets(cameras: list[Camera | None]) -> None:
    here = np.eye(4)
    seen = resolve_camera_targets([Action(camera=each) for each in cameras])
    for camera, action in zip(cameras, seen, strict=True):
        if camera is None:
            assert action == Action()
            continue
        assert action.camera is not None
        assert action.camera.mode == "velocity"
        expected = matrix(camera.pose)
        after = here @ matrix(action.camera.pose)
        if camera.mode == "target":
            np.testing.assert_allclose(after, expected, atol=1e-6 * (1 + np.abs(expected).max()))
        else:
            assert action.camera == camera
        here = expected if camera.mode == "target" else here @ expected
    assert resolve_camera_targets(seen) == seen


def test_forward_motion_follows_the_orientation_of_the_camera() -> None:
    half = math.sqrt(0.5)
    left = Pose(rotation=(0.0, -half, 0.0, half))  # a quarter turn about y, from forward (z) to the left
    close(left.then(Pose((0.0, 0.0, 2.0))), matrix(Pose((-2.0, 0.0, 0.0), left.rotation)))


# ---- tokens ----------------------------------------------------------------------------------------------


def by_hand(adapter: ActionAdapter, model: WorldModel, action: Action) -> Tensor:
    """The slot of an action: blanks, the marker, then its parts."""

    def token(layer: Any, numbers: Any) -> Tensor:
        return layer(torch.tensor([list(numbers)], dtype=torch.float32))

    parts = [adapter.marker[None]]
    if action.text is not None:
        parts.append(model.backbone.embed(torch.tensor(model.backbone.token_ids(action.text))))
    for key in action.keys:
        assert adapter.keys is not None
        parts.append(adapter.keys.weight[adapter.config.keys.index(key)][None])
    if action.vector is not None:
        reach, grip = action.vector
        parts.append(token(adapter.vector, (reach / 2, 2 * grip - 1)))
    if action.mouse is not None:
        parts.append(token(adapter.mouse, action.mouse))
    if action.camera is not None:
        turn = matrix(action.camera.pose)[:3, :2].T.flatten()
        parts.append(token(adapter.camera, (*action.camera.pose.translation, *turn)))
    said = torch.cat(parts)
    return torch.cat([adapter.blank.expand(-len(said) % adapter.slot, -1), said])


@given(actions=st.lists(ACTIONS, min_size=1, max_size=3))
def test_tokens_depend_on_the_action_only(
    model: WorldModel, adapter: ActionAdapter, actions: list[Action]
) -> None:
    with torch.no_grad():
        for made, action in zip(adapter(actions, model.backbone).tokens, actions, strict=True):
            torch.testing.assert_close(made, by_hand(adapter, model, action), atol=1e-5, rtol=1e-5)


def test_action_tokens_of_the_shipped_model() -> None:
    written = json.loads((model_folder.resolve("shapes-tiny") / "config.json").read_text(encoding="utf-8"))
    model = WorldModel.from_pretrained("shapes-tiny")
    assert model.config.action == ActionConfig(keys=tuple(written["model"]["action"]["keys"]))
    assert set(model.action.state_dict()) == {"blank", "marker", "keys.weight"}
    for action in (Action(), Action("the red ball jumps"), Action("go", keys=("red", "jump"))):
        (made,) = model.encode_action([action]).tokens
        assert torch.equal(made, by_hand(model.action, model, action))


def test_every_action_gives_gradients_for_the_same_weights(model: WorldModel) -> None:
    adapter = ActionAdapter(ALL, model.backbone.width)
    adapter([Action()], model.backbone).tokens[0].sum().backward()
    assert all(parameter.grad is not None for parameter in adapter.parameters())
    adapter([Action.of(FULL)], model.backbone).tokens[0].sum().backward()
    for name in ("mouse", "vector", "camera"):
        assert all(parameter.grad.any() for parameter in getattr(adapter, name).parameters())
