"""The shipped world that takes every kind of action."""

import pytest

from worldmodel import Action, WorldModel, shapes
from worldmodel.eval.runner import ModelSubject
from worldmodel.shapes.evaluation.controls import controlled

SEED = 99
"""Not that of the published figures."""


@pytest.fixture(scope="module")
def model() -> WorldModel:
    return WorldModel.from_pretrained("shapes")


def test_a_thing_is_dragged_by_the_pointer_and_another_is_pushed_by_a_vector(model: WorldModel) -> None:
    scene = shapes.Scene(
        "night",
        (
            shapes.place_in_zone("red", "ball", "large", "left"),
            shapes.place_in_zone("blue", "box", "large", "right"),
        ),
    )
    ball, box = scene.objects
    session = model.session()
    session.reset(shapes.render(scene))
    session.step(Action(mouse=((ball.x + 0.5) / 64, (ball.y + 0.5) / 64, 8 / 64, -12 / 64)))
    frames = session.step(Action(keys=("blue",), vector=(-8.0, 8.0))).frames
    found = {each.colour: each for each in shapes.find_objects(frames[-1], "night")}
    for colour, x, y in (("red", ball.x + 8, ball.y - 12), ("blue", box.x - 8, box.y + 8)):
        assert abs(found[colour].x - x) <= 3 and abs(found[colour].y - y) <= 3


@pytest.mark.slow
def test_it_obeys_every_kind_of_action(model: WorldModel) -> None:
    figures = controlled(ModelSubject(model), 24, SEED)
    for kind in ("nothing", "drag on nothing"):
        assert figures[kind]["strict"]["value"] > 0.6  # published: 100 and 82 %
    right = {kind: rates["moved"]["value"] for kind, rates in figures.items()}
    for kind in ("drag", "push one", "push all", "pan", "zoom", "words", "words, keys", "words against keys"):
        assert right[kind] > max(0.4, figures[kind]["copy_moved"]["value"]), kind
    both = ("drag, words", "push all, words", "pan, words", "drag, pan")
    copied = sum(figures[kind]["copy_moved"]["value"] for kind in both)
    assert sum(right[kind] for kind in both) > 0.4 + copied
