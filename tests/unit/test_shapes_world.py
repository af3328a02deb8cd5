"""The shapes world: physics, sentences and captions, sampling, and the judge."""

import hashlib
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldmodel.shapes import (
    BACKGROUNDS,
    COLOURS,
    FRAMES_PER_CLIP,
    SHAPES,
    SIZES,
    SPLITS,
    STAY,
    Act,
    Plan,
    Sample,
    Scene,
    SceneObject,
    backdrop,
    canonical_text,
    caption,
    documents,
    find_objects,
    judge,
    parse,
    parse_caption,
    question,
    random_scene,
    render,
    sample_clip,
    sample_plan,
    sample_rollout,
    simulate,
    zone_of,
    zone_scene,
)
from worldmodel.shapes.language import plan_to_text
from worldmodel.shapes.physics import VERBS
from worldmodel.shapes.sampling import held_out
from worldmodel.shapes.scene import FRAME_SIZE, PALETTE, ZONES, apart, half_side_of, zone_center

SEEDS = st.integers(0, 2**31 - 1)


@cache
def clips(split: str, count: int = 300) -> tuple[Sample, ...]:
    return tuple(sample_clip(split, 7, index) for index in range(count))


def assert_sound(scene: Scene) -> None:
    solid = [obj for obj in scene.objects if not obj.transient]
    for obj in solid:
        half = half_side_of(obj)
        assert half <= min(obj.x, obj.y) and max(obj.x, obj.y) <= FRAME_SIZE - 1 - half
    assert all(apart(a, b) for index, a in enumerate(solid) for b in solid[:index])
    assert len({obj.colour for obj in solid}) == len(solid)


def only(scene: Scene) -> SceneObject:
    (obj,) = scene.objects
    return obj


def test_half_transparent_pixels_are_never_nearest_to_a_third_colour() -> None:
    palette = np.array(list(PALETTE.values()), float)
    for background in BACKGROUNDS:
        pixels = np.unique(backdrop(background).reshape(-1, 3), axis=0).astype(float)
        for own, colour in enumerate(palette):
            for share in (0.3, 0.4, 0.5, 0.6, 0.7):
                blend = share * colour + (1 - share) * pixels
                to_palette = np.linalg.norm(blend[:, None] - palette, axis=-1)
                allowed = np.minimum(to_palette[:, own], np.linalg.norm(blend - pixels, axis=-1))
                assert (allowed < np.delete(to_palette, own, axis=1).min(1)).all(), (background, COLOURS[own])


@pytest.mark.parametrize("split", SPLITS)
def test_samples_are_pure_functions_of_their_index(split: str) -> None:
    first, again, other = (sample_clip(split, 1, index) for index in (5, 5, 6))
    assert first.text == again.text and first.clip.scenes == again.clip.scenes
    assert first.clip.frames.tobytes() == again.clip.frames.tobytes()
    assert first.clip.frames.tobytes() != other.clip.frames.tobytes()
    assert first.clip.frames.shape == (FRAMES_PER_CLIP, 64, 64, 3) and first.clip.frames.dtype == np.uint8


def test_pixels_are_the_same_on_every_machine() -> None:
    scene = parse_caption("slate background, a small red ball at the top, a large blue box at the center")
    digest = hashlib.sha256()
    for text in (
        "the blue box explodes, then the red ball falls",
        "the red ball turns green and the blue box jumps, then a small white cross appears at the left",
        "the red ball grows and the blue box jumps",
    ):
        digest.update(simulate(scene, parse(text)).frames.tobytes())
    assert digest.hexdigest()[:16] == "330d5c853578175f"


@pytest.mark.parametrize("split", SPLITS)
def test_objects_stay_apart_inside_and_end_at_rest(split: str) -> None:
    for sample in clips(split):
        assert len(sample.clip.scenes) == FRAMES_PER_CLIP
        for scene in (sample.clip.before, *sample.clip.scenes):
            assert_sound(scene)
        assert all(obj.at_rest for obj in sample.clip.scenes[-1].objects), sample.text
        assert np.array_equal(render(sample.clip.after), sample.clip.frames[-1]), sample.text


@given(SEEDS)
def test_crowded_scenes_stay_sound_whatever_is_done(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scene = random_scene(rng, 6)
    colours = [obj.colour for obj in scene.objects]
    acts = [Act(("grow", "left", "up", "fall", "right")[int(rng.integers(5))], c) for c in colours[:3]]
    for _ in range(4):
        clip = simulate(scene, Plan((tuple(acts),)))
        for truth in clip.scenes:
            assert_sound(truth)
        scene = clip.after


@pytest.mark.parametrize(
    ("verb", "expected"), [("left", (14, 30)), ("right", (46, 30)), ("up", (30, 14)), ("down", (30, 46))]
)
def test_moves_go_sixteen_pixels(verb: str, expected: tuple[int, int]) -> None:
    clip = simulate(
        Scene("night", (SceneObject("red", "ball", "small", 30, 30),)), Plan(((Act(verb, "red"),),))
    )
    assert (only(clip.after).x, only(clip.after).y) == expected
    steps = [abs(only(scene).x - 30) + abs(only(scene).y - 30) for scene in clip.scenes]
    assert steps == [2, 4, 6, 8, 10, 12, 14, 16]


def test_a_wall_stops_what_is_pushed_and_then_the_pusher() -> None:
    scene = Scene(
        "night", (SceneObject("red", "ball", "small", 30, 30), SceneObject("blue", "box", "small", 15, 30))
    )
    after = simulate(scene, parse("push the red ball left")).after
    red, blue = after.find("red"), after.find("blue")
    assert red is not None and blue is not None
    assert blue.x == 5 and red.x == 5 + 5 + 5 + 1


def test_objects_fall_onto_objects_below() -> None:
    scene = Scene(
        "dusk", (SceneObject("red", "ball", "small", 30, 10), SceneObject("blue", "box", "small", 30, 50))
    )
    clip = simulate(scene, parse("the red ball falls"))
    red = clip.after.find("red")
    assert red is not None and red.y == 50 - 11
    assert clip.scenes[-1] == clip.scenes[-2]


def test_a_jump_ends_where_it_began_and_stays_below_the_ceiling() -> None:
    scene = Scene("slate", (SceneObject("white", "cross", "medium", 30, 16),))
    clip = simulate(scene, parse("the white cross jumps"))
    assert clip.after == scene
    lifts = [only(truth).lift for truth in clip.scenes]
    assert max(lifts) == 7 and lifts[-1] == 0


def test_growing_pushes_neighbours_and_stays_in_the_frame() -> None:
    scene = Scene(
        "forest", (SceneObject("red", "box", "medium", 7, 30), SceneObject("blue", "box", "medium", 22, 30))
    )
    after = simulate(scene, parse("the red box grows")).after
    red, blue = after.find("red"), after.find("blue")
    assert red is not None and blue is not None
    assert red.size == "large" and red.x == 9 and blue.x == 9 + 9 + 7 + 1


@pytest.mark.parametrize("verb", ["vanish", "explode"])
@pytest.mark.parametrize("stages", [1, 2])
def test_leaving_objects_are_gone_at_the_end(verb: str, stages: int) -> None:
    scene = Scene(
        "forest", (SceneObject("red", "box", "medium", 30, 30), SceneObject("blue", "box", "small", 8, 8))
    )
    plan = Plan(((Act(verb, "red"),), (Act("right", "blue"),))[:stages])
    clip = simulate(scene, plan)
    assert clip.scenes[0].find("red") is not None and clip.after.find("red") is None
    if stages == 1:
        assert clip.scenes[6].find("red") is None and np.array_equal(clip.frames[6], clip.frames[7])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("the blue ball moves left", "blue"),
        ("the red box moves left", "box"),
        ("the large red ball moves left", "large"),
        ("the red ball turns red", "red"),
        ("a small red box appears at the top", "red"),
        ("the red ball moves left and the red ball grows", "red"),
        ("the red ball sings", "the red ball sings"),
        ("", "''"),
    ],
)
def test_impossible_sentences_name_the_wrong_value(text: str, value: str) -> None:
    with pytest.raises(ValueError, match=value):
        simulate(Scene("night", (SceneObject("red", "ball", "small", 30, 30),)), parse(text))


@pytest.mark.parametrize("split", SPLITS)
def test_sentences_parse_to_their_plans(split: str) -> None:
    for sample in clips(split):
        assert set(sample.text) <= set("abcdefghijklmnopqrstuvwxyz ,")
        again = simulate(sample.clip.before, parse(sample.text))
        assert again.frames.tobytes() == sample.clip.frames.tobytes(), sample.text


@given(SEEDS, st.sampled_from(SPLITS))
def test_every_phrasing_and_the_canonical_one_play_the_same(seed: int, split: str) -> None:
    rng = np.random.default_rng(seed)
    scene = random_scene(rng)
    plan = sample_plan(rng, scene, split)
    texts = {plan_to_text(plan, scene, rng) for _ in range(8)} | {canonical_text(plan)}
    expected = simulate(scene, plan).scenes
    assert all(simulate(scene, parse(text)).scenes == expected for text in texts)
    assert canonical_text(parse(canonical_text(plan))) == canonical_text(plan)


def test_phrasings_vary() -> None:
    rng = np.random.default_rng(0)
    scene = Scene("night", (SceneObject("red", "ball", "small", 30, 30),))
    texts = {plan_to_text(parse("the red ball moves left"), scene, rng) for _ in range(300)}
    assert {"the red ball moves left", "the red one moves left"} <= texts and len(texts) > 15
    assert canonical_text(parse("push the red ball left")) == "the red ball moves left"
    assert canonical_text(STAY) == "nothing happens"


@given(SEEDS)
def test_captions_of_zone_scenes_read_back_exactly(seed: int) -> None:
    scene = zone_scene(np.random.default_rng(seed))
    again = parse_caption(caption(scene))
    assert_sound(scene)
    assert again.background == scene.background and set(again.objects) == set(scene.objects)
    assert caption(again) == caption(scene)


def test_empty_captions_and_wrong_ones() -> None:
    assert parse_caption(caption(Scene("dusk"))) == Scene("dusk")
    wrong = {
        "beach background": "beach",
        "night background, a small red ball at the roof": "roof",
        "hello": "hello",
    }
    for text, value in wrong.items():
        with pytest.raises(ValueError, match=value):
            parse_caption(text)
    with pytest.raises(ValueError, match="red"):
        parse_caption("night background, a small red ball at the top, a large red box at the left")


def test_zones_contain_their_centres() -> None:
    assert [zone_of(*zone_center(zone)) for zone in ZONES] == list(ZONES)
    with pytest.raises(ValueError, match="middle"):
        zone_center("middle")


@given(SEEDS)
def test_questions_have_short_true_answers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scene = random_scene(rng)
    asked, answer = question(scene, rng)
    numbers = ("zero", "one", "two", "three", "four")
    assert answer in {*numbers, *COLOURS, *SHAPES, *SIZES, *ZONES, "yes", "no"}
    if asked == "how many things are there":
        assert answer == numbers[len(scene.objects)]


def test_held_out_triples_are_an_eighth_and_never_shown_in_training() -> None:
    triples = [(c, s, v) for c in COLOURS for s in SHAPES for v in VERBS if v not in ("stay", "push")]
    assert 0.09 < np.mean([held_out(*triple) for triple in triples]) < 0.16
    for split in SPLITS:
        wanted = split == "held-out"
        for sample in clips(split):
            for act in sample.clip.plan.acts:
                if act.target_colour is not None and act.target_shape is not None:
                    assert held_out(act.target_colour, act.target_shape, act.deed) == wanted


def test_splits_have_the_plans_they_promise() -> None:
    train = [sample.clip.plan for sample in clips("train", 1000)]
    assert all(len(sample.clip.plan.acts) == 2 for sample in clips("compositions"))
    for split in ("held-out", "single"):
        assert all(len(sample.clip.plan.acts) == 1 for sample in clips(split))
    assert 0.5 < np.mean([len(plan.acts) == 1 for plan in train]) < 0.68
    verbs = [act.verb for plan in train for act in plan.acts]
    assert all(verbs.count(verb) > 0.04 * len(verbs) for verb in VERBS if verb != "stay")
    texts = {split: {(s.text, s.clip.before) for s in clips(split)} for split in ("train", "val")}
    assert not texts["train"] & texts["val"]
    with pytest.raises(ValueError, match="test"):
        sample_clip("test", 0, 0)


def test_rollouts_chain_and_begin_with_the_sample() -> None:
    for index in range(10):
        rollout = sample_rollout("train", 3, index, 10)
        assert rollout[0].text == sample_clip("train", 3, index).text
        for one, following in pairwise(rollout):
            assert following.clip.before == one.clip.after
            assert judge(following.clip.first_frame, one.clip.after).strict


def test_documents_are_plain_and_read_back() -> None:
    stream = documents(np.random.default_rng(0))
    for _ in range(40):
        described, texts, asked, paraphrase = (next(stream) for _ in range(4))
        state, text, after = texts.split(" | ")
        assert state == described == asked.split(" | ")[0] and parse_caption(after)
        assert canonical_text(parse(paraphrase.split(" | ")[1])) and parse(text)


@pytest.mark.parametrize("split", SPLITS)
def test_the_judge_passes_the_truth_and_fails_a_copy_of_the_start(split: str) -> None:
    passed, fooled, changing = 0, 0, 0
    for sample in clips(split):
        clip = sample.clip
        verdict = judge(clip.frames[-1], clip.after)
        passed += verdict.strict
        assert not verdict.strict or (verdict.named_right(clip.plan) and verdict.others_right(clip.plan))
        if set(clip.before.objects) != set(clip.after.objects):
            changing += 1
            fooled += judge(clip.first_frame, clip.after).strict
    assert passed >= 0.99 * len(clips(split)) and changing > 200 and fooled <= 0.01 * changing


def test_the_judge_distinguishes_named_and_other_objects() -> None:
    red, blue = SceneObject("red", "ball", "medium", 20, 40), SceneObject("blue", "box", "large", 45, 20)
    plan = parse("the red ball moves left")
    truth = Scene("slate", (red, blue))

    def seen(*objects: SceneObject) -> tuple[bool, bool, bool]:
        verdict = judge(render(Scene("slate", objects)), truth)
        return verdict.strict, verdict.named_right(plan), verdict.others_right(plan)

    assert seen(red, blue) == (True, True, True)
    assert seen(blue) == (False, False, True)
    assert seen(red) == (False, True, False)
    assert seen(SceneObject("red", "ball", "medium", 24, 40), blue) == (False, True, True)
    assert seen(SceneObject("red", "ball", "medium", 26, 40), blue) == (False, False, True)
    assert seen(SceneObject("red", "box", "medium", 20, 40), blue) == (False, False, True)
    assert seen(SceneObject("red", "ball", "large", 20, 40), blue) == (False, False, True)
    assert seen(red, blue, SceneObject("green", "ball", "small", 20, 10)) == (False, True, False)


def test_removed_objects_must_be_absent() -> None:
    red, blue = SceneObject("red", "ball", "medium", 20, 40), SceneObject("blue", "box", "large", 45, 20)
    before = Scene("dusk", (red, blue))
    for text in ("the red ball explodes", "the red ball turns green"):
        plan = parse(text)
        verdict = judge(render(before), simulate(before, plan).after)
        assert not verdict.strict and not verdict.named_right(plan) and verdict.others_right(plan)


def test_what_changes_its_colour_may_look_like_others_on_the_way() -> None:
    others = [
        SceneObject(colour, "cross", "small", 10 + 14 * index, 50)
        for index, colour in enumerate(COLOURS[1:5])
    ]
    for old, new in ((old, new) for old in COLOURS[5:] for new in COLOURS[5:] if new != old):
        before = Scene("slate", (SceneObject(old, "box", "medium", 30, 20), *others))
        clip = simulate(before, parse(f"the {old} box turns {new}"))
        assert any(obj.previous_colour for scene in clip.scenes for obj in scene.objects)
        for frame, scene in zip(clip.frames, clip.scenes, strict=True):
            for colour in COLOURS:  # the same with any colour at its place
                painted = render(Scene("slate", (SceneObject(colour, "box", "medium", 30, 20), *others)))
                on_the_way = any(obj.previous_colour for obj in scene.objects)
                assert judge(frame, scene).strict
                assert judge(painted, scene).strict == (on_the_way or colour == new)
            astray = render(Scene("slate", (SceneObject("red", "ball", "small", 55, 10), *others)))
            assert not judge(astray, scene).strict


def test_the_judge_tolerates_noise_and_finds_every_object() -> None:
    rng = np.random.default_rng(0)
    for background in BACKGROUNDS:
        for shape in SHAPES:
            for size in SIZES:
                for colour in COLOURS:
                    frame = render(Scene(background, (SceneObject(colour, shape, size, 30, 33),)))
                    noisy = np.clip(frame + rng.normal(0, 8, frame.shape), 0, 255).astype(np.uint8)
                    (found,) = find_objects(noisy, background)
                    assert (found.colour, found.shape) == (colour, shape)
    with pytest.raises(ValueError, match="32"):
        find_objects(np.zeros((32, 32, 3), np.uint8), "night")
