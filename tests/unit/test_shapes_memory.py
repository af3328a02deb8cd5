"""Objects of the shapes world that are hidden and come back rounds later."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from worldmodel import shapes
from worldmodel.actions import Action
from worldmodel.errors import ConfigError
from worldmodel.eval.runner import Worlds
from worldmodel.shapes.evaluation.cases import case_of, judge_frame
from worldmodel.shapes.evaluation.memory import hidden_objects
from worldmodel.shapes.memory import MAX_HIDDEN_ROUNDS, sample_memory_rollout
from worldmodel.shapes.source import ShapesSource

SEED = 5


@pytest.mark.parametrize("hidden", [1, 4, MAX_HIDDEN_ROUNDS])
def test_a_hidden_object_comes_back_as_it_was(hidden: int) -> None:
    for index in range(30):
        samples = sample_memory_rollout(SEED, index, hidden + 1, hidden)
        first, last = samples[0].clip, samples[-1].clip
        (colour,) = {obj.colour for obj in first.before.objects} - {obj.colour for obj in first.after.objects}
        assert colour in samples[0].text
        assert colour in samples[-1].text
        for sample in samples[1:]:
            before = shapes.find_objects(sample.clip.first_frame, first.before.background)
            assert colour not in {found.colour for found in before}
        assert last.after.find(colour) == first.before.find(colour)
        for earlier, later in pairwise(samples):
            assert later.clip.before == earlier.clip.after
        for sample in samples:
            assert judge_frame(sample.clip.frames[-1], case_of(sample).truths[-1]).strict
        assert not judge_frame(last.first_frame, case_of(samples[-1]).truths[-1]).named


def test_rollouts_are_those_of_their_seed_and_hide_for_any_time() -> None:
    again = [sample_memory_rollout(SEED, 3, 6) for _ in range(2)]
    assert [each.text for each in again[0]] == [each.text for each in again[1]]
    assert np.array_equal(again[0][-1].clip.frames, again[1][-1].clip.frames)
    durations = set()
    for index in range(60):
        counts = [len(each.clip.after.objects) for each in sample_memory_rollout(SEED, index, 10)]
        texts = [each.text for each in sample_memory_rollout(SEED, index, 10)]
        hide = next(i for i, text in enumerate(texts) if "hide" in text or "invisible" in text)
        show = next(i for i, text in enumerate(texts) if "again" in text or "back" in text)
        durations.add(show - hide)
        assert max(counts) <= 4
    assert durations == set(range(1, MAX_HIDDEN_ROUNDS + 1))
    with pytest.raises(ValueError, match="hidden_rounds"):
        sample_memory_rollout(SEED, 0, 4, 4)


def test_episodes_continue_from_their_own_clips() -> None:
    episode = ShapesSource("memory").episode("rounds", SEED, 2, 5)
    samples = sample_memory_rollout(SEED, 2, 5)
    assert len(episode.observations) == 6
    assert [len(clip) for clip in episode.observations] == [1, 8, 8, 8, 8, 8]
    assert np.array_equal(episode.observations[-1], samples[-1].clip.frames)
    with pytest.raises(ConfigError, match="memory"):
        ShapesSource("memories")


class Remembers:
    """The world itself in a model's place; begun in the middle of a rollout, it repeats its frame."""

    def __init__(self, count: int, hidden: int) -> None:
        rollouts = [sample_memory_rollout(SEED, index, hidden + 1, hidden) for index in range(count)]
        self.clips = {
            each[0].clip.first_frame.tobytes(): [one.clip.frames for one in each] for each in rollouts
        }

    def with_steps(self, num_inference_steps: int) -> "Remembers":
        return self

    def open(
        self, images: np.ndarray, seeds: Sequence[int], actions: Sequence[Sequence[Action]] = ()
    ) -> Worlds:
        known = [self.clips.get(image.tobytes()) for image in images]

        class Played:
            number = 0

            def step(self, actions: Sequence[Action]) -> np.ndarray:
                self.number += 1
                still = np.repeat(images[:, None], shapes.FRAMES_PER_CLIP, axis=1)
                rows = zip(known, still, strict=True)
                return np.stack([own[self.number - 1] if own else copy for own, copy in rows])

        return Played()


def test_a_model_that_remembers_is_right_and_one_that_forgets_is_not() -> None:
    hidden = 4
    figures = hidden_objects(Remembers(12, hidden), judge_frame, 12, SEED, hidden_rounds=[hidden])  # type: ignore[arg-type]
    rates = figures[f"rounds hidden: {hidden}"]
    assert rates["named"]["value"] == rates["strict"]["value"] == 1
    assert rates["forgotten_named"]["value"] == 0
    assert rates["hidden"]["value"] == 1
    assert rates["named"]["n"] == 12


def test_a_model_that_ignores_the_acts_is_never_right() -> None:
    still = Remembers(0, 1)  # knows no rollout, so it repeats every frame
    figures = hidden_objects(still, judge_frame, 12, SEED, hidden_rounds=[1])  # type: ignore[arg-type]
    assert {name: rate["value"] for name, rate in figures["rounds hidden: 1"].items()} == {
        "hidden": 0,
        "named": 0,
        "strict": 0,
        "forgotten_named": 0,
    }
