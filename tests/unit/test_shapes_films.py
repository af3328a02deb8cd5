"""Films of the shapes world: what moved in them goes on, and only a model that remembers them is right."""

from collections.abc import Sequence

import numpy as np
import pytest

from worldmodel import shapes
from worldmodel.actions import Action
from worldmodel.eval.runner import Worlds
from worldmodel.shapes.evaluation.cases import case_of, judge_frame
from worldmodel.shapes.evaluation.films import film_continuations
from worldmodel.shapes.films import MAX_FILM_ROUNDS, sample_film_pair, sample_film_rollout
from worldmodel.shapes.source import ShapesSource

SEED = 5
FILMS = range(1, MAX_FILM_ROUNDS + 1)


def steps(samples: Sequence[shapes.Sample]) -> list[list[tuple[int, int]]]:
    """How far every object moves in each sample."""
    return [
        [
            (after.x - before.x, after.y - before.y)
            for before, after in zip(each.clip.before.objects, each.clip.after.objects, strict=True)
        ]
        for each in samples
    ]


@pytest.mark.parametrize("observed", FILMS)
def test_films_of_a_pair_end_alike_and_go_on_differently(observed: int) -> None:
    for index in range(30):
        pair = sample_film_pair(SEED, index, observed)
        ends = [film[-1].clip.first_frame for film in pair]
        assert np.array_equal(*ends)
        assert not np.array_equal(*(film[0].clip.first_frame for film in pair))
        truths = [case_of(film[-1]).truths[-1] for film in pair]
        for film, truth in zip(pair, truths, strict=True):
            assert len(film) == observed + 1 and not any(each.text for each in film)
            moved = steps(film)
            assert all(each == moved[0] for each in moved)
            assert sum(step != (0, 0) for step in moved[0]) == 1
            assert judge_frame(film[-1].clip.frames[-1], truth).strict
            assert not judge_frame(ends[0], truth).named
        assert not judge_frame(pair[0][-1].clip.frames[-1], truths[1]).named


def test_rollouts_begin_with_a_film_and_are_those_of_their_seed() -> None:
    lengths, still = set(), 0
    for index in range(60):
        samples, observed = sample_film_rollout(SEED, index, 4)
        again, _ = sample_film_rollout(SEED, index, 4)
        assert [each.text for each in samples] == [each.text for each in again]
        assert np.array_equal(samples[-1].clip.frames, again[-1].clip.frames)
        assert len(samples) == 4 and not any(each.text for each in samples[:observed])
        assert all(each.text for each in samples[observed + 1 :])
        moved = steps(samples[: observed + 1])
        assert all(each == moved[0] for each in moved)
        still += not np.any(moved)
        lengths.add(observed)
    assert lengths == set(FILMS) and 0 < still < 30
    assert sample_film_rollout(SEED, 0, 1)[1] == 0


def test_episodes_say_which_rounds_were_observed() -> None:
    source = ShapesSource("films")
    for index in range(10):
        episode = source.episode("rounds", SEED, index, 4)
        samples, observed = sample_film_rollout(SEED, index, 4)
        assert episode.observed == observed >= 1
        assert episode.actions[:observed] == (Action(),) * observed
        assert episode.labels is not None and set(episode.labels) == {"words"}
        assert np.array_equal(episode.observations[-1], samples[-1].clip.frames)
    assert ShapesSource("memory").episode("rounds", SEED, 0, 4).observed == 0


class Continues:
    """The world itself in a model's place; an image without a film stays as it is."""

    def __init__(self, observed: int) -> None:
        self.observed = observed
        self.films = {
            film[0].clip.first_frame.tobytes(): film[-1].clip.frames
            for index in range(6)
            for film in sample_film_pair(SEED, index, observed)
        }

    def with_steps(self, num_inference_steps: int) -> "Continues":
        return self

    def open(
        self, starts: np.ndarray, seeds: Sequence[int], actions: Sequence[Sequence[Action]] = ()
    ) -> Worlds:
        if starts.ndim == 4:
            made = np.repeat(starts[:, None], shapes.FRAMES_PER_CLIP, axis=1)
        else:
            assert starts.shape[1] == 1 + self.observed * shapes.FRAMES_PER_CLIP
            made = np.stack([self.films[film[0].tobytes()] for film in starts])

        class Played:
            def step(self, actions: Sequence[Action]) -> np.ndarray:
                assert set(actions) == {Action()}
                return made

        return Played()


@pytest.mark.parametrize("observed", FILMS)
def test_a_model_that_sees_the_film_is_right_and_one_that_sees_its_end_is_not(observed: int) -> None:
    subject = Continues(observed)
    figures = film_continuations(subject, judge_frame, 12, SEED, film_rounds=[observed])  # type: ignore[arg-type]
    rates = figures[f"rounds of film: {observed}"]
    assert {name: (rate["value"], rate["n"]) for name, rate in rates.items()} == {
        "named": (1, 12),
        "strict": (1, 12),
        "pairs": (1, 6),
        "image_named": (0, 12),
    }
