"""The split `paraphrases`: its sentences, what they mean, and what frames show instead."""

import re
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from worldmodel import shapes
from worldmodel.eval.judge import Case
from worldmodel.shapes import Act, Plan, Scene, SceneObject, chance
from worldmodel.shapes.evaluation import paraphrases
from worldmodel.shapes.evaluation.recognition import recognise
from worldmodel.shapes.language import _PHRASES, _SHAPE_WORDS, _SIZE_WORDS
from worldmodel.shapes.relations import relations

SEED = 1234
TEMPLATES = paraphrases.templates()
KNOWN = {"other verbs", "politeness", "word order", "relations", "pronouns", "typos"}
KINDS = KNOWN | {"unseen words", "other languages", "nothing"}
LEMMAS = (
    *("move", "go", "slide", "shift", "push", "shove", "grow", "enlarge", "shrink", "turn", "become", "make"),
    *("paint", "change", "vanish", "disappear", "remove", "fade", "appear", "show", "create", "explode"),
    *("blow", "burst", "fall", "drop", "jump", "hop", "leap", "wait"),
)
IRREGULAR = "went|gone to|slid|grew|grown|shrank|shrunk|became|made|blew|blown|fell|fallen|leapt"
THINGS = "shape|object|figure|item|form|piece of|dot|thingy|block|cube|sphere|orb|disc|star"


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """One case of every template."""
    return paraphrases.paraphrase_cases(SEED, len(TEMPLATES))


def verb_phrases() -> list[re.Pattern[str]]:
    """The words of the grammar's phrases in their order, with anything in the place of nouns."""
    patterns = []
    for phrases in (*_PHRASES.values(), *chance._PHRASES.values()):
        for phrase in phrases:
            pieces = [re.escape(piece.strip()) for piece in re.split(r"\{\w\}", phrase) if piece.strip()]
            patterns.append(re.compile(r"\b" + r"\b.*\b".join(pieces) + r"\b"))
    return patterns


def test_no_sentence_has_a_verb_phrase_of_the_grammar(cases: list[Case]) -> None:
    phrases = verb_phrases()
    assert len(phrases) > 100
    for known in (
        "the red ball moves left",
        "put a small red ball at the top",
        "make the box bigger",
        "wait",
    ):
        assert any(phrase.search(known) for phrase in phrases), known
    for text in (case.caption for case in cases):
        assert [phrase.pattern for phrase in phrases if phrase.search(text.lower())] == [], text
        with pytest.raises(ValueError, match="not an action"):
            shapes.parse(text)


def test_no_sentence_inflects_a_verb_of_the_grammar(cases: list[Case]) -> None:
    said = " ".join(phrase for phrases in _PHRASES.values() for phrase in phrases)
    assert [lemma for lemma in LEMMAS if not re.search(rf"\b{lemma}", said)] == []
    endings = "|".join(
        rf"{lemma}(?:e?s|e?d|ing)?|{lemma.removesuffix('e')}ing|{lemma}{lemma[-1]}(?:ed|ing)"
        for lemma in LEMMAS
    )
    inflected = re.compile(rf"\b(?:{endings}|{IRREGULAR})\b")
    assert inflected.search("it is moving")
    assert [case.caption for case in cases if inflected.search(case.caption)] == []


def test_enough_templates_of_every_kind_and_verb() -> None:
    by_kind = Counter(template.kind for template in TEMPLATES)
    assert set(by_kind) == KINDS
    assert by_kind["other languages"] == 30
    assert len(TEMPLATES) - 30 >= 300
    by_verb = Counter(verb for template in TEMPLATES for verb in template.verbs)
    assert set(by_verb) == set(shapes.VERBS)
    assert min(by_verb.values()) >= 20
    assert len({(template.kind, template.verb, template.text) for template in TEMPLATES}) == len(TEMPLATES)


def test_known_kinds_use_nouns_of_the_grammar_and_unseen_ones_do_not(cases: list[Case]) -> None:
    unseen = {word for words in paraphrases._file()["words"].values() for word in words}
    grammar = {*shapes.COLOURS, *_SHAPE_WORDS, *_SIZE_WORDS, *" ".join(shapes.ZONES).split()}
    assert not unseen & grammar
    for case in cases:
        words = set(re.findall(r"[\w-]+", case.caption))
        if "unseen words" in case.kinds:
            assert len(words & unseen) >= 2, case.caption
            assert not words & {*shapes.COLOURS, *_SHAPE_WORDS}, case.caption
        elif KNOWN & set(case.kinds):
            assert not words & unseen, case.caption
            assert not re.search(rf"\b(?:{THINGS})s?\b", case.caption), case.caption
    for template in TEMPLATES:
        assert template.verb == "stay" or re.search(r"\{[on]\}", template.text), template


def test_sentences_fit_into_the_slot_of_any_tokenizer(cases: list[Case]) -> None:
    # No byte-level tokenizer makes more tokens than bytes; the default slot has 96.
    assert max(len(case.caption.encode()) for case in cases) <= 96


def test_acts_never_occur_in_training_and_are_those_meant(cases: list[Case]) -> None:
    templates = {template.text: template for template in TEMPLATES}
    assert len(templates) > 300
    for case in cases:
        scene, plan = case.before
        (act,) = plan.acts
        if "nothing" in case.kinds:
            assert plan == shapes.STAY
            assert (case.frames == case.start).all()
        else:
            obj = scene.find(act.target_colour or "")
            shape = act.target_shape if obj is None else obj.shape
            assert act.target_colour
            assert shape
            assert shapes.held_out(act.target_colour, shape, act.deed)
        assert (case.frames == shapes.simulate(scene, plan).frames).all()
        assert case.truths[-1].scene == shapes.simulate(scene, plan).scenes[-1]


def test_a_sentence_names_the_object_that_its_act_is_done_to(cases: list[Case]) -> None:
    for case in cases:
        scene, plan = case.before
        act = plan.acts[0]
        if set(case.kinds) & (KNOWN - {"relations"}) and act.verb != "appear":
            assert f"the {act.target_colour} {act.target_shape}" in case.caption
        if act.verb == "turn" and set(case.kinds) & KNOWN:
            assert re.search(rf"\b{act.argument}\b", case.caption)
        if act.deed in shapes.DIRECTIONS and set(case.kinds) & KNOWN:
            said = {"left": "left|west", "right": "right|east"}.get(act.deed)
            assert said is None or re.search(said, case.caption), case.caption
        if "relations" in case.kinds:
            references = [r for r in relations(scene, scene.find(act.target_colour)) if r in case.caption]
            assert references, case.caption


def test_cases_are_a_function_of_seed_and_index() -> None:
    few, many = (paraphrases.paraphrase_cases(SEED, count) for count in (8, 40))
    assert [case.caption for case in few] == [case.caption for case in many[:8]]
    assert all((one.start == other.start).all() for one, other in zip(few, many, strict=False))
    others = paraphrases.paraphrase_cases(SEED + 1, 8)
    assert [case.caption for case in few] != [case.caption for case in others]


def test_relations_single_one_object_out() -> None:
    for index in range(300):
        scene = shapes.random_scene(np.random.default_rng(index))
        names = [set(relations(scene, obj)) for obj in scene.objects]
        assert all(not first & second for first, second in combinations(names, 2))
    ball = SceneObject("red", "ball", "small", 10, 30)
    box = SceneObject("blue", "box", "large", 30, 32)
    cross = SceneObject("green", "cross", "large", 55, 40)
    scene = Scene("night", (ball, box, cross))
    assert set(relations(scene, ball)) == {
        *("the leftmost one", "the smallest one", "the one to the left of the box"),
    }
    assert "the one next to the ball" in relations(scene, box)
    assert "the one next to the cross" in relations(scene, box)
    assert relations(Scene("night", (ball,)), ball) == []


def test_frames_are_recognised_by_the_act_that_they_show(cases: list[Case]) -> None:
    for case in cases[:40]:
        asked, shown = recognise(case, case.frames)
        assert shown == asked, case.caption


def act_case(scene: Scene, plan: Plan) -> Case:
    clip = shapes.simulate(scene, plan)
    return paraphrases._case(paraphrases.Template("other verbs", plan.acts[0].verb, ""), clip, "")


def test_frames_that_show_something_else() -> None:
    ball = SceneObject("red", "ball", "medium", 32, 32)
    box = SceneObject("blue", "box", "small", 10, 54)
    scene = Scene("night", (ball, box))
    case = act_case(scene, Plan(((Act("left", "red"),),)))
    for verb in ("right", "up", "down", "grow", "shrink", "vanish", "explode", "fall", "jump"):
        frames = shapes.simulate(scene, Plan(((Act(verb, "red"),),))).frames
        assert recognise(case, frames) == ("left", verb)
    green = shapes.simulate(scene, Plan(((Act("turn", "red", argument="green"),),))).frames
    assert recognise(case, green) == ("left", "turn")
    still = np.repeat(case.start[None], len(case.frames), axis=0)
    assert recognise(case, still) == ("left", "nothing")
    wrong_object = shapes.simulate(scene, Plan(((Act("vanish", "blue"),),))).frames
    assert recognise(case, wrong_object) == ("left", "other")
    silence = act_case(scene, shapes.STAY)
    assert recognise(silence, still) == ("nothing", "nothing")
    assert recognise(silence, wrong_object) == ("nothing", "vanish")
    pushed = act_case(scene, Plan(((Act("push", "red", argument="up"),),)))
    assert recognise(pushed, pushed.frames) == ("up", "up")


def test_a_wall_in_the_way_is_no_other_act() -> None:
    """An act that would change nothing is never what frames show."""
    large = Scene(
        "night", (SceneObject("red", "box", "large", 9, 32), SceneObject("blue", "ball", "small", 40, 40))
    )
    case = act_case(large, Plan(((Act("right", "red"),),)))
    others = shapes.simulate(large, Plan(((Act("vanish", "blue"),),))).frames
    assert recognise(case, others) == ("right", "other")
