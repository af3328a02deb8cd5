"""Sampling of plans, clips and documents as functions of a seed, with held-out combinations."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from worldmodel.shapes.language import canonical_text, caption, plan_to_text, question
from worldmodel.shapes.physics import (
    DIRECTIONS,
    STAY,
    VERBS,
    Act,
    Clip,
    Plan,
    advance,
    at_rest,
    simulate,
)
from worldmodel.shapes.scene import (
    COLOURS,
    FRAME_SIZE,
    RADII,
    SHAPES,
    SIZES,
    ZONES,
    Scene,
    SceneObject,
    apart,
    half_side,
    half_side_of,
    place_in_zone,
    random_scene,
)

SPLITS: tuple[str, ...] = ("train", "val", "held-out", "compositions", "single", "contacts", "arrivals")
MAX_OBJECTS = 4

_ACTIVE = tuple(verb for verb in VERBS if verb != "stay")
_TOUCHING = (*DIRECTIONS, "push", "grow", "appear", "fall")
_LAYOUTS = ((1,), (2,), (1, 1), (3,), (1, 2), (2, 1))
_LAYOUT_WEIGHTS = (0.55, 0.20, 0.20, 0.02, 0.015, 0.015)
_STAY_SHARE = 0.05
_LAST = FRAME_SIZE - 1
_MIN_MOVE = 6
_MIN_FALL = 5


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A clip, and what asks for its plan: a sentence, which can be empty, and keys pressed beside it."""

    text: str
    clip: Clip
    keys: tuple[str, ...] = ()


@lru_cache(maxsize=4096)
def held_out(colour: str, shape: str, verb: str) -> bool:
    """Return whether a combination of colour, shape and verb is held out of the training data.

    True for one eighth of the combinations. A push counts as its direction (`Act.deed`).
    """
    digest = hashlib.sha256(f"{colour} {shape} {verb}".encode()).digest()
    return verb != "stay" and digest[0] % 8 == 0


def sample_plan(rng: np.random.Generator, scene: Scene, kind: str) -> Plan:
    """Draw a plan in which every act has a visible effect.

    Args:
        rng: Random generator.
        scene: Scene before the plan.
        kind: One of `SPLITS`. train, val: one or more acts without held-out combinations; held-out: one
            held-out act; single: one other act; compositions: two; contacts: plans of train after which an
            object that was acted on touches another (one in five of train); arrivals: plans of single in
            which an object appears. If the scene has no room for such a plan, a single act is drawn, or
            `STAY` if none is possible.

    Raises:
        ValueError: there is no such split.
    """
    for _ in range(16):
        plan = _propose(rng, scene, kind, _draw_verb(rng, kind))
        if plan is not None:
            return plan
    return _any_single(rng, scene, kind) or STAY


def sample_clip(split: str, seed: int, index: int) -> Sample:
    """Return a sample of a split; the same for the same arguments.

    Raises:
        ValueError: there is no such split.
    """
    return sample_rollout(split, seed, index, 1)[0]


def sample_rollout(split: str, seed: int, index: int, rounds: int) -> list[Sample]:
    """Return consecutive samples, each of which starts from the end of the one before.

    Args:
        split: One of `SPLITS`.
        seed: Seed of the data set.
        index: Index of the rollout in the data set.
        rounds: Number of samples; the first equals `sample_clip`'s.

    Raises:
        ValueError: there is no such split.
    """
    rng = np.random.default_rng((_split_id(split), seed, index))
    # The verb is drawn first and then a scene that permits it, so verbs that need much room are not rare.
    verb = _draw_verb(rng, split)
    plan, scene = None, random_scene(rng)
    for _ in range(24):
        plan = _propose(rng, scene, split, verb)
        if plan is not None:
            break
        scene = random_scene(rng)
    samples: list[Sample] = []
    for _ in range(rounds):
        plan = plan or sample_plan(rng, scene, split)
        text = plan_to_text(plan, scene, rng)
        samples.append(Sample(text, simulate(scene, plan)))
        scene, plan = samples[-1].clip.after, None
    return samples


def documents(rng: np.random.Generator) -> Iterator[str]:
    """Yield endless training texts for a language model, without held-out combinations.

    Captions; "state | action | next state"; "state | question | answer"; "action | canonical action".
    """
    while True:
        scene = random_scene(rng)
        plan = sample_plan(rng, scene, "train")
        text = plan_to_text(plan, scene, rng)
        after = at_rest(advance(scene, plan)[-1])
        asked, answer = question(scene, rng)
        yield caption(scene)
        yield f"{caption(scene)} | {text} | {caption(after)}"
        yield f"{caption(scene)} | {asked} | {answer}"
        yield f"{text} | {canonical_text(plan)}"


def _split_id(split: str) -> int:
    if split not in SPLITS:
        raise ValueError(f"There is no split {split!r}; use one of {', '.join(SPLITS)}.")
    return SPLITS.index(split)


def _draw_verb(rng: np.random.Generator, kind: str) -> str:
    verbs = {"contacts": _TOUCHING, "arrivals": ("appear",)}.get(kind, _ACTIVE)
    return verbs[int(rng.integers(len(verbs)))]


def _propose(rng: np.random.Generator, scene: Scene, kind: str, verb: str) -> Plan | None:
    """Draw a plan that includes `verb`; None if the scene has no room for it."""
    _split_id(kind)
    layout: tuple[int, ...] = (1,)
    if kind == "compositions":
        layout = _LAYOUTS[1 + int(rng.integers(2))]
    elif kind not in ("held-out", "single", "arrivals"):
        layout = _LAYOUTS[int(rng.choice(len(_LAYOUTS), p=_LAYOUT_WEIGHTS))]
        if layout == (1,) and rng.random() < _STAY_SHARE:
            return STAY
    leading = int(rng.integers(sum(layout)))
    verbs = [_ACTIVE[int(rng.integers(len(_ACTIVE)))] for _ in range(sum(layout))]
    verbs[leading] = verb
    stages: list[tuple[Act, ...]] = []
    current = scene
    for length in layout:
        stage = _draw_stage(rng, current, [verbs.pop(0) for _ in range(length)], kind)
        if stage is None:
            return None
        stages.append(stage)
        if len(layout) > 1:
            current = at_rest(advance(current, Plan((stage,)))[-1])
    plan = Plan(tuple(stages))
    if kind == "contacts" and not _touches(at_rest(advance(scene, plan)[-1]), plan):
        return None
    return plan if works(scene, plan) else None


def _draw_stage(
    rng: np.random.Generator, scene: Scene, verbs: list[str], kind: str
) -> tuple[Act, ...] | None:
    acts: list[Act] = []
    busy: set[str] = set()
    for verb in verbs:
        act = _draw_act(rng, scene, verb, busy, kind == "held-out")
        if act is None:
            return None
        acts.append(act)
        busy |= {colour for colour in (act.target_colour, act.argument) if colour in COLOURS}
    appearing = sum(verb == "appear" for verb in verbs)
    return None if len(scene.objects) + appearing > MAX_OBJECTS and appearing else tuple(acts)


def _draw_act(
    rng: np.random.Generator, scene: Scene, verb: str, busy: set[str], want_held_out: bool
) -> Act | None:
    """Draw an act of a verb that has an effect on its own; None if there is none."""
    free = [c for c in COLOURS if c not in busy and scene.find(c) is None]
    if verb == "appear":
        return _draw_newcomer(rng, scene, free, want_held_out)
    targets = [obj for obj in scene.objects if obj.colour not in busy]
    for index in rng.permutation(len(targets)).tolist():
        obj = targets[index]
        argument = None
        if verb == "push":
            argument = tuple(DIRECTIONS)[int(rng.integers(len(DIRECTIONS)))]
        elif verb == "turn":
            argument = free[int(rng.integers(len(free)))]
        act = Act(verb, obj.colour, obj.shape, None, argument)
        if held_out(obj.colour, obj.shape, act.deed) == want_held_out and _promising(act, obj):
            plan = Plan(((act,),))
            if act.deed not in (*DIRECTIONS, "fall", "grow") or works(scene, plan):
                return act
    return None


def _draw_newcomer(
    rng: np.random.Generator, scene: Scene, free: list[str], want_held_out: bool
) -> Act | None:
    if not free or len(scene.objects) >= MAX_OBJECTS:
        return None
    for _ in range(48):
        colour, shape = free[int(rng.integers(len(free)))], SHAPES[int(rng.integers(len(SHAPES)))]
        size, zone = SIZES[int(rng.integers(len(SIZES)))], ZONES[int(rng.integers(len(ZONES)))]
        if held_out(colour, shape, "appear") == want_held_out:
            obj = place_in_zone(colour, shape, size, zone)
            if all(apart(obj, other) for other in scene.objects):
                return Act("appear", colour, shape, size, zone)
    return None


def _promising(act: Act, obj: SceneObject) -> bool:
    """Return whether the act has an effect on the object if no other object is in its way."""
    half = half_side_of(obj)
    if act.deed in DIRECTIONS:
        dx, dy = DIRECTIONS[act.deed]
        room = obj.x * -dx + obj.y * -dy if dx + dy < 0 else _LAST - (obj.x * dx + obj.y * dy)
        return room - half >= _MIN_MOVE
    if act.verb == "fall":
        return _LAST - obj.y - half >= _MIN_FALL
    if act.verb == "jump":
        return obj.y - half >= _MIN_MOVE
    return obj.size != {"grow": SIZES[-1], "shrink": SIZES[0]}.get(act.verb)


def works(scene: Scene, plan: Plan) -> bool:
    """Return whether every act of the plan has its effect."""
    scenes = advance(scene, plan)
    per_stage = len(scenes) // len(plan.stages)
    before = scene
    for index, stage in enumerate(plan.stages):
        after = at_rest(scenes[(index + 1) * per_stage - 1])
        if not all(_done(act, before, after) for act in stage):
            return False
        before = after
    return True


def _touches(after: Scene, plan: Plan) -> bool:
    """Return whether an object that the plan acts on ends next to another."""
    named = {colour for act in plan.acts for colour in (act.target_colour, act.argument)}
    for obj in after.objects:
        for other in after.objects if obj.colour in named else ():
            reach = half_side_of(obj) + half_side_of(other) + 1
            if other is not obj and abs(obj.x - other.x) <= reach and abs(obj.y - other.y) <= reach:
                return True
    return False


def _done(act: Act, before: Scene, after: Scene) -> bool:
    if act.verb == "stay":
        return True
    assert act.target_colour is not None
    colour = act.argument if act.verb == "turn" and act.argument else act.target_colour
    old, new = before.find(act.target_colour), after.find(colour)
    if act.verb in ("vanish", "explode"):
        return new is None
    if new is None or old is None:
        return new is not None and act.verb == "appear"
    if act.deed in DIRECTIONS:
        dx, dy = DIRECTIONS[act.deed]
        return (new.x - old.x) * dx + (new.y - old.y) * dy >= _MIN_MOVE
    if act.verb == "fall":
        return new.y - old.y >= _MIN_FALL
    if act.verb == "jump":
        return new.y - half_side(new.shape, RADII[new.size]) >= _MIN_MOVE
    return act.verb not in ("grow", "shrink") or new.size != old.size


def _any_single(rng: np.random.Generator, scene: Scene, kind: str) -> Plan | None:
    for index in rng.permutation(len(_ACTIVE)).tolist():
        act = _draw_act(rng, scene, _ACTIVE[index], set(), kind == "held-out")
        if act is not None and works(scene, Plan(((act,),))):
            return Plan(((act,),))
    return None
