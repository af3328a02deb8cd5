"""Inverse dynamics in every form: actions in words, and words as actions."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import changed

from worldmodel import media
from worldmodel.actions import Action, Camera, Pose
from worldmodel.actions.words import say, understand
from worldmodel.config import ActionConfig, DataConfig, SourceConfig, TrainConfig
from worldmodel.data.latents import ChunkLatents, LatentFormat
from worldmodel.data.sources import open_source
from worldmodel.episodes import WHAT_HAPPENED
from worldmodel.errors import InputError
from worldmodel.models.world_model import WorldModel
from worldmodel.train import finetune

EVERY = ActionConfig(
    keys=("left", "right", "jump"),
    vector={"low": (-1.0, 0.0), "high": (1.0, 5.0)},
    mouse=True,
    camera=True,
)
MOTION = Camera("velocity", Pose((0.0, 0.0, 0.25), (0.0, 0.6, 0.0, 0.8)))
ACTIONS = {
    "the red ball moves left": Action("the red ball moves left"),
    "nothing happens": Action(),
    "keys left+jump": Action(keys=("left", "jump")),
    "vector 0.5 -1": Action(vector=(0.5, -1.0)),
    "mouse 0.125 0": Action(mouse=(0.125, 0.0)),
    "camera 0 0 0.25 0 0.6 0 0.8": Action(camera=MOTION),
    "it rains; keys left; mouse 0 0.5": Action("it rains", keys=("left",), mouse=(0.0, 0.5)),
}


@pytest.mark.parametrize("words", ACTIONS)
def test_an_action_is_said_and_understood(words: str) -> None:
    takes = dataclasses.replace(EVERY, vector=2)
    assert say(ACTIONS[words]) == words
    assert understand(words, takes) == ACTIONS[words]


def test_the_actions_of_a_round() -> None:
    takes = dataclasses.replace(EVERY, per_round=3)
    left, jump = Action(keys=("left",)), Action(keys=("jump",))
    changing = Action(chunk=(left, jump, Action()))
    assert say(changing) == "keys left | keys jump | nothing happens"
    assert understand(say(changing), takes) == changing
    held = Action(chunk=(left, left, left))
    assert say(held) == "keys left" and understand(say(held), takes) == left
    assert understand("keys left | keys jump", takes) == Action(chunk=(left, jump, jump))


@pytest.mark.parametrize(
    ("words", "action"),
    [
        ("keys left+fly+left", Action(keys=("left",))),
        ("vector 9 -3", Action(vector=(1.0, 0.0))),
        ("mouse 2 nan", Action()),
        ("vector 1", Action()),
        ("camera 0 0 1 0 0 0 0", Action()),
        ("camera 1 2 3 0 0 0 2", Action(camera=Camera("velocity", Pose((1.0, 2.0, 3.0))))),
        ("; ; ", Action()),
    ],
)
def test_what_a_model_does_not_take_is_left_out(words: str, action: Action) -> None:
    assert understand(words, EVERY) == action
    assert understand(words, ActionConfig(text=False)) == Action()


@given(st.text(alphabet="keys vectormausca0123456789.-+|;€nif", max_size=60), st.sampled_from([1, 2]))
def test_all_that_is_generated_is_an_action_that_the_model_takes(words: str, count: int) -> None:
    takes = dataclasses.replace(EVERY, per_round=count)
    understand(words, takes).check(takes)


@pytest.fixture
def played(recorded: Path, tmp_path: Path) -> Path:
    """A table of one clip of two rounds with keys, and a caption."""
    shutil.copy(sorted(recorded.glob("*.mp4"))[0], tmp_path / "clip.mp4")
    row = {"video": "clip.mp4", "keys": [["left"], ["left", "jump"]], "said": "a game"}
    (tmp_path / "clips.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path / "clips.jsonl"


def test_own_clips_have_their_actions_as_answers(
    played: Path, make_model: Callable[..., WorldModel], image: np.ndarray
) -> None:
    model = make_model(action=EVERY)
    columns = {"video": "video", "keys": "keys", "text": "said"}
    data = DataConfig({"mine": SourceConfig("clips", str(played), columns=columns)})
    source = open_source("mine", data, model.config)
    assert "inverse" in source.tasks
    chunk = model.config.chunk_frames
    frames = media.read_video(played.with_name("clip.mp4"), 32, model.config.fps, 1 + 2 * chunk)
    answers = set()
    for seed in range(12):
        episode = source.at(0).episode("inverse", seed, 0, 1)
        before, after = episode.observations
        assert (episode.prompt, len(before), len(after)) == (WHAT_HAPPENED, 1, chunk)
        first = 0 if np.array_equal(before[0], frames[0]) else chunk
        assert np.array_equal(after, frames[1 + first :][:chunk])
        assert episode.answer == ("keys left" if not first else "keys left+jump")
        answers.add(episode.answer)
    assert len(answers) == 2


def test_a_caption_is_no_action(played: Path, model: WorldModel) -> None:
    columns = {"video": "video", "text": "said"}
    data = DataConfig({"mine": SourceConfig("clips", str(played), columns=columns)})
    with pytest.raises(InputError, match="no actions"):
        open_source("mine", data, model.config).at(0).episode("inverse", 0, 0, 1)


def test_stored_latents_have_the_frame_before_the_round() -> None:
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(size=(3, count, 4, 2, 2)).astype(np.float32)
        for name, count in (("first_context", 1), ("first_target", 2))
    }
    latents = ChunkLatents(tensors, LatentFormat((1, 4, 2, 2), (2, 4, 2, 2), False, False))
    observed = latents.observations("inverse", 1, 1).observed
    expected = np.concatenate([tensors["first_context"][1], tensors["first_target"][1]])
    assert observed is not None and np.array_equal(observed, expected)


@pytest.mark.slow
def test_inverse_dynamics_is_trained_on_own_clips(run_config: TrainConfig, tmp_path: Path) -> None:
    """From the same start it gets bright or dark, by different keys and vectors."""
    actions = {230: Action(keys=("left",), vector=(0.5, 2.0)), 20: Action(keys=("jump",), vector=(-1.0, 0.0))}
    clips, rows = {}, []
    for grey, action in actions.items():
        clips[grey] = np.full((9, 64, 64, 3), grey, np.uint8)
        clips[grey][0] = 120
        media.write_video(clips[grey], tmp_path / f"{grey}.mp4", 8, scale=1)
        told = {"keys": [list(action.keys)], "vector": [list(action.vector or ())]}
        rows.append(json.dumps({"video": f"{grey}.mp4", **told}))
    (tmp_path / "clips.jsonl").write_text("\n".join(rows))
    columns = {name: name for name in ("video", "keys", "vector")}
    mine = SourceConfig("clips", str(tmp_path / "clips.jsonl"), columns=columns)
    stage = changed(
        run_config, steps=100, batch_size=4, microbatch_size=0, tasks={"inverse": 1.0}, ema_decay=0.0
    )
    config = dataclasses.replace(
        stage,
        model=dataclasses.replace(run_config.model, action=EVERY),
        data=DataConfig({"mine": mine}),
        sample_every=0,
        init_from=None,
        run_dir=str(tmp_path / "inverse"),
    )
    session = WorldModel.from_pretrained(finetune.train(config)).session()
    for grey, frames in clips.items():
        session.reset(frames[0])
        session.observe(frames[1:])
        assert session.infer_action() == actions[grey]
