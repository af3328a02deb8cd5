"""Recognition of the act in the frames of a round: the one whose simulation is nearest to them."""

from collections.abc import Iterator, Sequence

import numpy as np

from worldmodel import shapes
from worldmodel.eval.judge import Case
from worldmodel.media import Frames
from worldmodel.shapes import COLOURS, DIRECTIONS, STAY, ZONES, Act, Plan, Scene, SceneObject

OTHER = "other"
NOTHING = "nothing"
_VERBS = (*DIRECTIONS, "grow", "shrink", "vanish", "explode", "fall", "jump")


def recognise(case: Case, frames: Frames) -> tuple[str, str]:
    """Return the deed that was asked for and the one that the frames show.

    A deed is shown where the judge calls the last frame right for its simulation (the object acted on, or the
    whole frame for nothing) and no other such simulation, including one of nothing, is nearer to all frames.
    Everything else is `OTHER`, including acts on another object than the one asked about; where nothing was
    asked for, acts on every object are candidates.
    """
    scene, asked = case.before
    still = shapes.advance(scene, STAY)
    shown = NOTHING if shapes.judge(frames[-1], still[-1]).strict else OTHER
    least = _error(frames, still)
    for plan in _candidates(scene, asked):
        scenes = shapes.advance(scene, plan)
        if scenes != still and shapes.judge(frames[-1], scenes[-1]).named_right(plan):
            error = _error(frames, scenes)
            if error < least:
                least, shown = error, _name(plan)
    return _name(asked), shown


def _error(frames: Frames, scenes: Sequence[Scene]) -> float:
    return float(np.square(frames.astype(np.float32) - shapes.render_clip(scenes)).mean())


def _name(plan: Plan) -> str:
    deed = plan.acts[0].deed
    return NOTHING if deed == "stay" else deed


def _candidates(scene: Scene, asked: Plan) -> Iterator[Plan]:
    """Yield plans of one act: the one asked for and every other act on the same object."""
    yield asked
    act = asked.acts[0]
    if act.verb == "appear":
        for zone in ZONES:
            yield Plan(((Act("appear", act.target_colour, act.target_shape, act.target_size, zone),),))
    for obj in scene.objects:
        if asked == STAY or obj.colour == act.target_colour:
            yield from _acts_on(obj, scene)


def _acts_on(obj: SceneObject, scene: Scene) -> Iterator[Plan]:
    for verb in _VERBS:
        yield Plan(((Act(verb, obj.colour),),))
    for colour in COLOURS:
        if scene.find(colour) is None:
            yield Plan(((Act("turn", obj.colour, argument=colour),),))
