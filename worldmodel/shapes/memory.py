"""Acts that hide an object and show it again rounds later, where and as it was.

While it is hidden no frame shows the object, so only a model that remembers earlier rounds can show it again.
"""

import numpy as np

from worldmodel.shapes.language import plan_to_text
from worldmodel.shapes.physics import STAY, Act, Clip, Plan, advance, simulate
from worldmodel.shapes.render import render_clip
from worldmodel.shapes.sampling import MAX_OBJECTS, Sample, held_out, sample_plan
from worldmodel.shapes.scene import Scene, SceneObject, apart, random_scene, zone_of

SPLIT = "memory"
MAX_HIDDEN_ROUNDS = 8

_HIDE = ("hide {o}", "{o} hides", "make {o} invisible")
_SHOW = ("show {o} again", "{o} comes back", "bring {o} back")
_SPLIT_ID = 1100
"""Keeps the random streams apart from the other splits'."""
_TRIES = 16


def sample_memory_rollout(
    seed: int, index: int, rounds: int, hidden_rounds: int | None = None
) -> list[Sample]:
    """Return consecutive samples in which an object is hidden and, `hidden_rounds` rounds later, shown again.

    In the rounds before, between and after, single acts happen to other objects, or nothing; none of them
    takes the hidden object's place or colour. With 1, the act that shows follows the act that hides. The same
    arguments give the same samples.

    Args:
        seed: Seed of the data set.
        index: Index of the rollout in the data set.
        rounds: Number of samples; with 1, the object is hidden only.
        hidden_rounds: 1 to `rounds` - 1, and the last sample is the act that shows. Random, up to
            `MAX_HIDDEN_ROUNDS`, if not given.

    Raises:
        ValueError: `hidden_rounds` is less than 1, or does not fit into the rounds.
    """
    if hidden_rounds is not None and not 1 <= hidden_rounds < rounds:
        raise ValueError(f"hidden_rounds is {hidden_rounds}; use 1 to {rounds - 1}, the rounds less one.")
    rng = np.random.default_rng((_SPLIT_ID, seed, index))
    scene, target = _draw(rng)
    if hidden_rounds is None:
        hidden_rounds = int(rng.integers(1, max(2, min(rounds, MAX_HIDDEN_ROUNDS + 1))))
        hide_at = int(rng.integers(max(1, rounds - hidden_rounds)))
    else:
        hide_at = rounds - 1 - hidden_rounds
    samples: list[Sample] = []
    for number in range(rounds):
        if number == hide_at:
            samples.append(_hide(rng, scene, target))
        elif number == hide_at + hidden_rounds:
            samples.append(_show(rng, scene, target))
        else:
            samples.append(_other(rng, scene, target))
        scene = samples[-1].clip.after
        target = scene.find(target.colour) or target
    return samples


def _draw(rng: np.random.Generator) -> tuple[Scene, SceneObject]:
    """Draw a scene and an object in it that may vanish in training."""
    while True:
        scene = random_scene(rng)
        for obj in (scene.objects[each] for each in rng.permutation(len(scene.objects)).tolist()):
            if not held_out(obj.colour, obj.shape, "vanish"):
                return scene, obj


def _hide(rng: np.random.Generator, scene: Scene, obj: SceneObject) -> Sample:
    return Sample(_words(rng, _HIDE, obj), simulate(scene, _vanish(obj)))


def _show(rng: np.random.Generator, scene: Scene, obj: SceneObject) -> Sample:
    """Play the clip in which the object vanishes backwards."""
    whole = Scene(scene.background, (*scene.objects, obj))
    scenes = (*advance(whole, _vanish(obj))[-2::-1], whole)
    plan = Plan(((Act("appear", obj.colour, obj.shape, obj.size, zone_of(obj.x, obj.y)),),))
    return Sample(_words(rng, _SHOW, obj), Clip(scene, plan, scenes, render_clip(scenes)))


def _other(rng: np.random.Generator, scene: Scene, obj: SceneObject) -> Sample:
    """Draw an act on other objects after which there is still room for this one."""
    for _ in range(_TRIES):
        plan = sample_plan(rng, scene, "single")
        if any(obj.colour in (act.target_colour, act.argument) for act in plan.acts):
            continue
        clip = simulate(scene, plan)
        rest = [each for each in clip.after.objects if each.colour != obj.colour]
        stays = clip.after.find(obj.colour) == scene.find(obj.colour)  # nothing pushed it, if it is there
        if stays and len(rest) < MAX_OBJECTS and all(apart(obj, each) for each in rest):
            return Sample(plan_to_text(plan, scene, rng), clip)
    return Sample("nothing happens", simulate(scene, STAY))


def _vanish(obj: SceneObject) -> Plan:
    return Plan(((Act("vanish", obj.colour, obj.shape),),))


def _words(rng: np.random.Generator, phrases: tuple[str, ...], obj: SceneObject) -> str:
    return phrases[int(rng.integers(len(phrases)))].format(o=f"the {obj.colour} {obj.shape}")
