"""Films: observed rounds in which an object moves by itself, after which it goes on.

The last frame alone does not show where to, so only a model that remembers the rounds of the film knows it.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np

from worldmodel.shapes.language import plan_to_text
from worldmodel.shapes.physics import (
    DIRECTIONS,
    MOVE_DISTANCE,
    STAY,
    Act,
    Plan,
    advance,
    at_rest,
    simulate,
)
from worldmodel.shapes.sampling import Sample, held_out, sample_plan
from worldmodel.shapes.scene import (
    FRAME_SIZE,
    Scene,
    SceneObject,
    apart,
    half_side_of,
    random_scene,
)

SPLIT = "films"
MAX_FILM_ROUNDS = 2

_GOES_ON = ("", "", "{o} goes on", "{o} keeps going", "it goes on")
_SPLIT_ID, _PAIR_ID = 1200, 1300
"""Keep the random streams apart from the other splits'."""
_STILL_SHARE = 0.15


def sample_film_rollout(seed: int, index: int, rounds: int) -> tuple[list[Sample], int]:
    """Return consecutive samples and how many of them are the film.

    In the film an object moves, and in the round after it goes on; in some, nothing moves. Then single acts
    follow. The text of the film's rounds is empty, as is that of some rounds after it: the null action.

    Args:
        seed: Seed of the data set.
        index: Index of the rollout in the data set.
        rounds: Number of samples; with 1 there is no film.
    """
    rng = np.random.default_rng((_SPLIT_ID, seed, index))
    observed = min(int(rng.integers(1, MAX_FILM_ROUNDS + 1)), rounds - 1)
    if rng.random() < _STILL_SHARE:
        scene = random_scene(rng)
        samples = [Sample("", simulate(scene, STAY)) for _ in range(observed + 1)]
    else:
        ((way, obj, scene),) = _draw(rng, observed, 1)
        words = _GOES_ON[int(rng.integers(len(_GOES_ON)))].format(o=f"the {obj.colour} {obj.shape}")
        samples = _moving(scene, way, obj, [*[""] * observed, words])
    while len(samples) < rounds:
        scene = samples[-1].clip.after
        plan = sample_plan(rng, scene, "single")
        samples.append(Sample(plan_to_text(plan, scene, rng), simulate(scene, plan)))
    return samples, observed


def sample_film_pair(seed: int, index: int, observed: int) -> tuple[list[Sample], list[Sample]]:
    """Return two films with the same last frame, in which an object moves in different directions.

    Each has `observed` samples and one more, in which the object goes on.
    """
    rng = np.random.default_rng((_PAIR_ID, seed, index))
    first, second = (
        _moving(scene, way, obj, [""] * (observed + 1)) for way, obj, scene in _draw(rng, observed, 2)
    )
    return first, second


def _draw(rng: np.random.Generator, before: int, count: int) -> list[tuple[str, SceneObject, Scene]]:
    """Draw an object with room to come from `count` directions, in `before` rounds, and to go on in each.

    Returns:
        Direction, object and first scene of each film; their last scenes are equal.
    """
    while True:
        scene = random_scene(rng)
        obj = scene.objects[int(rng.integers(len(scene.objects)))]
        others = tuple(each for each in scene.objects if each is not obj)
        ways = [tuple(DIRECTIONS)[each] for each in rng.permutation(len(DIRECTIONS))[:count]]
        low, high = np.full(2, half_side_of(obj)), np.full(2, FRAME_SIZE - 1 - half_side_of(obj))
        for way in ways:
            step = MOVE_DISTANCE * np.array(DIRECTIONS[way])
            low = np.maximum(low, half_side_of(obj) + np.maximum(before * step, -step))
            high = np.minimum(high, FRAME_SIZE - 1 - half_side_of(obj) - np.maximum(-before * step, step))
        if (low > high).any():
            continue
        x, y = (int(each) for each in rng.integers(low, high, endpoint=True))
        films = []
        for way in ways:
            path = [
                Scene(scene.background, (*others, place))
                for place in _places(replace(obj, x=x, y=y), DIRECTIONS[way], before)
            ]
            if held_out(obj.colour, obj.shape, way) or not _is_free(path, _move(obj, way)):
                break
            films.append((way, obj, path[0]))
        else:
            return films


def _places(obj: SceneObject, step: tuple[int, int], before: int) -> list[SceneObject]:
    """Return the object `before` rounds ago, in each round since, now, and in the next round."""
    return [
        replace(obj, x=obj.x + n * MOVE_DISTANCE * step[0], y=obj.y + n * MOVE_DISTANCE * step[1])
        for n in range(-before, 2)
    ]


def _is_free(path: Sequence[Scene], plan: Plan) -> bool:
    """Return whether a plan leads from each scene to the next one, and nothing touches in the first."""
    if not all(apart(*pair) for pair in combinations(path[0].objects, 2)):
        return False
    return all(at_rest(advance(scene, plan)[-1]) == after for scene, after in pairwise(path))


def _moving(scene: Scene, way: str, obj: SceneObject, texts: Sequence[str]) -> list[Sample]:
    samples: list[Sample] = []
    for text in texts:
        samples.append(Sample(text, simulate(scene, _move(obj, way))))
        scene = samples[-1].clip.after
    return samples


def _move(obj: SceneObject, way: str) -> Plan:
    return Plan(((Act(way, obj.colour, obj.shape),),))
