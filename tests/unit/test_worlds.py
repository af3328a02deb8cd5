"""Registration of a world that is not part of the library."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from worldmodel.actions import Action
from worldmodel.config import DataConfig, SourceConfig, TrainConfig, WorldModelConfig
from worldmodel.data.sources import open_source
from worldmodel.errors import ConfigError, InputError
from worldmodel.eval.action_following import action_following
from worldmodel.eval.card import model_card
from worldmodel.eval.drift import rollouts
from worldmodel.eval.examples import Album
from worldmodel.eval.goals import Goal
from worldmodel.eval.judge import Case, Verdict
from worldmodel.eval.published import run_of
from worldmodel.eval.report import write_report
from worldmodel.eval.suite import CardText, EvalSettings, Part, evaluate
from worldmodel.train.tokenizer import documents
from worldmodel.worlds import World, get_world, register_world, suite_of, world_names
from worldmodel.worlds import registry as worlds

HEIGHT, WIDTH, FRAMES = 8, 12, 2


def frame(column: int) -> np.ndarray:
    """A white dot on black."""
    image = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    image[3, column % WIDTH] = 255
    return image


def judge(image: np.ndarray, column: int, /) -> Verdict:
    right = bool(image[3, column % WIDTH].all())
    return Verdict(right, True, right, "" if right else "the dot is elsewhere")


def case(column: int) -> Case:
    truths = range(column + 1, column + 1 + FRAMES)
    frames = np.stack([frame(truth) for truth in truths])
    return Case("step", Action("step"), frame(column), column, frames, list(truths), ("step",))


class DotSuite:
    judge = staticmethod(judge)
    goals = (Goal("the dot is right", ("action_following", "all", "strict"), at_least=0.9),)
    splits = {"all": "All columns"}  # noqa: RUF012
    card = CardText("A dot.", "`{name}`", "Dots.", "*Right* is where the dot is.", ("Only dots.",), "dots")

    def check(self, config: WorldModelConfig) -> None:
        if config.codec.image_size != (HEIGHT, WIDTH):
            raise InputError(f"The frames are not {HEIGHT} x {WIDTH}.")

    def parts(self, settings: EvalSettings, keys: Collection[str] | None, album: Album) -> list[Part]:
        count, rounds = settings.num_samples, settings.rounds
        cases = [case(column) for column in range(count)]

        def rollout(index: int) -> list[Case]:
            return [case(index + FRAMES * number) for number in range(rounds)]

        return [
            Part(
                "action_following/all",
                count,
                lambda s: action_following(s, cases, judge, 0, "All columns", album),
            ),
            Part("rollouts", count, lambda s: rollouts(s, rollout, judge, count, rounds, 0, album)),
        ]

    def session_inputs(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, list[Action]]:
        return frame(0), [Action("step")] * count


class DotWorld(World):
    name = "dots"

    def documents(self, rng: np.random.Generator) -> Iterator[str]:
        return iter(["step"] * 1000)

    def eval_suite(self) -> DotSuite:
        return DotSuite()


class Dots:
    """Worlds whose dot moves on by one column a frame, or stays."""

    def __init__(self, columns: list[int], speed: int) -> None:
        self.columns, self.speed = columns, speed

    def step(self, actions: Sequence[Action]) -> np.ndarray:
        clips = [
            [frame(column + self.speed * (index + 1)) for index in range(FRAMES)] for column in self.columns
        ]
        self.columns = [column + self.speed * FRAMES for column in self.columns]
        return np.array(clips)


class DotSubject:
    """A model of dots that is right, or repeats its first frame."""

    def __init__(self, speed: int) -> None:
        self.speed = speed

    def open(self, images: np.ndarray, seeds: Sequence[int]) -> Dots:
        return Dots([int(image[3, :, 0].argmax()) for image in images], self.speed)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(worlds, "_CLASSES", dict(worlds._CLASSES))
    register_world("dots", DotWorld)
    yield
    get_world.cache_clear()


@pytest.mark.parametrize(("speed", "share"), [(1, 1), (0, 0)])
def test_a_registered_world_is_evaluated(speed: int, share: int, tmp_path: Path) -> None:
    suite = get_world("dots").eval_suite()
    assert suite is not None
    results = evaluate(DotSubject(speed), EvalSettings(num_samples=4, rounds=3), suite)
    following = results["figures"]["action_following"]["all"]
    assert following["strict"]["value"] == following["by_verb"]["step"]["strict"]["value"] == share
    assert [rate["value"] for rate in results["figures"]["rollouts"]["strict"]] == [share] * 3
    assert "Examples: All columns" in write_report(results, tmp_path / "report").read_text()
    assert "Only dots." in model_card([run_of(results)], "mine", suite.card)


def test_the_suite_is_that_of_the_models_world() -> None:
    config = WorldModelConfig(world="dots")
    with pytest.raises(InputError, match="8 x 12"):
        suite_of(config)
    for world in (None, "cubes"):
        with pytest.raises((InputError, ConfigError), match=str(world)):
            suite_of(replace(config, world=world))


def test_defaults_of_a_world_are_empty_or_errors() -> None:
    assert "dots" in world_names()
    world = get_world("dots")
    assert not world.label_words() and not world.start_images() and not world.targets_named("the red ball")
    with pytest.raises(ConfigError, match="dots"):
        world.start(np.random.default_rng(0))
    with pytest.raises(ConfigError, match="mine"):
        open_source("mine", DataConfig({"mine": SourceConfig("dots")}), WorldModelConfig())


def test_a_tokenizer_learns_from_all_worlds_of_a_config() -> None:
    config = TrainConfig(WorldModelConfig(world="dots"), data=DataConfig({"shapes": SourceConfig("shapes")}))
    texts = list(documents(config, 100))
    assert texts[:50] == ["step"] * 50
    assert len(texts) == 100 and "step" not in texts[50:]
