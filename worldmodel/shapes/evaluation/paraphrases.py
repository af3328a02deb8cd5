"""Sentences from outside the grammar, as cases; their truth is the simulation of the act that they mean."""

import importlib.resources
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import yaml

from worldmodel import shapes
from worldmodel.eval.judge import Case
from worldmodel.shapes import COLOURS, DIRECTIONS, Act, Scene, SceneObject
from worldmodel.shapes.evaluation.cases import case_of
from worldmodel.shapes.relations import relations
from worldmodel.shapes.wordings import SIDES, WARDS, with_articles

SPLIT = "paraphrases"
KNOWN, UNSEEN, NOTHING, LANGUAGES = "known words", "unseen words", "nothing", "other languages"
"""Groups of kinds; the kinds of `KNOWN` name objects by words of the grammar."""
GROUPS = (KNOWN, UNSEEN, LANGUAGES, NOTHING)


@dataclass(frozen=True, slots=True)
class Template:
    """A sentence with placeholders; see paraphrases.yaml.

    Attributes:
        kind: Kind of sentence.
        verb: One of `shapes.VERBS`, or "move" for any of the directions.
        text: The sentence.
        language: Key of `languages`; None for English.
    """

    kind: str
    verb: str
    text: str
    language: str | None = None

    @property
    def verbs(self) -> tuple[str, ...]:
        """The verbs of the world that the template is for."""
        return tuple(DIRECTIONS) if self.verb == "move" else (self.verb,)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds under which its cases count, the group first."""
        return (self.kind,) if self.kind in GROUPS else (KNOWN, self.kind)


@lru_cache(maxsize=1)
def _file() -> dict[str, Any]:
    folder = importlib.resources.files("worldmodel.shapes.evaluation")
    return yaml.safe_load(folder.joinpath("paraphrases.yaml").read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def templates() -> tuple[Template, ...]:
    """Return all templates."""
    found: list[Template] = []
    for kind, group in _file()["kinds"].items():
        for key, listed in group.items():
            if kind == LANGUAGES:
                found += [Template(kind, verb, text, key) for verb, text in listed]
            else:
                found += [Template(kind, key, text) for text in listed]
    return tuple(found)


def kinds() -> tuple[str, ...]:
    """Return the names of all kinds and of `KNOWN`, in the order of tables."""
    return tuple(dict.fromkeys(kind for template in templates() for kind in template.kinds))


def paraphrase_cases(seed: int, count: int) -> list[Case]:
    """Return cases whose acts are held-out combinations, so that neither words nor acts occur in training.

    The first cases use every template once, in an order drawn by the seed; later ones repeat the templates in
    other scenes. Case `i` does not depend on `count`.
    """
    order = np.random.default_rng(seed).permutation(len(templates())).tolist()
    waiting = {index: templates()[order[index % len(order)]] for index in range(count)}
    found: dict[int, Case] = {}
    sample_index = 0
    while waiting:
        clip = shapes.sample_clip("held-out", seed, sample_index).clip
        sample_index += 1
        act = clip.plan.acts[0]
        for index, template in waiting.items():
            if template.verb == "stay" or act.verb in template.verbs:
                rng = np.random.default_rng((seed, index))
                text = sentence(template, clip.before, act, rng)
                if text is not None:
                    found[index] = _case(template, clip, text)
                    del waiting[index]
                    break
    return [found[index] for index in range(count)]


def sentence(template: Template, scene: Scene, act: Act, rng: np.random.Generator) -> str | None:
    """Fill a template's placeholders; None where no relation singles the object out.

    Args:
        template: The template.
        scene: Where the act is done.
        act: The act that the sentence asks for; for the verb stay any act, whose object is mentioned.
        rng: Source of the choice of words.
    """
    obj = scene.find(act.target_colour or "")
    if obj is None and "{o}" in template.text:
        if template.verb != "stay" or not scene.objects:
            return None
        obj = scene.objects[int(rng.integers(len(scene.objects)))]
    if template.language is not None:
        return _foreign(template, act)
    word = _synonyms(rng) if template.kind == UNSEEN else str
    references = relations(scene, obj) if template.kind == "relations" and obj else []
    if template.kind == "relations" and not references:
        return None
    way = act.deed if act.deed in DIRECTIONS else "left"
    text = template.text.format(
        o=references[int(rng.integers(len(references)))] if references else _reference(obj, word),
        c=word(act.argument) if act.argument in COLOURS else "",
        n=_newcomer(act, word) if act.verb == "appear" else "",
        z=act.argument,
        way=way,
        ward=WARDS[way],
        side=SIDES[way],
    )
    return with_articles(text)


def _reference(obj: SceneObject | None, word: Callable[[str], str]) -> str:
    return "" if obj is None else f"the {word(obj.colour)} {word(obj.shape)}"


def _newcomer(act: Act, word: Callable[[str], str]) -> str:
    return " ".join(word(part) for part in (act.target_size, act.target_colour, act.target_shape) if part)


def _synonyms(rng: np.random.Generator) -> Callable[[str], str]:
    words = _file()["words"]
    return lambda known: words[known][int(rng.integers(len(words[known])))]


def _foreign(template: Template, act: Act) -> str:
    language = _file()["languages"][template.language]
    colours = dict(zip(COLOURS, language["colours"], strict=True))
    sides = dict(zip(DIRECTIONS, language["sides"], strict=True))
    return template.text.format(
        o=language["object"].format(colour=colours[act.target_colour or ""]),
        c=colours.get(act.argument or "", ""),
        side=sides.get(act.deed, ""),
    )


def _case(template: Template, clip: shapes.Clip, text: str) -> Case:
    plan = shapes.STAY if template.verb == "stay" else clip.plan
    case = case_of(shapes.Sample(text, shapes.simulate(clip.before, plan)))
    return replace(case, kinds=template.kinds)
