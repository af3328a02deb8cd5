"""What a model was never trained to do is refused by name instead of answered with nonsense."""

import copy

import numpy as np
import pytest

from worldmodel.errors import InputError
from worldmodel.models.world_model import WorldModel


@pytest.fixture
def rounds_only(model: WorldModel) -> WorldModel:
    """A model whose folder says that it was trained on rounds alone."""
    made = copy.copy(model)
    made.tasks = ("rounds",)
    return made


def test_untrained_tasks_are_refused_by_name(rounds_only: WorldModel, image: np.ndarray) -> None:
    session = rounds_only.session()
    with pytest.raises(InputError, match="imagine"):
        session.reset(text="a red ball")
    session.reset(image)
    session.step("left")
    for call, task in (
        (session.describe, "describe"),
        (lambda: session.describe("how many"), "ask"),
        (session.infer_action, "inverse"),
        (lambda: session.confidence("left"), "inverse"),
    ):
        with pytest.raises(InputError, match=task):
            call()
    rounds_only.tasks = ("rounds", "describe", "ask", "inverse", "imagine")
    assert isinstance(session.describe(), str)
    assert isinstance(session.describe("how many"), str)


def test_models_that_do_not_say_are_not_restricted(model: WorldModel, image: np.ndarray) -> None:
    assert model.tasks is None
    session = model.session()
    session.reset(text="a red ball")
    assert isinstance(session.describe(), str)


@pytest.mark.parametrize("name", ["shapes-memory", "minigrid-doorkey"])
def test_shipped_worlds_say_what_they_were_trained_on(name: str) -> None:
    world = WorldModel.from_pretrained(name)
    assert world.tasks == ("rounds",)
    with pytest.raises(InputError, match="imagine"):
        world.session().reset(text="a red ball")
