"""Rounds that are played with a pointer, pushes and the camera, alone or together with words and keys.

The units of the actions: a mouse is a drag in fractions of the picture, a vector is a push in pixels to the
right and down (on all objects, or on that of the colour whose key is held), and a camera moves by widths of
the picture to the right and up, and forward by factors of two. All of them move by whole steps of a 16th of
the picture. Keys beside words act on another object; on the same one, the words decide.
"""

from dataclasses import replace

import numpy as np

from worldmodel.actions import Action, Camera, Pose
from worldmodel.shapes.language import canonical_text, plan_to_text
from worldmodel.shapes.physics import (
    DIRECTIONS,
    NO_CONTROLS,
    STAY,
    STEP,
    Act,
    CameraMove,
    Clip,
    Controls,
    Drag,
    Plan,
    Push,
    advance,
    at_rest,
    simulate,
    under_pointer,
)
from worldmodel.shapes.render import sprite
from worldmodel.shapes.sampling import Sample, held_out, sample_plan, works
from worldmodel.shapes.scene import (
    FRAME_SIZE,
    MAX_ZOOM,
    RADII,
    Scene,
    SceneObject,
    as_seen,
    in_view,
    random_scene,
)

SPLIT = "controls"
AWAY = "away"
MAX_PUSH = 24
"""Most pixels of a push along each axis."""
MAX_AWAY_ROUNDS = 8
KEY_DEEDS = (*DIRECTIONS, "jump", "fall", "grow", "shrink", "vanish", "explode")
"""Keys that act on the object of the colour whose key is pressed with them."""

_MIN_WAY, _MAX_DRAG, _MAX_PAN, _MAX_WAY_OUT = 4, 28, 24, 44
_NEAR_A_STEP = 1
"""Pixels by which what is asked for differs from whole steps at most: half-way it would be undecided."""
_SPLIT_ID, _AWAY_ID = 1400, 1500
"""Keep the random streams apart from the other splits'."""
_TRIES = 16
_KINDS = {
    "drag": 0.26,
    "push one": 0.11,
    "push all": 0.12,
    "pan": 0.16,
    "zoom": 0.08,
    "drag, words": 0.05,
    "push all, words": 0.03,
    "pan, words": 0.05,
    "drag, pan": 0.03,
    "words, keys": 0.03,
    "words against keys": 0.02,
    "words": 0.02,
    "drag on nothing": 0.02,
    "nothing": 0.02,
}
KINDS = tuple(_KINDS)
_MAGNIFIED = ("zoom", "nothing")
"""What happens while the view is magnified, where walls are out of sight."""


def action_of(sample: Sample) -> Action:
    """Return the action of a sample: its text, its keys and its controls."""
    controls = sample.clip.controls
    found = Action(sample.text or None, keys=sample.keys)
    if controls.drag is not None:
        drag = controls.drag
        place = ((drag.x + 0.5) / FRAME_SIZE, (drag.y + 0.5) / FRAME_SIZE)
        found = replace(found, mouse=(*place, drag.right / FRAME_SIZE, drag.down / FRAME_SIZE))
    if controls.push is not None:
        push = controls.push
        found = replace(found, vector=(float(push.right), float(push.down)))
        found = replace(found, keys=(push.colour,)) if push.colour else found
    if controls.camera is not None:
        move = controls.camera
        way = (move.right / FRAME_SIZE, move.up / FRAME_SIZE, move.forward)
        found = replace(found, camera=Camera("velocity", Pose(way)))
    return found


def seen_action(clip: Clip) -> Action:
    """Return the action to which a clip looks: its acts in canonical words, and what controls moved.

    A drag of an object looks like a push of it, and is one here. Ways are in whole steps, and of single
    objects as far as they went: walls and other objects stop them.
    """
    controls = clip.controls
    found = Action(None if clip.plan == STAY else canonical_text(clip.plan))
    held = None if controls.drag is None else under_pointer(controls.drag, clip.before)
    colour = held.colour if held else None
    if controls.push is not None:
        alone = clip.before.objects[0].colour if len(clip.before.objects) == 1 else None
        colour = controls.push.colour or alone
        found = replace(found, vector=(_steps(controls.push.right), _steps(controls.push.down)))
    if colour is not None:
        way = _way(clip, colour)
        found = replace(found, keys=(colour,), vector=way) if any(way) else replace(found, vector=None)
    if controls.camera is not None:
        move = controls.camera
        right, up = (_steps(pixels) / FRAME_SIZE for pixels in (move.right, move.up))
        found = replace(found, camera=Camera("velocity", Pose((right, up, move.forward))))
    return found


def _way(clip: Clip, colour: str) -> tuple[float, float]:
    """Return how far an object went to the right and down, apart from the camera's motion."""
    after = at_rest(advance(clip.before, clip.plan, replace(clip.controls, camera=None))[-1])
    old, new = clip.before.find(colour), after.find(colour)
    if old is None or new is None:
        return 0.0, 0.0
    right, down = (float(min(max(way, -MAX_PUSH), MAX_PUSH)) for way in (new.x - old.x, new.y - old.y))
    return right, down


def _steps(pixels: int) -> float:
    return float(STEP * round(pixels / STEP))


def sample_controls_rollout(seed: int, index: int, rounds: int, kind: str | None = None) -> list[Sample]:
    """Return consecutive samples of controls; the same for the same arguments.

    Args:
        seed: Seed of the data set.
        index: Index of the rollout in the data set.
        rounds: Number of samples.
        kind: One of `KINDS`, for all samples; random if not given.
    """
    rng = np.random.default_rng((_SPLIT_ID, seed, index))
    scene, samples = random_scene(rng), []
    for _ in range(rounds):
        samples.append(_sample(rng, scene, kind))
        scene = samples[-1].clip.after
    return samples


def sample_away_rollout(seed: int, index: int, rounds: int, away_rounds: int | None = None) -> list[Sample]:
    """Return consecutive samples in which the camera leaves an object and comes back for it rounds later.

    Args:
        seed: Seed of the data set.
        index: Index of the rollout in the data set.
        rounds: Number of samples, 2 or more.
        away_rounds: Rounds from leaving to coming back, 1 to `rounds` - 1; the last sample is the way back.
            Random, up to `MAX_AWAY_ROUNDS`, if not given.

    Raises:
        ValueError: `away_rounds` is less than 1, or does not fit into the rounds.
    """
    if away_rounds is not None and not 1 <= away_rounds < rounds:
        raise ValueError(f"away_rounds is {away_rounds}; use 1 to {rounds - 1}, the rounds less one.")
    rng = np.random.default_rng((_AWAY_ID, seed, index))
    if away_rounds is None:
        away_rounds = int(rng.integers(1, max(2, min(rounds, MAX_AWAY_ROUNDS + 1))))
        leave = int(rng.integers(max(1, rounds - away_rounds)))
    else:
        leave = rounds - 1 - away_rounds
    scene = random_scene(rng)
    samples: list[Sample] = []
    way = None
    for number in range(rounds):
        if number == leave:
            way = _way_out(rng, scene)
            samples.append(_play(rng, scene, controls=Controls(camera=way)))
        elif number == leave + away_rounds and way is not None:
            back = CameraMove(-way.right, -way.up)
            samples.append(_play(rng, scene, controls=Controls(camera=back)))
        else:
            away = leave < number < leave + away_rounds
            kinds = ("drag", "push one", "words", "nothing") if away else ("drag", "words", "nothing")
            samples.append(_sample(rng, scene, kinds[int(rng.integers(len(kinds)))]))
        scene = samples[-1].clip.after
    return samples


def _way_out(rng: np.random.Generator, scene: Scene) -> CameraMove:
    """Draw a motion of the camera that leaves at least one object outside, along an axis."""
    ways: list[CameraMove] = []
    for obj in in_view(scene):
        reach = round(RADII[obj.size] * 1.26) + 2
        ways += [
            CameraMove(right=_whole(obj.x + reach)),
            CameraMove(right=-_whole(FRAME_SIZE + reach - obj.x)),
            CameraMove(up=_whole(FRAME_SIZE - obj.y + reach)),
            CameraMove(up=-_whole(obj.y + reach)),
        ]
    ways = [way for way in ways if abs(way.right) + abs(way.up) <= _MAX_WAY_OUT] or [CameraMove(_MAX_WAY_OUT)]
    return ways[int(rng.integers(len(ways)))]


def _whole(pixels: int) -> int:
    return STEP * -(-pixels // STEP)


def _sample(rng: np.random.Generator, scene: Scene, kind: str | None) -> Sample:
    for _ in range(_TRIES):
        drawn = kind or KINDS[int(rng.choice(len(KINDS), p=list(_KINDS.values())))]
        if scene.zoom > 1 and kind is None and drawn not in _MAGNIFIED:
            continue
        found = _of_kind(rng, scene, drawn)
        if found is not None:
            return found
        if kind is not None and not in_view(scene):
            break
    return _play(rng, scene)


def _of_kind(rng: np.random.Generator, scene: Scene, kind: str) -> Sample | None:
    """Draw a sample of a kind; None if the scene has no room for what was drawn."""
    drag = push = camera = None
    plan: Plan | None = STAY
    if "drag" in kind:
        drag = _draw_drag(rng, scene, on_object=kind != "drag on nothing")
        if drag is None:
            return None
    if "push" in kind:
        way = (_draw_way(rng, MAX_PUSH), _draw_way(rng, MAX_PUSH))
        keep = int(rng.integers(3))  # along one axis or both
        things = in_view(scene)
        if not things:
            return None
        colour = things[int(rng.integers(len(things)))].colour if "one" in kind else None
        push = Push(way[0] if keep != 1 else 0, way[1] if keep != 0 else 0, colour)
    if "pan" in kind:
        keep = int(rng.integers(3))
        camera = CameraMove(
            _draw_way(rng, _MAX_PAN) if keep != 1 else 0, _draw_way(rng, _MAX_PAN) if keep != 0 else 0
        )
    if "zoom" in kind:
        camera = _draw_zoom(scene)
    if "words" in kind:
        plan = _draw_plan(rng, scene, drag)
        if plan is None:
            return None
        if "keys" in kind:
            return _with_keys(rng, scene, plan.acts[0], against="against" in kind)
    controls = Controls(drag, push, camera)
    return _play(rng, scene, plan, controls) if _is_visible(scene, plan, controls, kind) else None


def _with_keys(rng: np.random.Generator, scene: Scene, said: Act, against: bool) -> Sample | None:
    """Draw keys beside an act in words: for another object, or against the words for the same one."""
    things = [obj for obj in in_view(scene) if (obj.colour == said.target_colour) == against]
    if not things:
        return None
    obj = things[int(rng.integers(len(things)))]
    deeds = [each for each in KEY_DEEDS if each != said.deed and not held_out(obj.colour, obj.shape, each)]
    deed = deeds[int(rng.integers(len(deeds)))]
    plan = Plan(((said,) if against else (said, Act(deed, obj.colour)),))
    if not works(scene, plan):
        return None
    return replace(_play(rng, scene, Plan(((said,),))), clip=simulate(scene, plan), keys=(obj.colour, deed))


def _play(
    rng: np.random.Generator,
    scene: Scene,
    plan: Plan = STAY,
    controls: Controls = NO_CONTROLS,
) -> Sample:
    text = "" if plan == STAY else plan_to_text(plan, Scene(scene.background, in_view(scene)), rng)
    return Sample(text, simulate(scene, plan, controls))


def _is_visible(scene: Scene, plan: Plan, controls: Controls, kind: str) -> bool:
    """Return whether something moves, and there is something left to see, where the kind is to show it."""
    after = advance(scene, plan, controls)[-1]
    if kind in ("nothing", "drag on nothing"):
        return after == scene
    if controls.drag is not None and controls.camera is None:
        return _moved(scene, after) >= _MIN_WAY
    return after != scene and bool(in_view(after))


def _moved(before: Scene, after: Scene) -> int:
    """Return how many pixels an object moved at most along an axis."""
    pairs = [(obj, after.find(obj.colour)) for obj in before.objects]
    return max((max(abs(a.x - b.x), abs(a.y - b.y)) for a, b in pairs if b is not None), default=0)


def _draw_way(rng: np.random.Generator, most: int) -> int:
    steps = int(rng.integers(1, most // STEP + 1)) * (1 if rng.random() < 0.5 else -1)
    return min(max(STEP * steps + _off(rng), -most), most)


def _off(rng: np.random.Generator) -> int:
    return int(rng.integers(-_NEAR_A_STEP, _NEAR_A_STEP + 1))


def _draw_zoom(scene: Scene) -> CameraMove:
    """Return the way to the other limit of the magnification."""
    factor = MAX_ZOOM if scene.zoom == 1 else 1 / MAX_ZOOM
    return CameraMove(forward=round(float(np.log2(factor)), 3))


def _draw_drag(rng: np.random.Generator, scene: Scene, on_object: bool) -> Drag | None:
    """Draw a drag of an object to a place in the picture, or one that begins where there is none."""
    seen = as_seen(scene)
    things = in_view(scene)
    if not on_object:
        x, y = rng.integers(FRAME_SIZE, size=2).tolist()
        near = any(max(abs(obj.x - x), abs(obj.y - y)) < 1.3 * _radius(obj) + 2 for obj in seen.objects)
        return None if near else Drag(x, y, _draw_way(rng, _MAX_DRAG), _draw_way(rng, _MAX_DRAG))
    if not things:
        return None
    obj = seen.find(things[int(rng.integers(len(things)))].colour)
    assert obj is not None
    cover = sprite(obj.shape, _radius(obj))
    inside = np.argwhere(cover > 0.9)
    row, column = inside[int(rng.integers(len(inside)))].tolist()
    x, y = obj.x + column - len(cover) // 2, obj.y + row - len(cover) // 2
    if not (0 <= x < FRAME_SIZE and 0 <= y < FRAME_SIZE):
        return None
    half = round(_radius(obj) * 1.26)
    right, down = (
        STEP * round((_draw_place(rng, place, half) - place) / STEP) + _off(rng) for place in (obj.x, obj.y)
    )
    return Drag(x, y, right, down)


def _draw_place(rng: np.random.Generator, place: int, half: int) -> int:
    """Draw where along an axis an object goes: inside of the view, and not farther than a short drag."""
    low, high = half, FRAME_SIZE - 1 - half
    return int(
        rng.integers(max(low, min(place - _MAX_DRAG, high)), min(high, max(place + _MAX_DRAG, low)) + 1)
    )


def _radius(obj: SceneObject) -> float:
    return RADII[obj.size] if obj.radius is None else obj.radius


def _draw_plan(rng: np.random.Generator, scene: Scene, drag: Drag | None) -> Plan | None:
    """Draw a single act on something in view that is not dragged."""
    visible = Scene(scene.background, in_view(scene))
    plan = sample_plan(rng, visible, "single")
    colours = {colour for act in plan.acts for colour in (act.target_colour, act.argument)}
    hidden = {obj.colour for obj in scene.objects} - {obj.colour for obj in visible.objects}
    if plan == STAY or colours & hidden or not works(scene, plan):
        return None
    if drag is not None:
        taken = as_seen(scene)
        held = min(taken.objects, key=lambda obj: max(abs(obj.x - drag.x), abs(obj.y - drag.y)))
        if held.colour in colours:
            return None
    return plan
