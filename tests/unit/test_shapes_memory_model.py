"""The shipped world that remembers: hidden objects come back, and what moved in a film goes on."""

import numpy as np
import pytest

from worldmodel import WorldModel, shapes
from worldmodel.eval.runner import ModelSubject
from worldmodel.shapes.evaluation.cases import case_of, judge_frame
from worldmodel.shapes.evaluation.films import film_continuations
from worldmodel.shapes.evaluation.memory import hidden_objects
from worldmodel.shapes.films import sample_film_pair

SEED = 99
"""Not that of the published figures."""


@pytest.fixture(scope="module")
def model() -> WorldModel:
    return WorldModel.from_pretrained("shapes-memory")


def test_two_films_with_the_same_end_go_on_in_their_directions(model: WorldModel) -> None:
    right = 0
    for index in range(4):
        for film in sample_film_pair(SEED, index, 1):
            clips = [film[0].clip.first_frame[None], *(sample.clip.frames for sample in film[:-1])]
            session = model.session()
            session.reset(np.concatenate(clips))
            right += judge_frame(session.step().frames[-1], case_of(film[-1]).truths[-1]).named
    assert right >= 6


def test_a_hidden_object_comes_back_in_a_session(model: WorldModel) -> None:
    scene = shapes.Scene("night", (shapes.place_in_zone("red", "ball", "large", "left"),))
    session = model.session()
    session.reset(shapes.render(scene))
    hidden = session.step("hide the red ball").frames
    session.step("nothing happens")
    shown = session.step("the red ball comes back").frames
    assert not shapes.find_objects(hidden[-1], "night")
    (found,) = shapes.find_objects(shown[-1], "night")
    assert found.colour == "red" and abs(found.x - scene.objects[0].x) <= 3


@pytest.mark.slow
def test_it_remembers_and_the_same_model_that_forgets_does_not(model: WorldModel) -> None:
    subject = ModelSubject(model)
    memory = hidden_objects(subject, judge_frame, 32, SEED, hidden_rounds=[1, 8])
    films = film_continuations(subject, judge_frame, 32, SEED)
    for rates in memory.values():
        assert rates["named"]["value"] > 0.6 and rates["forgotten_named"]["value"] < 0.1
    for rates in films.values():
        assert rates["named"]["value"] > 0.7 and rates["image_named"]["value"] < 0.3
