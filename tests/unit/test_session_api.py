"""What people expect of a session beside playing: undo, comparing, files, one line of text, pixels."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from worldmodel import Session
from worldmodel.config import StateConfig
from worldmodel.errors import InputError
from worldmodel.models.world_model import WorldModel


@pytest.fixture
def session(model: WorldModel, image: np.ndarray) -> Session:
    session = model.session(seed=5, num_inference_steps=2, guidance_scale=1.5)
    session.reset(image)
    return session


def test_undo_returns_to_earlier_rounds(session: Session) -> None:
    first, second = session.step("go on").frames, session.step({"keys": ["left"]}).frames
    session.step(None)
    assert np.array_equal(session.undo(), second)
    assert np.array_equal(session.undo(1), first)
    assert len(session.actions) == 1
    assert np.array_equal(session.step({"keys": ["left"]}).frames, second), "as it was played before"
    session.undo(2)
    assert session.actions == ()
    with pytest.raises(InputError):
        session.undo()


def test_compare_plays_each_action_from_this_moment(session: Session) -> None:
    session.step("go on")
    results = session.compare({"keys": ["left"]}, {"keys": ["right"]}, None)
    assert len(session.actions) == 1, "the session does not change"
    for action, result in zip(({"keys": ["left"]}, {"keys": ["right"]}, None), results, strict=True):
        alone = session.fork().step(action).frames
        assert np.abs(result.frames.astype(int) - alone).max() <= 1  # rounding of a batch
    with pytest.raises(InputError):
        session.compare()


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_saved_session_goes_on_with_the_same_frames(
    session: Session, model: WorldModel, tmp_path: Path, suffix: str
) -> None:
    session.step("go on")
    session.step({"vector": [1, 0, 0]})
    path = session.save(tmp_path / f"world{suffix}")
    other = Session.load(path, model)
    assert np.array_equal(other.frames, session.frames)
    assert other.actions == session.actions
    assert (other.seed, other.params) == (session.seed, session.params)
    for action in ("now stop", None):
        assert np.array_equal(other.step(action).frames, session.step(action).frames)


def test_a_saved_session_keeps_the_code(
    make_model: Callable[..., WorldModel], image: np.ndarray, tmp_path: Path
) -> None:
    state = StateConfig(width=32, num_layers=1, num_heads=2, code_groups=2, code_classes=4)
    model = make_model(state=state)
    session = model.session(seed=1, num_inference_steps=0, temperature=0.7, top_k=3)
    session.reset(image)
    session.step("go on")
    other = Session.load(session.save(tmp_path / "world.safetensors"), model)
    assert np.array_equal(other.step(None).frames, session.step(None).frames)


def test_files_of_other_models_and_damaged_ones_are_refused(
    session: Session, make_model: Callable[..., WorldModel], model: WorldModel, tmp_path: Path
) -> None:
    session.step("go on")
    path = session.save(tmp_path / "world.safetensors")
    with pytest.raises(InputError, match="another model"):
        Session.load(path, make_model(seed=1))
    with pytest.raises(InputError, match="no file"):
        Session.load(tmp_path / "nothing.pt", model)
    (tmp_path / "text.pt").write_text("not a session")
    torch.save({"a": 1}, tmp_path / "pickle.pt")
    whole = path.read_bytes()
    (tmp_path / "short.pt").write_bytes(whole[:-10])
    (tmp_path / "changed.pt").write_bytes(whole[:-10] + bytes(10))
    tensors = load_file(path)
    length = int.from_bytes(whole[:8], "little")
    metadata = json.loads(whole[8 : 8 + length])["__metadata__"]
    save_file({**tensors, "context": tensors["context"][:, :, :1]}, tmp_path / "shape.pt", metadata)
    for name in ("text", "pickle", "short", "changed", "shape"):
        with pytest.raises(InputError, match="damaged"):
            Session.load(tmp_path / f"{name}.pt", model)


def test_everything_is_told_in_one_line(session: Session, model: WorldModel) -> None:
    result = session.step("go on")
    for each in (model, session, session.snapshot(), result, model.session()):
        assert "\n" not in repr(each)
        assert len(repr(each)) < 200
    assert "round 1" in repr(session)
    assert "M parameters" in repr(model)


def test_a_notebook_shows_the_film(session: Session, model: WorldModel) -> None:
    assert "<img" in session._repr_html_()
    session.step("go on")
    found = re.search(r'<video src="data:video/mp4;base64,([A-Za-z0-9+/=]+)"', session._repr_html_())
    assert found is not None
    assert "not started" in model.session()._repr_html_()


def test_pixels_of_any_kind_start_a_world(model: WorldModel, image: np.ndarray) -> None:
    session = model.session()
    given = {
        "floats": image / 255,
        "float32": (image / 255).astype(np.float32),
        "tensor": torch.from_numpy(image),
        "channels first": torch.from_numpy(image).movedim(-1, 0),
        "unit range, channels first": torch.from_numpy(image).movedim(-1, 0) / 255,
        "clip": torch.from_numpy(image)[None],
    }
    for name, pixels in given.items():
        assert np.array_equal(session.reset(pixels), image[None]), name
    for wrong in (image.astype(float), image / 255 - 0.5, np.full((32, 32, 3), np.nan)):
        with pytest.raises(InputError, match="floats from"):
            session.reset(wrong)


def test_a_list_of_keys_is_one_action(session: Session) -> None:
    fork = session.fork()
    assert np.array_equal(
        session.step(["left", "right"]).frames, fork.step({"keys": ["left", "right"]}).frames
    )
    assert session.actions[-1].keys == ("left", "right")
