"""The shipped model, with thresholds well below its measured figures."""

import re
from pathlib import Path

import numpy as np
import pytest

from worldmodel import WorldModel, shapes
from worldmodel.eval.runner import ModelSubject
from worldmodel.eval.suite import EvalSettings, evaluate
from worldmodel.models.loading.model_folder import resolve
from worldmodel.shapes.evaluation.language import describe, inverse_dynamics
from worldmodel.shapes.evaluation.suite import ShapesSuite

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny() -> WorldModel:
    return WorldModel.from_pretrained("shapes-tiny")


def test_it_fits_in_the_package() -> None:
    files = [file for file in Path(resolve("shapes-tiny")).rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 32 * 2**20
    assert {file.suffix for file in files} <= {".safetensors", ".json", ".md", ".jinja", ".txt"}


@pytest.mark.slow
def test_it_follows_actions(tiny: WorldModel) -> None:
    figures = evaluate(tiny, EvalSettings("held-out", num_samples=64, seed=5), ShapesSuite())["figures"]
    figures = figures["action_following"]["held-out"]
    assert figures["named"]["value"] >= 0.8
    assert figures["strict"]["value"] >= 0.75
    assert figures["copy_named"]["value"] <= 0.2
    assert figures["psnr"]["value"] >= 26


def test_two_actions_give_two_futures(tiny: WorldModel) -> None:
    scene = shapes.Scene(
        "night",
        (
            shapes.place_in_zone("red", "ball", "large", "left"),
            shapes.place_in_zone("blue", "box", "large", "right"),
        ),
    )
    session = tiny.session(seed=0)
    session.reset(shapes.render(scene))
    other = session.fork()
    gone, blown = session.step("the red ball vanishes").frames, other.step("the blue box explodes").frames
    assert {obj.colour for obj in shapes.find_objects(gone[-1], "night")} == {"blue"}
    assert {obj.colour for obj in shapes.find_objects(blown[-1], "night")} == {"red"}


def test_it_tells_sentences_from_nonsense(tiny: WorldModel) -> None:
    threshold = tiny.config.confidence_threshold
    assert threshold is not None
    for index in range(3):
        sample = shapes.sample_clip("single", 9, index)
        for text, understood in ((sample.text, True), ("please make a dragon fly over the castle", False)):
            session = tiny.session(seed=index)
            session.reset(sample.clip.first_frame)
            session.step(text)
            assert (session.confidence(text) > threshold) is understood, text


def test_it_says_what_it_was_trained_on(tiny: WorldModel) -> None:
    assert tiny.tasks == ("rounds", "imagine", "describe", "ask", "inverse")
    assert WorldModel.from_pretrained("minigrid-doorkey").tasks == ("rounds",)


def test_it_describes_observations(tiny: WorldModel) -> None:
    scene = shapes.Scene("night", (shapes.place_in_zone("red", "ball", "large", "left"),))
    session = tiny.session()
    session.reset(shapes.render(scene))
    assert "red" in session.describe()
    assert session.describe("how many things are there") == "one"


def test_it_answers_as_the_tutorial_says(tiny: WorldModel) -> None:
    command = re.compile(r'^\$ worldmodel describe demo/first_frame\.png(?: "(.*)")?\n(.*)$', re.MULTILINE)
    shown = command.findall((ROOT / "docs" / "tutorial" / "steer.md").read_text("utf-8"))
    assert len(shown) == 3
    session = tiny.session()
    session.reset(ROOT / "demo" / "first_frame.png")
    for question, answer in shown:
        assert session.describe(question or None) == answer, question


@pytest.mark.slow
def test_it_describes_scenes_and_infers_actions(tiny: WorldModel) -> None:
    subject = ModelSubject(tiny)
    assert describe(subject, 32, seed=5)["scene"]["value"] >= 0.5
    assert inverse_dynamics(subject, 32, seed=5)["val"]["acts"]["value"] >= 0.4


def test_it_generates_scenes_from_text(tiny: WorldModel) -> None:
    frames = tiny.session(seed=1).reset(text="night background, a large red ball at the left")
    found = shapes.find_objects(frames[-1], "night")
    assert [obj.colour for obj in found] == ["red"]
    assert found[0].x < 32


def test_frames_are_reproducible(tiny: WorldModel) -> None:
    clips = []
    for _ in range(2):
        session = tiny.session(seed=3)
        session.reset(text="forest background, a small green box at the top")
        clips.append(session.step("the green box falls").frames)
    assert np.array_equal(*clips)
