"""Goals in words: the language model judges predicted states, and plans end where it says yes."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from worldmodel import WorldModel, shapes
from worldmodel.actions import Action
from worldmodel.cli import main
from worldmodel.errors import InputError
from worldmodel.planning import Choices, ModelSimulator, PlanSettings, Reached, Trajectory, plan
from worldmodel.shapes import Scene
from worldmodel.shapes.recall import sample_recall

COLOURS = ("red", "yellow", "blue", "green")
SEARCH = PlanSettings("search", horizon=2, until=0.5)


@pytest.fixture(scope="module")
def model() -> WorldModel:
    return WorldModel.from_pretrained("shapes-tiny")


def scene_of(seed: int) -> tuple[Scene, str, list[str]]:
    """Return a scene, a colour that it does not have, and acts of which some bring that colour."""
    scene = shapes.random_scene(np.random.default_rng(seed), 2)
    wanted, other = [colour for colour in COLOURS if scene.find(colour) is None][:2]
    ends = (f"turns {other}", f"turns {wanted}", "moves left", "jumps")
    return scene, wanted, [f"the {obj.colour} {obj.shape} {end}" for obj in scene.objects for end in ends]


def test_plans_reach_what_was_asked_for(model: WorldModel) -> None:
    right = 0
    for seed in range(4):
        scene, wanted, texts = scene_of(seed)
        simulator = ModelSimulator(model, goal=f"is there a {wanted} thing")
        start = simulator.start(shapes.render(scene))
        found = plan(simulator, start, Reached(), Choices(tuple(map(Action, texts))), SEARCH)
        assert 0 <= found.score <= 1
        for action in found.trajectory.actions:  # the true world decides
            scene = shapes.simulate(scene, shapes.parse(action.text or "")).after
        right += scene.find(wanted) is not None
    assert right >= 3


def test_the_probability_is_that_of_the_answer(model: WorldModel) -> None:
    scene, wanted, texts = scene_of(5)
    question = f"is there a {wanted} thing"
    simulator = ModelSimulator(model, goal=question)
    start = simulator.start(shapes.render(scene))
    after = simulator.step([start] * len(texts), list(map(Action, texts)))
    said = []
    for text, state in zip(texts, after, strict=True):
        session = model.session()
        session.reset(shapes.render(scene))
        session.step(text)
        said.append(session.describe(question))
        outcome = simulator.outcome(state)
        assert outcome is not None and outcome.ended == (outcome.reward > 0.5) == (said[-1] == "yes")
    assert {"yes", "no"} == set(said)


def test_what_cannot_be_judged_is_refused(model: WorldModel) -> None:
    with pytest.raises(InputError, match="not trained to answer questions"):
        ModelSimulator(WorldModel.from_pretrained("minigrid-doorkey"), goal="is the door open")
    with pytest.raises(InputError, match="empty"):
        ModelSimulator(model, goal=" ")
    with pytest.raises(InputError, match="no rewards"):
        Reached()(Trajectory((Action(),), (np.zeros((1, 4, 4, 3), np.uint8),), (None,)))


def holds(scene: Scene, words: str) -> bool:
    """Judge a statement without the code that made it."""
    numbers = ("zero", "one", "two", "three", "four", "five", "six")
    if found := re.fullmatch(r"there is a (\w+) thing", words):
        return any(obj.colour == found[1] for obj in scene.objects)
    if found := re.fullmatch(r"there (?:is|are) (\w+) (\w+)", words):
        return sum(found[2].startswith(obj.shape) for obj in scene.objects) == numbers.index(found[1])
    found = re.fullmatch(r"the (\w+) (\w+) is (.+)", words)
    assert found is not None, words
    (obj,) = (each for each in scene.objects if (each.colour, each.shape) == (found[1], found[2]))
    said = found[3]
    if said in ("small", "medium", "large"):
        return obj.size == said
    if said.startswith("at the "):
        return shapes.zone_of(obj.x, obj.y) == said.removeprefix("at the ")
    (other,) = (each for each in scene.objects if said.endswith(f" the {each.colour} {each.shape}"))
    sides = {
        "to the left of": obj.x < other.x,
        "to the right of": obj.x > other.x,
        "above": obj.y < other.y,
        "below": obj.y > other.y,
    }
    return sides[said.removesuffix(f" the {other.colour} {other.shape}")]


def test_statements_hold_half_of_the_time() -> None:
    given = []
    for seed in range(400):
        rng = np.random.default_rng(seed)
        scene = shapes.random_scene(rng)
        words, answer = shapes.statement(scene, rng)
        assert holds(scene, words) == (answer == "yes"), words
        given.append((words, answer))
    assert 0.4 < [answer for _, answer in given].count("yes") / len(given) < 0.6
    for kind in ("thing", "at the", "medium", "there are", "to the left of", "below"):
        assert {answer for words, answer in given if kind in words} == {"yes", "no"}


def test_goals_are_asked_after_rounds() -> None:
    asked = [sample_recall(1, index, 3, "a goal") for index in range(12)]
    for each in asked:
        assert each.answer == ("yes" if holds(each.samples[-1].clip.after, each.prompt) else "no")
    assert {each.answer for each in asked} == {"yes", "no"}


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scene, wanted, texts = scene_of(0)
    image = tmp_path / "start.png"
    Image.fromarray(shapes.render(scene)).save(image)
    command = ["plan", "shapes-tiny", "--start", str(image), "--method", "search", "--horizon", "2"]
    command += [f"--action={text}" for text in texts]
    goal = f"is there a {wanted} thing"
    assert main([*command, "--until", goal]) == 0
    assert f"turns {wanted}" in capsys.readouterr().out.splitlines()[0]
    assert main([*command, "--until", goal, "--goal", str(image)]) == 2
    assert "one goal" in capsys.readouterr().err
