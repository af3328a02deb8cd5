"""Chance acts: sentences with several possible outcomes of known probabilities.

An outcome is an ordinary plan, so physics, images and judge are the same as for certain acts. None of the
outcomes is a held-out triple (`sampling.held_out`).
"""

from dataclasses import dataclass

import numpy as np

from worldmodel.shapes.physics import DIRECTIONS, STAY, Act, Plan, simulate
from worldmodel.shapes.sampling import MAX_OBJECTS, Sample, held_out, works
from worldmodel.shapes.scene import COLOURS, Scene, SceneObject, apart, place_in_zone, random_scene

CHANCE_KINDS: tuple[str, ...] = ("wander", "recolour", "resize", "gamble", "arrive", "gust", "scatter")

# {o} is the object acted on.
_PHRASES: dict[str, tuple[str, ...]] = {
    "wander": ("push {o} somewhere", "{o} goes somewhere", "{o} wanders off"),
    "recolour": ("{o} changes its colour", "paint {o} any colour", "{o} takes on a new colour"),
    "resize": ("{o} changes its size", "resize {o}", "{o} gets another size"),
    "gamble": ("flip a coin for {o}", "heads or tails for {o}", "{o} may be gone or not"),
    "arrive": ("something appears", "something new shows up", "add something somewhere"),
    "gust": ("the wind blows", "a gust of wind", "a storm sweeps through"),
    "scatter": ("everything scatters", "all objects run off", "they go their own ways"),
}
_CORNERS = ("top left", "top right", "bottom left", "bottom right")
_SIDEWAYS = ("left", "right")
_RECOLOUR_PROBABILITIES = (0.5, 0.25, 0.25)
_SPLIT_ID = 1000
"""Keeps the random streams apart from the streams of `sampling.SPLITS`."""


@dataclass(frozen=True, slots=True)
class Chance:
    """A sentence and its possible outcomes.

    Attributes:
        kind: One of `CHANCE_KINDS`.
        text: The sentence.
        plans: The outcomes, 2 to 4, all different in pixels.
        probabilities: Probability of each; they sum to 1.
    """

    kind: str
    text: str
    plans: tuple[Plan, ...]
    probabilities: tuple[float, ...]


def draw_chance(rng: np.random.Generator, scene: Scene, kind: str) -> Chance | None:
    """Draw a chance act of a kind that is possible in a scene; None if there is none.

    Raises:
        ValueError: The kind is unknown.
    """
    if kind not in CHANCE_KINDS:
        raise ValueError(f"unknown kind {kind!r}; use one of: {', '.join(CHANCE_KINDS)}")
    targets: list[SceneObject | None] = [None]
    if "{o}" in _PHRASES[kind][0]:
        targets = [scene.objects[index] for index in rng.permutation(len(scene.objects)).tolist()]
    for target in targets:
        plans, probabilities = _outcomes(kind, scene, target)
        if len(plans) >= 2:
            phrase = _PHRASES[kind][int(rng.integers(len(_PHRASES[kind])))]
            noun = f"the {target.colour} {target.shape}" if target else ""
            return Chance(kind, phrase.format(o=noun), plans, probabilities)
    return None


def sample_chance(seed: int, index: int) -> tuple[Scene, Chance]:
    """Return a scene and a chance act that is possible in it, the same for the same arguments."""
    return _sample(np.random.default_rng((_SPLIT_ID, seed, index)))


def sample_chance_rollout(seed: int, index: int, rounds: int) -> list[Sample]:
    """Return consecutive samples, each an outcome of a chance act, drawn by its probability.

    Args:
        seed: Seed of the data set.
        index: Index of the rollout in the data set.
        rounds: Number of samples; the first round has the scene and act of `sample_chance`.
    """
    rng = np.random.default_rng((_SPLIT_ID, seed, index))
    scene, chance = _sample(rng)
    samples: list[Sample] = []
    for _ in range(rounds):
        if chance is None:
            samples.append(Sample("nothing happens", simulate(scene, STAY)))
        else:
            plan = chance.plans[int(rng.choice(len(chance.plans), p=chance.probabilities))]
            samples.append(Sample(chance.text, simulate(scene, plan)))
        scene = samples[-1].clip.after
        kinds = [CHANCE_KINDS[each] for each in rng.permutation(len(CHANCE_KINDS)).tolist()]
        chance = next((found for kind in kinds if (found := draw_chance(rng, scene, kind))), None)
    return samples


def _sample(rng: np.random.Generator) -> tuple[Scene, Chance]:
    kind = CHANCE_KINDS[int(rng.integers(len(CHANCE_KINDS)))]
    # The scene is drawn to suit the kind, so that kinds that need much space are not rare.
    while True:
        scene = random_scene(rng)
        chance = draw_chance(rng, scene, kind)
        if chance is not None:
            return scene, chance


def _outcomes(
    kind: str, scene: Scene, target: SceneObject | None
) -> tuple[tuple[Plan, ...], tuple[float, ...]]:
    """Return the outcomes and their probabilities; none where the act is impossible."""
    if kind == "gust":
        stages = [_together(scene, (way,) * len(scene.objects)) for way in _SIDEWAYS]
    elif kind == "scatter":
        ways = [(first, second) for first in _SIDEWAYS for second in _SIDEWAYS]
        stages = [_together(scene, pair) for pair in ways] if len(scene.objects) == 2 else []
    elif kind == "arrive":
        stages = [(act,) for act in _newcomers(scene)]
    elif target is None:
        stages = []
    elif kind == "wander":
        stages = [(Act(way, target.colour, target.shape),) for way in DIRECTIONS]
        stages = [stage for stage in stages if works(scene, Plan((stage,)))]
    elif kind == "recolour":
        start = COLOURS.index(target.colour)
        ring = [COLOURS[(start + step) % len(COLOURS)] for step in range(1, len(COLOURS))]
        free = [colour for colour in ring if scene.find(colour) is None][: len(_RECOLOUR_PROBABILITIES)]
        stages = [(Act("turn", target.colour, target.shape, None, colour),) for colour in free]
    elif kind == "resize":
        stages = [(Act(verb, target.colour, target.shape),) for verb in ("grow", "shrink")]
    else:
        stages = [(Act("vanish", target.colour, target.shape),), *STAY.stages]
    plans = tuple(Plan((stage,)) for stage in stages if stage)
    possible = len(plans) == len(stages) >= 2 and all(works(scene, plan) for plan in plans)
    if not possible or any(_is_held_out(act, scene) for plan in plans for act in plan.acts):
        return (), ()
    if kind == "recolour":
        return plans, _RECOLOUR_PROBABILITIES
    return plans, (1 / len(plans),) * len(plans)


def _together(scene: Scene, ways: tuple[str, ...]) -> tuple[Act, ...]:
    """Return one move for every object, at the same time; nothing for more objects than a plan has acts."""
    if not 1 <= len(ways) <= 3:
        return ()
    return tuple(Act(way, obj.colour, obj.shape) for way, obj in zip(ways, scene.objects, strict=True))


def _newcomers(scene: Scene) -> list[Act]:
    """Return acts in which the same medium ball appears, one for every free corner."""
    if len(scene.objects) >= MAX_OBJECTS:
        return []
    colour = next(colour for colour in COLOURS if scene.find(colour) is None)
    acts: list[Act] = []
    for corner in _CORNERS:
        obj = place_in_zone(colour, "ball", "medium", corner)
        if all(apart(obj, other) for other in scene.objects):
            acts.append(Act("appear", colour, "ball", "medium", corner))
    return acts


def _is_held_out(act: Act, scene: Scene) -> bool:
    if act.verb == "stay":
        return False
    obj = scene.find(act.target_colour or "")
    shape = act.target_shape or (obj.shape if obj else "")
    return held_out(act.target_colour or "", shape, act.deed)
