"""The training split `wordings`: acts in many words, for backbones that know more words than the grammar."""

import importlib.resources
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import yaml

from worldmodel.shapes.physics import DIRECTIONS, STAY, Act, simulate
from worldmodel.shapes.relations import RelationWords, relations
from worldmodel.shapes.sampling import Sample, sample_clip, sample_plan
from worldmodel.shapes.scene import Scene, SceneObject

T = TypeVar("T")

SPLIT = "wordings"
SIDES = {"left": "the left", "right": "the right", "up": "the top", "down": "the bottom"}
WARDS = {"left": "leftwards", "right": "rightwards", "up": "upwards", "down": "downwards"}
_NOTHING_SHARE, _RELATION_SHARE, _SYNONYM_SHARE = 0.1, 0.25, 0.4
_REQUEST_SHARE, _FRAME_SHARE, _TYPO_SHARE = 0.5, 0.5, 0.06
_SPLIT_ID = 2000
"""Keeps the random streams apart from the streams of `sampling.SPLITS`."""


def sample_worded_rollout(seed: int, index: int, rounds: int, split: str = "single") -> list[Sample]:
    """Return consecutive samples with single acts in many words; in some, nothing is asked for.

    Args:
        seed: Seed of the data set.
        index: Index of the rollout in the data set.
        rounds: Number of samples; the first has the scene of `sample_clip(split, …)`.
        split: Where acts are from, single or arrivals.
    """
    rng = np.random.default_rng((_SPLIT_ID, seed, index))
    first = sample_clip(split, seed, index).clip
    scene, plan = first.before, first.plan
    samples: list[Sample] = []
    for _ in range(rounds):
        plan = STAY if rng.random() < _NOTHING_SHARE else plan or sample_plan(rng, scene, split)
        samples.append(Sample(sentence(plan.acts[0], scene, rng), simulate(scene, plan)))
        scene, plan = samples[-1].clip.after, None
    return samples


def sentence(act: Act, scene: Scene, rng: np.random.Generator) -> str:
    """Return one of many sentences for an act in a scene; for the verb stay, one that asks for nothing."""
    known = rng.random() >= _SYNONYM_SHARE
    word = (lambda word: word) if known else _synonym(rng)
    text = _nothing(scene, word, rng) if act.verb == "stay" else _request(act, scene, word, rng)
    return with_articles(_typo(text, rng) if rng.random() < _TYPO_SHARE else text)


def with_articles(text: str) -> str:
    """Return a text with "an" in place of "a" before vowels."""
    return re.sub(r"\ba (?=[aeiou])", "an ", text)


@lru_cache(maxsize=1)
def _file() -> dict[str, Any]:
    folder = importlib.resources.files("worldmodel.shapes")
    return yaml.safe_load(folder.joinpath("wordings.yaml").read_text(encoding="utf-8"))


def _request(act: Act, scene: Scene, word: Callable[[str], str], rng: np.random.Generator) -> str:
    obj = scene.find(act.target_colour or "")
    described = relations(scene, obj, _relation_words(rng)) if obj and rng.random() < _RELATION_SHARE else []
    name = _pick(described, rng) if described else _name(obj, word, rng)
    requested = rng.random() < _REQUEST_SHARE
    phrases = _file()["requests" if requested else "statements"]
    verbs = [act.verb, *(["move"] if act.verb in DIRECTIONS else [])]
    phrase = _pick([each for verb in verbs for each in phrases.get(verb, ())], rng)
    frame = "{x}"
    if rng.random() < _FRAME_SHARE:
        about = obj is not None and "{o}" in phrase and rng.random() < 0.25
        kind = "object_frames" if about else "request_frames" if requested else "statement_frames"
        frame = _pick(_file()[kind], rng)
    way = act.deed if act.deed in DIRECTIONS else "left"
    parts = [word(part) for part in (act.target_size, act.target_colour, act.target_shape) if part]
    x = phrase.format(
        o="it" if "{o}" in frame else name,
        c=word(act.argument) if act.verb == "turn" and act.argument else "",
        n=" ".join(parts),
        z=act.argument,
        way=way,
        ward=WARDS[way],
        side=SIDES[way],
    )
    return frame.format(o=name, x=x)


def _nothing(scene: Scene, word: Callable[[str], str], rng: np.random.Generator) -> str:
    parts = _file()
    if rng.random() < 0.4:
        return f"{_pick(parts['nothing_subjects'], rng)} {_pick(parts['nothing_predicates'], rng)}"
    obj = scene.objects[int(rng.integers(len(scene.objects)))] if scene.objects else None
    texts = [text for text in parts["nothing"] if obj or "{o}" not in text]
    return _pick(texts, rng).format(o=_name(obj, word, rng))


def _name(obj: SceneObject | None, word: Callable[[str], str], rng: np.random.Generator) -> str:
    if obj is None:
        return ""
    size = [word(obj.size)] if rng.random() < 0.1 else []
    shape = "one" if rng.random() < 0.1 else word(obj.shape)
    return " ".join(["the", *size, word(obj.colour), shape])


def _relation_words(rng: np.random.Generator) -> RelationWords:
    words = _file()["relations"]
    noun = _pick(words["nouns"], rng)

    def said(text: str) -> str:
        return text.format(k=noun)

    left, right, up, down = map(said, _pick(words["extremes"], rng))
    left_of, right_of, over, under = map(said, _pick(words["sides"], rng))
    biggest, smallest, near = (said(_pick(words[field], rng)) for field in ("biggest", "smallest", "near"))
    return RelationWords((left, right, up, down), (left_of, right_of, over, under), biggest, smallest, near)


def _synonym(rng: np.random.Generator) -> Callable[[str], str]:
    words = _file()["words"]
    return lambda known: _pick(words[known], rng)


def _typo(text: str, rng: np.random.Generator) -> str:
    """Exchange two neighbouring letters inside a word, or leave one out."""
    inside = [match.start() + 1 for match in re.finditer(r"(?<=\w)\w(?=\w)", text)]
    if not inside:
        return text
    at = _pick(inside, rng)
    swapped = text[at] + text[at - 1] if rng.random() < 0.5 else text[at]
    return text[: at - 1] + swapped + text[at + 1 :]


def _pick(choices: Sequence[T], rng: np.random.Generator) -> T:
    return choices[int(rng.integers(len(choices)))]
