"""Chance acts of the shapes world, and the figures of uncertain futures."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from worldmodel import shapes
from worldmodel.actions import Action
from worldmodel.eval.runner import Worlds
from worldmodel.eval.uncertainty import UncertainCase, matching_outcome, uncertain_futures
from worldmodel.shapes.chance import CHANCE_KINDS, draw_chance, sample_chance, sample_chance_rollout
from worldmodel.shapes.evaluation.cases import chance_cases, judge_frame
from worldmodel.shapes.source import ShapesSource

SEED = 5


@pytest.fixture(scope="module")
def cases() -> list[UncertainCase]:
    return chance_cases(SEED, 0, 30)


class Draws:
    """The world itself in a model's place: draws an outcome of every case, or shows their average."""

    def __init__(self, cases: Sequence[UncertainCase], average: bool = False) -> None:
        self.cases = {case.start.tobytes() + case.caption.encode(): case for case in cases}
        self.average = average

    def with_steps(self, num_inference_steps: int) -> "Draws":
        return self

    def open(self, images: np.ndarray, seeds: Sequence[int]) -> Worlds:
        subject = self

        class Played:
            def step(self, actions: Sequence[Action]) -> np.ndarray:
                rounds = zip(images, actions, seeds, strict=True)
                return np.stack([subject.play(image, action, seed) for image, action, seed in rounds])

        return Played()

    def play(self, image: np.ndarray, action: Action, seed: int) -> np.ndarray:
        outcomes = self.cases[image.tobytes() + str(action.text).encode()].outcomes
        probabilities = [outcome.probability for outcome in outcomes]
        if self.average:
            mean = np.tensordot(probabilities, np.stack([each.frames for each in outcomes]), axes=1)
            return mean.round().astype(np.uint8)
        return outcomes[int(np.random.default_rng(seed).choice(len(outcomes), p=probabilities))].frames


@pytest.mark.parametrize("kind", CHANCE_KINDS)
def test_outcomes_are_distinct_lawful_and_never_held_out(kind: str) -> None:
    found = 0
    for index in range(200):
        rng = np.random.default_rng((SEED, index))
        scene = shapes.random_scene(rng)
        chance = draw_chance(rng, scene, kind)
        if chance is None:
            continue
        found += 1
        assert 2 <= len(chance.plans) <= 4
        assert math.isclose(sum(chance.probabilities), 1)
        ends = [shapes.simulate(scene, plan).after for plan in chance.plans]
        for row, plan in enumerate(chance.plans):
            frame = shapes.render(ends[row])
            assert [shapes.judge(frame, end).strict for end in ends] == [
                row == each for each in range(len(ends))
            ]
            for act in plan.acts:
                target = scene.find(act.target_colour or "")
                shape = act.target_shape or (target.shape if target else "")
                assert not shapes.held_out(act.target_colour or "", shape, act.deed)
    assert found >= 5


def test_sentences_are_not_those_of_certain_acts() -> None:
    for index in range(100):
        with pytest.raises(ValueError, match=sample_chance(SEED, index)[1].text.split()[0]):
            shapes.parse(sample_chance(SEED, index)[1].text)


def test_training_draws_every_outcome_by_its_probability() -> None:
    """Equal acts in a rollout's first round differ by the draw alone."""
    expected, drawn = Counter[int](), Counter[int]()
    for index in range(1500):
        scene, chance = sample_chance(SEED, index)
        sample = sample_chance_rollout(SEED, index, 1)[0]
        assert (sample.clip.before, sample.text) == (scene, chance.text)
        if len(chance.plans) == 3:  # recolour: 1/2, 1/4, 1/4
            drawn[chance.plans.index(sample.clip.plan)] += 1
            expected.update({0: 2, 1: 1, 2: 1})
    total = drawn.total()
    assert total > 100
    for outcome in range(3):
        share = expected[outcome] / expected.total()
        assert abs(drawn[outcome] / total - share) < 3 * math.sqrt(share * (1 - share) / total)


def test_a_source_of_chance_acts_is_reproducible() -> None:
    source = ShapesSource("chance")
    first, again, other = (source.episode("rounds", SEED, index, rounds=3) for index in (4, 4, 5))
    assert [len(clip) for clip in first.observations] == [1, 8, 8, 8]
    assert all(np.array_equal(*pair) for pair in zip(first.observations, again.observations, strict=True))
    assert not np.array_equal(first.observations[1], other.observations[1])


@pytest.mark.slow
def test_the_world_itself_is_valid_and_covers_its_outcomes(cases: list[UncertainCase]) -> None:
    figures = uncertain_futures(Draws(cases), cases, cases[:10], judge_frame, SEED, steps=(1,))
    row, noise = figures["1 steps"], figures["baselines"]["sampling_noise"]["value"]
    assert (row["valid"]["value"], row["valid"]["n"]) == (1.0, 30)
    assert row["total_variation"]["n"] == 10
    assert 0 < noise < 0.12
    assert abs(row["total_variation"]["value"] - noise) < 0.05
    assert figures["baselines"]["copy_last_frame"]["value"] < 0.2


def test_an_average_of_the_outcomes_is_not_valid(cases: list[UncertainCase]) -> None:
    figures = uncertain_futures(Draws(cases, average=True), cases, cases[:3], judge_frame, SEED, steps=(0,))
    assert figures["0 steps"]["valid"]["value"] < 0.25
    assert figures["0 steps"]["total_variation"]["value"] > 0.75


def test_one_outcome_alone_covers_its_probability(cases: list[UncertainCase]) -> None:
    case = next(case for case in cases if case.kind == "recolour")

    class Always(Draws):
        def play(self, image: np.ndarray, action: Action, seed: int) -> np.ndarray:
            return case.outcomes[0].frames

    figures = uncertain_futures(Always([case]), [case], [case], judge_frame, SEED, steps=(1,))
    assert figures["1 steps"]["total_variation"]["value"] == pytest.approx(0.5)


def test_frames_of_two_outcomes_are_valid_at_the_end_only(cases: list[UncertainCase]) -> None:
    case = next(case for case in cases if case.kind == "wander")
    first, second = (outcome.frames for outcome in case.outcomes[:2])
    assert matching_outcome(case, first, judge_frame) == (0, True)
    assert matching_outcome(case, np.concatenate([first[:-1], second[-1:]]), judge_frame) == (1, False)
