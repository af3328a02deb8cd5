"""Every way in for an action takes the same ones: sessions, environments, training data, the command line."""

import io
import json
import math
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from steering import ALL, FORWARD, FULL

from worldmodel import hub
from worldmodel.cli.info import action_facts, model_facts
from worldmodel.cli.rollout import parse_action
from worldmodel.config import ActionConfig, CodecConfig, DataConfig, SourceConfig, WorldModelConfig
from worldmodel.data.sources import Source, open_source
from worldmodel.errors import ConfigError, InputError
from worldmodel.models.world_model import WorldModel
from worldmodel.types import Action, Camera, Pose

QUARTER = (0.0, math.sqrt(0.5), 0.0, math.sqrt(0.5))
"""A quarter turn to the right."""


def target(*translation: float, rotation: tuple[float, ...] = (0.0, 0.0, 0.0, 1.0)) -> dict[str, Any]:
    return {"mode": "target", "data": {"translation": list(translation), "rotation": list(rotation)}}


# ---- sessions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FULL)
def test_every_kind_steers_a_session(world: WorldModel, picture: np.ndarray, kind: str) -> None:
    session = world.session(seed=1)
    session.reset(picture)
    still = session.fork().step(None)
    frames = session.step({kind: FULL[kind]})
    assert frames.shape == still.shape
    assert not np.array_equal(frames, still)
    assert session.actions == (Action.of({kind: FULL[kind]}),)


def test_a_target_is_the_motion_that_leads_there(world: WorldModel, picture: np.ndarray) -> None:
    by_target, by_motion = world.session(seed=1), world.session(seed=1)
    for session in (by_target, by_motion):
        session.reset(picture)
        session.step({"camera": FORWARD})
        session.step("go on")  # the camera stays where it is
    kept = by_target.snapshot()
    way = {"mode": "velocity", "data": {"translation": [-1, 0, 0], "rotation": QUARTER}}
    expected = by_motion.step({"camera": way})
    assert np.array_equal(by_target.step({"camera": target(-1, 0, 1, rotation=QUARTER)}), expected)
    # Turned right, the world's forward lies to the left; a restored world knows where it was.
    back = {"mode": "velocity", "data": {"translation": [-1, 0, 0]}}
    assert np.array_equal(
        by_target.step({"camera": target(-1, 0, 2, rotation=QUARTER)}), by_motion.step({"camera": back})
    )
    by_target.restore(kept)
    assert np.array_equal(by_target.step({"camera": target(-1, 0, 1, rotation=QUARTER)}), expected)


def test_training_sees_the_motions_that_a_session_sees(world: WorldModel) -> None:
    poses = [target(0, 0, 1), target(0, 0, 3), target(0, 0, 3)]
    steps = [
        FORWARD,
        {"mode": "velocity", "data": {"translation": [0, 0, 2]}},
        {"mode": "velocity", "data": {}},
    ]
    latents = (world.config.codec.latent_channels, *world.config.codec.grid)
    context = torch.randn(1, 3, world.config.context_latents, *latents, generator=torch.manual_seed(0))
    told, seen = ([[Action.of({"camera": each}) for each in cameras]] for cameras in (poses, steps))
    assert torch.equal(world(context, told).states, world(context, seen).states)


def test_a_model_folder_keeps_what_steers_it(world: WorldModel, tmp_path: Path) -> None:
    folder = hub.save_pretrained(world, tmp_path / "steerable", dtype=torch.float32)
    again = WorldModel.from_pretrained(folder)
    assert again.config.action == ALL
    action = Action.of(FULL)
    assert torch.equal(again.encode_action([action])[0], world.encode_action([action])[0])
    facts = model_facts(str(folder))
    assert facts["actions"]["camera"].startswith("target or velocity")
    assert facts["actions"] == action_facts(ALL)


# ---- environments ----------------------------------------------------------------------------------------


def test_an_agent_may_do_anything_that_the_space_holds(world: WorldModel) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    from worldmodel.env import WorldEnv
    from worldmodel.env.actions import action_space, read_action

    kinds: tuple[Any, ...] = ("keys", "vector", "mouse", "camera", "text")
    for kind in (*kinds, kinds, kinds[::2]):
        space = action_space(kind, ALL)
        space.seed(0)
        for _ in range(20):
            world.action.validate(read_action(kind, space.sample(), ALL), world.backbone)
    env = WorldEnv(world, start="shapes", actions=("mouse", "keys"))
    assert env.action_space == gymnasium.spaces.Dict(
        {"mouse": gymnasium.spaces.Box(-1, 1, (2,)), "keys": gymnasium.spaces.MultiBinary(4)}
    )
    env.reset(seed=0)
    session = env.unwrapped.world.fork()  # type: ignore[attr-defined]
    made = env.step({"mouse": [0.5, -1.0], "keys": [1, 0, 0, 1]})[0]
    assert np.array_equal(made, session.step({"mouse": [0.5, -1.0], "keys": ["w", "d"]})[-1])
    assert np.array_equal(action_space("vector", ALL).high, np.float32([2, 1]))  # type: ignore[attr-defined]


def test_an_agent_turns_the_camera_about_an_axis() -> None:
    pytest.importorskip("gymnasium")
    from worldmodel.env.actions import read_action

    turned = read_action("camera", [0, 0, 1, 0, math.pi / 2, 0], ALL).camera
    assert turned is not None
    assert (turned.mode, turned.pose.translation) == ("velocity", (0.0, 0.0, 1.0))
    assert turned.pose.rotation == pytest.approx(QUARTER)
    assert read_action("camera", np.zeros(6), ALL) == Action(camera=Camera("velocity", Pose()))


@pytest.mark.parametrize(
    ("kind", "value", "told"),
    [
        ("mouse", [0.5], "2 finite numbers, not [0.5]"),
        ("camera", [0] * 7, "6 finite numbers"),
        ("camera", [0, 0, math.inf, 0, 0, 0], "6 finite numbers"),
        ("camera", [0, 0, 1e9, 0, 0, 0], "beyond"),
        (("keys", "mouse"), [[0, 0, 0, 0], [0, 0]], "a mapping of keys, mouse, not"),
        (("keys", "mouse"), {"keys": [0, 0, 0, 0]}, "a mapping of keys, mouse, not"),
        (("keys", "mouse"), {"keys": [0, 0, 0, 2], "mouse": [0, 0]}, "4 zeros and ones"),
    ],
    ids=str,
)
def test_what_is_no_element_of_the_space(kind: Any, value: Any, told: str) -> None:
    pytest.importorskip("gymnasium")
    from worldmodel.env.actions import read_action

    with pytest.raises(InputError) as refused:
        read_action(kind, value, ALL)
    assert told in str(refused.value)


def test_kinds_that_a_world_does_not_take() -> None:
    pytest.importorskip("gymnasium")
    from worldmodel.env.actions import choose_kind, read_schema

    assert choose_kind(None, ALL) == "keys"
    assert choose_kind(["camera", "text"], ALL) == ("camera", "text")  # type: ignore[list-item]
    for kind, told in ((("keys", "mice"), "'mice', which"), ((), "name each kind once"), (3, "is 3, which")):
        with pytest.raises(ConfigError, match=told):
            choose_kind(kind, ALL)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="name each kind once"):
        choose_kind(("keys", "keys"), ALL)
    with pytest.raises(ConfigError, match="takes no actions"):
        choose_kind(None, ActionConfig(text=False))
    assert read_schema({"mouse": True, "newer": 1}) == ActionConfig(mouse=True)
    with pytest.raises(ConfigError):
        read_schema({"vector_size": "many"})


def test_actions_of_many_worlds_come_as_a_batch_or_a_list() -> None:
    pytest.importorskip("gymnasium")
    from gymnasium.vector.utils import batch_space

    from worldmodel.env.actions import action_space, each_action

    space = batch_space(action_space(("text", "mouse"), ALL), 3)
    space.seed(0)
    drawn = space.sample()
    split = each_action(drawn)
    assert [each["text"] for each in split] == list(drawn["text"])
    assert np.array_equal([each["mouse"] for each in split], drawn["mouse"])
    assert each_action(split) == split
    for bad in (3, None, "go", {"text": ["a"], "mouse": [1, 2]}, {"text": 3}, {}):
        assert each_action(bad) == []


# ---- training data ---------------------------------------------------------------------------------------


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


def test_a_row_says_what_mouse_and_camera_did(counting: Path, tmp_path: Path) -> None:
    source = clips(counting, tmp_path, **{**FULL, "mouse": [[0.5, 0], None, [-0.5, 1]]})
    for index in range(10):
        first, actions = played(source, index)
        assert first % 8 == 0
        mice = [(0.5, 0.0), None, (-0.5, 1.0), *[None] * 5]
        whole = replace(Action.of(FULL), mouse=None)
        assert actions == [replace(whole, mouse=mouse) for mouse in mice[first // 8 :][:2]]


def test_targets_of_a_clip_become_motions_from_wherever_it_begins(counting: Path, tmp_path: Path) -> None:
    places = [0.0, 1.0, 3.0, 6.0, 6.0, 4.0, 4.5]
    by_round = clips(counting, tmp_path, camera=[target(0, 0, z) for z in places])
    timed = [{"start": i, "end": i + 1, "camera": target(0, 0, z)} for i, z in enumerate(places)]
    by_time = clips(counting, tmp_path, camera=timed)
    # A pose for each frame is a path, too: the pose that holds at a round's end counts.
    per_frame = [
        {
            "start": i / 8,
            "end": (i + 1) / 8,
            "camera": target(0, 0, np.interp((i + 1) / 8, range(8), [0, *places])),
        }
        for i in range(56)
    ]
    by_frame = clips(counting, tmp_path, camera=per_frame)
    firsts = set()
    for source in (by_round, by_time, by_frame):
        for index in range(8):
            first, actions = played(source, index, 3)
            firsts.add(first)
            ends = np.interp(first / 8 + np.arange(4), range(8), [0, *places])
            for action, way in zip(actions, np.diff(ends), strict=True):
                assert action.camera is not None
                assert action.camera.mode == "velocity"
                assert action.camera.pose.translation == pytest.approx((0, 0, way), abs=1e-6)
    assert len(firsts) > 8


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"mouse": [2, 0]}, "shares of the picture, -1 to 1"),
        ({"mouse": [[0, 0], [0, 0, 0]]}, "has 3 numbers; pass 2"),
        ({"mouse": "left"}, "pass a list of numbers"),
        ({"vector": [3, 0]}, "reach is 3; use -2 to 2"),
        ({"camera": "forward"}, "pass mode"),
        ({"camera": "{forward}"}, "no JSON"),
        ({"camera": [1, 2, 3]}, "pass mode"),
        ({"camera": [{"data": {"rotation": [0, 0, 0, 2]}}]}, "no unit quaternion"),
        ({"camera": [target(0, 0, 1), FORWARD]}, "target without a time"),
        ({"camera": target(0, 0, 1)}, "target without a time"),
        ({"camera": [{"camera": FORWARD}]}, "without start and end"),
    ],
    ids=lambda each: str(each)[:60],
)
def test_a_row_that_cannot_be(counting: Path, tmp_path: Path, row: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        clips(counting, tmp_path, **row)
    assert "data.sources.mine: 0.jsonl row 1: " in str(refused.value)
    assert told in str(refused.value)


def test_columns_are_for_models_that_take_them(counting: Path, tmp_path: Path) -> None:
    plain = replace(MODEL, action=ActionConfig())
    for field in ("keys", "mouse", "vector", "camera"):
        with pytest.raises(ConfigError, match=f"names {field}, but the model takes no {field}"):
            clips(counting, tmp_path, plain, **{field: FULL[field]})


def test_a_tar_needs_no_columns_for_fields_of_these_names(counting: Path, tmp_path: Path) -> None:
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


# ---- on the command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "action"),
    [
        ("mouse:0.5, -1", Action(mouse=(0.5, -1.0))),
        (json.dumps(FULL), Action.of(FULL)),
        ('{"keys": "w"}', Action(keys=("w",))),
        ("{}", Action()),
    ],
)
def test_actions_as_words(word: str, action: Action) -> None:
    assert parse_action(word) == action


@pytest.mark.parametrize(
    "word", ["mouse:", "mouse:left", "{", '{"keys": 3}', '{"a": 1}', "{" * 100_000, "[1"]
)
def test_words_that_are_no_actions(word: str) -> None:
    if word == "[1":
        assert parse_action(word) == Action("[1")  # a sentence may begin with a bracket
        return
    with pytest.raises(InputError):
        parse_action(word)


def test_info_tells_what_steers_a_model() -> None:
    assert action_facts(ALL) == {
        "text": "up to 64 tokens",
        "keys": ["w", "a", "s", "d"],
        "mouse": "right and down, -1 to 1 of the picture",
        "vector": "2 numbers: reach (-2 to 2), grip (0 to 1)",
        "camera": "target or velocity: translation [x, y, z], rotation [x, y, z, w]",
    }
    assert set(action_facts(ActionConfig(text=False)).values()) == {"none"}
    assert action_facts(replace(ALL, vector_names=()))["vector"] == "2 numbers: 1 (-2 to 2), 2 (0 to 1)"
    assert action_facts(replace(ALL, vector_low=(), vector_high=()))["vector"] == "2 numbers: reach, grip"
