"""The split `wordings`: its sentences, and that the split `paraphrases` shares none of its words."""

import re
from typing import Any

import numpy as np
import pytest

from worldmodel.shapes import STAY, VERBS, Sample, held_out, sample_clip, wordings
from worldmodel.shapes.evaluation import paraphrases
from worldmodel.shapes.relations import EVALUATED
from worldmodel.shapes.source import ShapesSource

FILE = wordings._file()
FUNCTION_WORDS = set(
    re.findall(
        r"\w+",
        "a all and as at away be down for from further get give have in into is it its me now of off on "
        "out over set so that the there to up way where with",
    )
)
GRAMMAR_WORDS = {"air", "bigger", "floor", "ground", "size", "smaller"}
"""Words of the grammar, or without which a verb cannot be said: they tell nothing by themselves."""


def stems(text: str) -> set[str]:
    words = re.findall(r"[a-z][a-z-]+", re.sub(r"\{\w+\}", " ", text.lower()))
    return {re.sub(r"(?<=\w{3})(?:e?s|e?d|ing|e)$", "", word) for word in words}


def relation_phrases(words: dict[str, list[Any]]) -> set[str]:
    fours = [phrase for field in ("extremes", "sides") for four in words[field] for phrase in four]
    return {*words["nouns"], *fours, *words["biggest"], *words["smallest"], *words["near"]}


def samples(count: int) -> list[Sample]:
    return [wordings.sample_worded_rollout(0, index, 1)[0] for index in range(count)]


def test_paraphrases_share_no_verb_noun_or_colour() -> None:
    phrases = [text for kind in ("requests", "statements") for texts in FILE[kind].values() for text in texts]
    assert len(phrases) > 250
    taught = set().union(*map(stems, phrases))
    asked = [
        template
        for template in paraphrases.templates()
        if template.language is None and template.verb != "stay"
    ]
    known = set().union(*map(stems, FUNCTION_WORDS | GRAMMAR_WORDS))
    assert taught & set().union(*(stems(template.text) for template in asked)) <= known
    nouns = {word for words in FILE["words"].values() for word in words}
    assert nouns.isdisjoint(word for words in paraphrases._file()["words"].values() for word in words)
    spoken = set().union(*(map(stems, relation_phrases(FILE["relations"]))))
    evaluated = {*EVALUATED.extremes, *EVALUATED.sides, EVALUATED.biggest, EVALUATED.smallest, EVALUATED.near}
    assert spoken & set().union(*map(stems, evaluated)) <= known | {"left", "right", "one"}
    silent = {template.text for template in paraphrases.templates() if template.verb == "stay"}
    assert silent.isdisjoint(FILE["nothing"])


@pytest.mark.parametrize(
    "verb", [verb for verb in VERBS if verb not in ("left", "right", "up", "down", "stay")]
)
def test_every_verb_has_many_requests_and_statements(verb: str) -> None:
    assert len(FILE["requests"][verb]) >= 14
    assert len(FILE["statements"][verb]) >= 9


def test_sentences_name_the_object_and_what_is_done() -> None:
    found = samples(400)
    assert len({sample.text for sample in found}) > 380
    verbs = {sample.clip.plan.acts[0].verb for sample in found}
    assert verbs == set(VERBS)
    for sample in found:
        (act,) = sample.clip.plan.acts
        assert not re.search(r"[{}]|\bNone\b|\ba (?=[aeio])", sample.text), sample.text
        assert len(sample.text.encode()) <= 96, sample.text
        if act.verb != "stay":
            shape = act.target_shape or sample.clip.before.find(act.target_colour or "").shape  # pyright: ignore[reportOptionalMemberAccess]
            assert not held_out(str(act.target_colour), shape, act.deed)


def test_some_sentences_ask_for_nothing() -> None:
    found = samples(400)
    still = [sample for sample in found if sample.clip.plan == STAY]
    assert 0.05 < len(still) / len(found) < 0.2
    for sample in still:
        assert sample.clip.scenes[-1] == sample.clip.before


def test_samples_are_a_function_of_seed_and_index() -> None:
    (again, following), first = (
        wordings.sample_worded_rollout(3, 5, 2),
        wordings.sample_worded_rollout(3, 5, 1)[0],
    )
    assert again.text == first.text
    assert np.array_equal(again.clip.frames, first.clip.frames)
    assert following.clip.before == first.clip.after
    texts = [wordings.sample_worded_rollout(seed, 5, 1)[0].text for seed in (3, 4)]
    assert texts[0] != texts[1]


def test_the_source_offers_them() -> None:
    source = ShapesSource("wordings")
    episode = source.episode("rounds", 0, 7, rounds=2)
    expected = wordings.sample_worded_rollout(0, 7, 2)
    texts = [action.text for action in episode.actions]
    assert len(texts) == 2
    assert all(text in (sample.text, None) for text, sample in zip(texts, expected, strict=True))


def test_arrivals_are_told_in_the_grammar_and_in_many_words() -> None:
    source = ShapesSource("arrivals", keys=())
    told = [source.episode("rounds", 0, index).actions[0].text or "" for index in range(60)]
    samples = [sample_clip("arrivals", 0, index) for index in range(60)]
    arriving = [any(act.verb == "appear" for act in sample.clip.plan.acts) for sample in samples]
    assert sum(arriving) > 55  # a crowded scene has no room
    assert told[::2] == [sample.text for sample in samples[::2]]
    others = [text != sample.text for text, sample in zip(told, samples, strict=True)]
    assert sum(others[1::2]) > 25
    for sample in samples:
        for act in sample.clip.plan.acts:
            assert not held_out(act.target_colour or "", act.target_shape or "", act.deed)
