"""A mouse, a vector and a camera in the shapes world, alone and together with words and keys."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from worldmodel import shapes
from worldmodel.actions import Action
from worldmodel.actions.words import say, understand
from worldmodel.config import ActionConfig
from worldmodel.eval.goals import measured
from worldmodel.eval.runner import Worlds
from worldmodel.shapes import Act, Clip, Controls, Plan, Scene, SceneObject
from worldmodel.shapes.controls import (
    KINDS,
    MAX_AWAY_ROUNDS,
    MAX_PUSH,
    action_of,
    sample_away_rollout,
    sample_controls_rollout,
    seen_action,
)
from worldmodel.shapes.evaluation.controls import camera_away, controlled, recognised, same_action
from worldmodel.shapes.evaluation.goals import GOALS
from worldmodel.shapes.physics import CameraMove, Drag, Push
from worldmodel.shapes.scene import MAX_ZOOM
from worldmodel.shapes.source import KEYS, ShapesSource

SEED = 5
TAKES = ActionConfig(
    keys=list(KEYS), mouse="drag", vector={"low": [-MAX_PUSH] * 2, "high": [MAX_PUSH] * 2}, camera=True
)
RED = SceneObject("red", "ball", "medium", 20, 30)
BLUE = SceneObject("blue", "box", "small", 50, 50)
SCENE = Scene("night", (RED, BLUE))
RIGHT = Plan(((Act("right", "red"),),))


def play(controls: Controls, scene: Scene = SCENE, plan: Plan = shapes.STAY) -> Clip:
    return shapes.simulate(scene, plan, controls)


def places(scene: Scene) -> dict[str, tuple[int, int]]:
    return {obj.colour: (obj.x, obj.y) for obj in scene.objects}


def test_a_drag_takes_what_is_under_the_pointer_along() -> None:
    clip = play(Controls(Drag(22, 33, 15, -7)))
    assert places(clip.after) == {"red": (36, 22), "blue": (50, 50)}  # by steps of 4 pixels
    steps = [scene.objects[0].x for scene in clip.scenes]
    assert steps == sorted(steps)
    assert max(b - a for a, b in pairwise(steps)) == 3  # evenly, and then at rest
    assert steps[5:] == [36, 36, 36]


@pytest.mark.parametrize("drag", [Drag(36, 10, 20, 0), Drag(0, 63, -9, 9), Drag(20, 39, 5, 5)])
def test_a_pointer_on_nothing_does_nothing(drag: Drag) -> None:
    assert play(Controls(drag)).after == SCENE


def test_what_is_dragged_pushes_others_and_stops_at_walls() -> None:
    assert play(Controls(Drag(20, 30, -60, 0))).after.objects[0].x == 7
    wide = Scene("night", (RED, replace(BLUE, x=36, y=30)))
    assert places(play(Controls(Drag(20, 30, 10, 0)), wide).after)["blue"][0] > 36


def test_a_push_moves_all_objects_or_that_of_a_colour() -> None:
    assert places(play(Controls(push=Push(5, -3))).after) == {"red": (24, 26), "blue": (54, 46)}
    assert places(play(Controls(push=Push(5, -3, "blue"))).after) == {"red": (20, 30), "blue": (54, 46)}
    # A wind moves touching objects together, and piles them up at the wall.
    pair = Scene("night", (replace(RED, x=30, y=50), BLUE))
    assert places(play(Controls(push=Push(4, 0)), pair).after) == {"red": (34, 50), "blue": (54, 50)}
    at_wall = play(Controls(push=Push(MAX_PUSH, 0)), pair).after
    assert shapes.judge(shapes.render(at_wall), at_wall).strict
    assert at_wall.objects[1].x == 58


def test_what_the_camera_left_comes_back_with_it() -> None:
    away = play(Controls(camera=CameraMove(right=40, up=-12)))
    assert places(away.after) == {"red": (-20, 18), "blue": (10, 38)}
    assert [obj.colour for obj in shapes.in_view(away.after)] == ["blue"]
    assert {found.colour for found in shapes.find_objects(away.frames[-1], "night")} == {"blue"}
    moved = play(Controls(), away.after, Plan(((Act("up", "blue"),),)))  # what is outside stays as it is
    back = play(Controls(camera=CameraMove(right=-40, up=12)), moved.after).after
    assert places(back) == {"red": (20, 30), "blue": (50, 34)}


def test_the_camera_magnifies_between_its_limits_and_keeps_what_is_there() -> None:
    near = play(Controls(camera=CameraMove(forward=3))).after
    assert near.zoom == MAX_ZOOM
    assert shapes.as_seen(near).objects[0].radius == pytest.approx(1.5 * 7.5)
    dragged = play(Controls(Drag(14, 30, 12, 0)), near).after  # 12 pixels of the picture
    assert dragged.objects[0].x == RED.x + 8
    assert play(Controls(camera=CameraMove(forward=-3)), dragged).after.zoom == 1
    beyond = play(Controls(camera=CameraMove(right=500))).after
    assert np.array_equal(shapes.render(beyond), shapes.backdrop("night"))


@pytest.mark.parametrize(
    ("controls", "plan", "said"),
    [
        (Controls(Drag(22, 33, 15, -7)), shapes.STAY, "keys red; vector 16 -8"),
        (Controls(Drag(0, 63, 9, 9)), shapes.STAY, "nothing happens"),
        (Controls(push=Push(-5, 0)), shapes.STAY, "vector -4 0"),
        (Controls(push=Push(0, -8, "blue")), shapes.STAY, "keys blue; vector 0 -8"),
        (Controls(camera=CameraMove(8, 4)), RIGHT, "the red one moves right; camera 0.125 0.0625 0 0 0 0 1"),
        (Controls(camera=CameraMove(forward=0.585)), shapes.STAY, "camera 0 0 0.585 0 0 0 1"),
    ],
)
def test_a_clip_tells_an_action_that_leads_to_it(controls: Controls, plan: Plan, said: str) -> None:
    seen = seen_action(play(controls, plan=plan))
    assert say(seen) == said
    assert same_action(understand(said, TAKES), seen)
    for number in ("-8", "16", "0.125", "-4"):
        if number in said:
            assert not same_action(understand(said.replace(number, "0.3"), TAKES), seen)


def test_words_and_controls_add_up() -> None:
    both = play(Controls(Drag(50, 50, 0, -20), camera=CameraMove(right=4)), plan=RIGHT).after
    assert places(both) == {"red": (32, 30), "blue": (46, 30)}
    against = play(Controls(Drag(20, 30, -16, 0)), plan=RIGHT).after
    assert abs(places(against)["red"][0] - RED.x) <= 2
    with pytest.raises(ValueError, match="two stages"):
        play(Controls(push=Push(1, 1)), plan=Plan((RIGHT.stages[0], RIGHT.stages[0])))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_sample_is_judged_and_taken_by_a_model(kind: str) -> None:
    for index in range(12):
        sample, again = (sample_controls_rollout(SEED, index, 1, kind)[0] for _ in range(2))
        assert np.array_equal(sample.clip.frames, again.clip.frames)
        assert shapes.judge(sample.clip.frames[-1], sample.clip.after).strict
        action_of(sample).check(TAKES)


def test_episodes_have_actions_of_every_kind_and_labels_of_what_is_moved() -> None:
    source = ShapesSource("controls")
    episodes = [source.episode("rounds", SEED, index, 3) for index in range(40)]
    taken = {name for each in episodes for action in each.actions for name, _ in action.parts}
    assert taken == {"text", "keys", "mouse", "vector", "camera"}
    for index, episode in enumerate(episodes):
        first = sample_controls_rollout(SEED, index, 3)[0].clip
        assert np.array_equal(episode.observations[1], first.frames)
        if first.controls.drag is not None and first.controls.camera is None:
            assert episode.labels is not None
            assert episode.labels["named"].any() == (first.after != first.before)


@pytest.mark.parametrize("away", [1, 4, MAX_AWAY_ROUNDS])
def test_the_camera_comes_back_after_rounds_away(away: int) -> None:
    came_back = 0
    for index in range(20):
        samples = sample_away_rollout(SEED, index, away + 1, away)
        leave, back = samples[0].clip, samples[-1].clip
        assert leave.controls.camera is not None
        for earlier, later in pairwise(samples):
            assert later.clip.before == earlier.clip.after
        seen = {found.colour for found in shapes.find_objects(leave.frames[-1], leave.before.background)}
        for obj in shapes.in_view(leave.before):
            if obj.colour not in seen:
                assert back.after.find(obj.colour) == obj
                came_back += 1
    assert came_back >= 15
    with pytest.raises(ValueError, match="away_rounds"):
        sample_away_rollout(SEED, 0, 4, 4)


class Simulator:
    """The true world behind the interface of an evaluated model; it may forget what it was shown."""

    def __init__(self, forgets: bool = False) -> None:
        self.forgets = forgets
        self.clips: dict[tuple[bytes, Action], Clip] = {}
        for samples in (
            *(sample_controls_rollout(SEED, index, 1, kind) for kind in KINDS for index in range(4)),
            *(sample_away_rollout(SEED, index, 3, 2) for index in range(4)),
        ):
            for sample in samples:
                self.clips[sample.clip.first_frame.tobytes(), action_of(sample)] = sample.clip

    def read(self, observations: Sequence[Sequence[np.ndarray]], prompts: Sequence[str]) -> list[str]:
        clips = {clip.frames.tobytes(): clip for clip in self.clips.values()}
        return [
            "nothing happens" if self.forgets else say(seen_action(clips[frames.tobytes()]))
            for _, frames in observations
        ]

    def open(
        self, starts: np.ndarray, seeds: Sequence[int], actions: Sequence[Sequence[Action]] = ()
    ) -> Worlds:
        simulator = self

        class Playing:
            def __init__(self) -> None:
                self.images = list(starts)

            def step(self, actions: Sequence[Action]) -> np.ndarray:
                made = [
                    simulator.clips[image.tobytes(), action].frames
                    for image, action in zip(self.images, actions, strict=True)
                ]
                if simulator.forgets:
                    made = [np.repeat(image[None], 8, axis=0) for image in self.images]
                else:
                    self.images = [clip[-1] for clip in made]
                return np.stack(made)

        return Playing()


def test_the_true_world_is_right_and_a_copy_is_wrong() -> None:
    figures = controlled(Simulator(), 4, SEED)  # type: ignore[arg-type]
    assert set(figures) == set(KINDS)
    for kind, rates in figures.items():
        assert all(rates[name]["value"] == 1 for name in ("moved", "pixel", "strict"))
        if kind in ("drag", "push one", "pan"):
            assert rates["copy_moved"]["value"] < 0.5
    told = recognised(Simulator(), 4, SEED)  # type: ignore[arg-type]
    assert all(rates["right"]["value"] == 1 for rates in told.values())
    silent = recognised(Simulator(forgets=True), 4, SEED)  # type: ignore[arg-type]
    assert silent["drag on nothing"]["right"]["value"] == silent["nothing"]["right"]["value"] == 1
    assert silent["drag"]["right"]["value"] == silent["drag"]["copy_right"]["value"] == 0
    away = camera_away(Simulator(), 4, SEED, away_rounds=(2,))["rounds away: 2"]  # type: ignore[arg-type]
    assert away["named"]["value"] == away["strict"]["value"] == 1
    rows = measured(GOALS, {"controls": figures, "inverse_controls": told, "away": {"rounds away: 1": away}})
    assert {row.path[1] for row in rows} == {*KINDS, "rounds away: 1"}
    assert {row.met for row in rows} == {True, None}
    copied = [row for row in rows if row.path[1:] == ("drag", "moved")]
    assert list(copied[0].baselines) == ["copy"]


def test_keys_beside_words_act_on_another_object_and_yield_on_the_same() -> None:
    beside = [sample_controls_rollout(SEED, index, 1, "words, keys")[0] for index in range(12)]
    against = [sample_controls_rollout(SEED, index, 1, "words against keys")[0] for index in range(12)]
    for sample in (*beside, *against):
        colour, deed = sample.keys
        action = action_of(sample)
        assert action.keys == sample.keys and action.text == sample.text
        said, *pressed = sample.clip.plan.acts
        assert [(act.target_colour, act.deed) for act in pressed] == ([(colour, deed)] if pressed else [])
        assert (said.target_colour == colour) != bool(pressed)
        assert said.target_colour is not None and said.target_colour in sample.text
        assert not pressed or colour not in sample.text or said.argument == colour or said.verb == "push"
    assert all(len(sample.clip.plan.acts) == 2 for sample in beside)
