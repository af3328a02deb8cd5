"""Questions that only the earlier rounds of a world can answer.

What is hidden or out of view, and what happened, is in no pixel of the newest observation: a model has to
read the rounds that it predicted from. Statements about what is there now are among them, too, which a model
judges by yes or no: the goals of plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from worldmodel.shapes.controls import sample_away_rollout
from worldmodel.shapes.films import sample_film_rollout
from worldmodel.shapes.judge import find_objects
from worldmodel.shapes.language import canonical_text, statement
from worldmodel.shapes.memory import sample_memory_rollout
from worldmodel.shapes.physics import STAY
from worldmodel.shapes.sampling import Sample, sample_rollout
from worldmodel.shapes.scene import SceneObject

SPLIT = "recall"
KINDS = ("hidden", "out of view", "a film", "acts", "a goal")
NOTHING = "nothing"

_SPLIT_ID = 1600
"""Keeps the random streams apart from the other splits'."""
_AGO = ("in the last round", "one round before", "two rounds before", "three rounds before")


@dataclass(frozen=True)
class Recall:
    """Rounds, and a question after them.

    Attributes:
        samples: The rounds.
        observed: How many of them, at the beginning, are a film.
        prompt: The question.
        answer: Its answer.
    """

    samples: Sequence[Sample]
    observed: int
    prompt: str
    answer: str


def sample_recall(seed: int, index: int, rounds: int, kind: str | None = None) -> Recall:
    """Return rounds and a question about them; the same for the same arguments.

    Args:
        seed: Seed of the data set.
        index: Index in the data set.
        rounds: Number of rounds, 1 or more.
        kind: One of `KINDS`; in turn by index if not given.
    """
    kind = kind or KINDS[index % len(KINDS)]
    rng = np.random.default_rng((_SPLIT_ID, seed, index))
    if kind == "hidden":
        samples = sample_memory_rollout(seed, index, rounds + 2, rounds + 1)[:rounds]
        if rng.random() < 0.25:  # nothing is hidden in rounds of other acts
            samples = sample_rollout("single", seed, index, rounds)
            return Recall(samples, 0, "what is hidden", NOTHING)
        first = samples[0].clip
        (gone,) = (obj for obj in first.before.objects if first.after.find(obj.colour) is None)
        return Recall(samples, 0, "what is hidden", _name(gone))
    if kind == "out of view":
        samples = sample_away_rollout(seed, index, rounds + 1, rounds)[:rounds]
        last = samples[-1].clip
        seen = {found.colour for found in find_objects(last.frames[-1], last.after.background)}
        outside = [obj for obj in last.after.objects if obj.colour not in seen]
        if not outside:
            return Recall(samples, 0, "what is out of view", NOTHING)
        if rng.random() < 0.5:
            obj = outside[int(rng.integers(len(outside)))]
            return Recall(samples, 0, f"where is {_name(obj)}", _side(obj))
        return Recall(samples, 0, "what is out of view", " and ".join(map(_name, outside)))
    observed = 0
    if kind == "a film":
        samples, observed = sample_film_rollout(seed, index, rounds + 1)
        samples, observed = samples[:rounds], min(observed, rounds)
    else:
        samples = sample_rollout("single", seed, index, rounds)
    ago = int(rng.integers(min(rounds, len(_AGO))))
    if kind == "a goal":
        return Recall(samples, 0, *statement(samples[-1].clip.after, rng))
    plan = samples[-1 - ago].clip.plan
    happened = NOTHING if plan == STAY else canonical_text(plan)
    return Recall(samples, observed, f"what happened {_AGO[ago]}", happened)


def _name(obj: SceneObject) -> str:
    return f"the {obj.colour} {obj.shape}"


def _side(obj: SceneObject) -> str:
    """Return on which side of the view an object outside of it is."""
    ways = {"left": -obj.x, "right": obj.x - 63, "above": -obj.y, "below": obj.y - 63}
    return max(ways, key=lambda way: ways[way])
