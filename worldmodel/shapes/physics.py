"""Physics: simulation of plans on a scene, with the true state of every object in every frame."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from worldmodel.shapes.render import render, render_clip, sprite
from worldmodel.shapes.scene import (
    COLOURS,
    FRAME_SIZE,
    MAX_ZOOM,
    RADII,
    SHAPES,
    SIZES,
    ZONES,
    Scene,
    SceneObject,
    as_seen,
    half_side,
    place_in_zone,
)

FRAMES_PER_CLIP = 8
DIRECTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
VERBS: tuple[str, ...] = (
    *DIRECTIONS,
    "push",
    "grow",
    "shrink",
    "turn",
    "vanish",
    "appear",
    "explode",
    "fall",
    "jump",
    "stay",
)

MOVE_DISTANCE = 16
STEP = 4
"""Pixels of the picture in whole multiples of which controls move objects and the camera: half a latent cell
of 8 pixels, so that a model has to know few displacements, and not one for every pixel."""
_JUMP_HEIGHT = 14
_TOUCHED = 0.25
"""Coverage of a pixel by an object from which a pointer on the pixel is on the object."""
_ARGUMENTS: dict[str, tuple[str, ...]] = {"push": tuple(DIRECTIONS), "turn": COLOURS, "appear": ZONES}


@dataclass(frozen=True, slots=True)
class Act:
    """One action on one object.

    Attributes:
        verb: One of `VERBS`.
        target_colour: Colour of the object acted on, or of the object that appears; None for stay.
        target_shape: Its shape; None if not given; appear needs it.
        target_size: Its size; None if not given; appear needs it.
        argument: Direction of a push, new colour of a turn, zone of an appear; None otherwise.

    Raises:
        ValueError: a field is missing or unknown, or the verb does not take it.
    """

    verb: str
    target_colour: str | None = None
    target_shape: str | None = None
    target_size: str | None = None
    argument: str | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            ("verb", self.verb, VERBS),
            ("target_colour", self.target_colour, (None,) if self.verb == "stay" else COLOURS),
            ("target_shape", self.target_shape, SHAPES if self.verb == "appear" else (None, *SHAPES)),
            ("target_size", self.target_size, SIZES if self.verb == "appear" else (None, *SIZES)),
            ("argument", self.argument, _ARGUMENTS.get(self.verb, (None,))),
        ):
            if value not in known:
                choices = ", ".join(str(choice) for choice in known)
                raise ValueError(f"The {name} of the act {self.verb!r} is {value!r}; use one of {choices}.")

    @property
    def deed(self) -> str:
        """The visible effect: the verb, or the direction of a push."""
        return str(self.argument) if self.verb == "push" else self.verb


@dataclass(frozen=True, slots=True)
class Plan:
    """One to three acts in one or two stages: stages follow each other, the acts of a stage happen together.

    Raises:
        ValueError: there are no acts or too many, or two acts of one stage have the same target.
    """

    stages: tuple[tuple[Act, ...], ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.stages) <= 2 or not all(self.stages) or len(self.acts) > 3:
            counts = [len(stage) for stage in self.stages]
            raise ValueError(f"The stages of the plan have {counts} acts; use 1 to 3 acts in 1 or 2 stages.")
        for stage in self.stages:
            colours = [act.target_colour for act in stage]
            if len(set(colours)) < len(colours):
                raise ValueError(
                    f"Two acts of a stage have the same target ({colours}); name different ones."
                )

    @property
    def acts(self) -> tuple[Act, ...]:
        """All acts, in the order of the sentence."""
        return tuple(act for stage in self.stages for act in stage)


STAY = Plan(((Act("stay"),),))


@dataclass(frozen=True, slots=True)
class Drag:
    """A pointer that is pressed on an object and takes it along.

    Attributes:
        x: Column where it is pressed, in pixels of the picture.
        y: Row where it is pressed.
        right: How far it goes to the right during the clip, in pixels of the picture.
        down: How far it goes down.

    What is dragged goes by whole steps of `STEP` pixels, as all that controls move.
    """

    x: int
    y: int
    right: int
    down: int


@dataclass(frozen=True, slots=True)
class Push:
    """A push on an object, or a wind that pushes all of them.

    Attributes:
        right: How far it moves them to the right if nothing is in the way, in pixels of the world.
        down: How far it moves them down.
        colour: Colour of the one object that is pushed; None for all.
    """

    right: int
    down: int
    colour: str | None = None


@dataclass(frozen=True, slots=True)
class CameraMove:
    """A motion of the camera.

    Attributes:
        right: How far it goes to the right, in pixels of the picture: what is there moves left.
        up: How far it goes up.
        forward: Logarithm to the base 2 of the factor by which the picture is magnified further.
    """

    right: int = 0
    up: int = 0
    forward: float = 0.0


@dataclass(frozen=True, slots=True)
class Controls:
    """What is done during a clip beside the acts of its plan; all of it happens at once.

    On an object that both act on, they add up. A pointer that is pressed on no object does nothing, and the
    camera stops where the magnification is 1 or `MAX_ZOOM`.
    """

    drag: Drag | None = None
    push: Push | None = None
    camera: CameraMove | None = None


NO_CONTROLS = Controls()


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """A plan played on a scene.

    Attributes:
        before: The scene before the first frame.
        plan: The actions.
        scenes: The true scene of every frame, also during actions.
        frames: The pixels, uint8 of shape [t, h, w, 3].
        controls: What else was done.
    """

    before: Scene
    plan: Plan
    scenes: tuple[Scene, ...]
    frames: NDArray[np.uint8]
    controls: Controls = NO_CONTROLS

    @property
    def after(self) -> Scene:
        """The scene at rest after the last frame."""
        return at_rest(self.scenes[-1])

    @property
    def first_frame(self) -> NDArray[np.uint8]:
        """The scene before the action, uint8 of shape [h, w, 3]."""
        return render(self.before)


def simulate(scene: Scene, plan: Plan, controls: Controls = NO_CONTROLS) -> Clip:
    """Simulate and render a plan and controls; equal inputs give equal bytes.

    Raises:
        ValueError: the plan acts on an object that does not exist, or adds a colour that does, or has two
            stages beside controls.
    """
    scenes = advance(scene, plan, controls)
    return Clip(scene, plan, scenes, render_clip(scenes), controls)


def advance(scene: Scene, plan: Plan, controls: Controls = NO_CONTROLS) -> tuple[Scene, ...]:
    """Simulate a plan and controls without rendering; return the scene of every frame.

    Raises:
        ValueError: the plan acts on an object that does not exist, or adds a colour that does, or has two
            stages beside controls.
    """
    if controls != NO_CONTROLS and len(plan.stages) > 1:
        raise ValueError("The plan has two stages; beside controls, use one.")
    scenes: list[Scene] = []
    num_frames = FRAMES_PER_CLIP // len(plan.stages)
    current = scene
    for stage in plan.stages:
        scenes += _play(current, stage, num_frames, controls)
        current = at_rest(scenes[-1])
    if controls.camera is not None:
        return tuple(
            _filmed(each, scene.zoom, controls.camera, (index + 1) / len(scenes))
            for index, each in enumerate(scenes)
        )
    return tuple(scenes)


def at_rest(scene: Scene) -> Scene:
    """Return the scene without the objects that are leaving."""
    return replace(scene, objects=tuple(obj for obj in scene.objects if not obj.transient))


def _filmed(scene: Scene, zoom: float, move: CameraMove, share: float) -> Scene:
    """Return the scene after a share of the camera's move, which began at a zoom."""
    share = _arrived(share)
    right, up = (round(share * _snapped(pixels / zoom)) for pixels in (move.right, move.up))
    objects = tuple(replace(obj, x=obj.x - right, y=obj.y + up) for obj in scene.objects)
    zoom = min(max(zoom * 2 ** (share * move.forward), 1.0), MAX_ZOOM)
    return Scene(scene.background, objects, zoom)


class _Body:
    """An object during a stage: its position and outline for collisions, and its appearance."""

    __slots__ = ("alpha", "burst", "gone", "half", "lift", "mix", "obj", "old", "radius", "solid", "x", "y")

    def __init__(self, obj: SceneObject) -> None:
        self.obj = obj
        self.x, self.y = obj.x, obj.y
        self.half = half_side(obj.shape, RADII[obj.size])
        self.radius: float | None = None
        self.alpha, self.mix, self.lift = 1.0, 1.0, 0
        self.old: str | None = None
        self.burst: float | None = None
        self.solid, self.gone = True, False

    def snapshot(self) -> SceneObject:
        obj = self.obj
        return SceneObject(
            obj.colour,
            obj.shape,
            obj.size,
            self.x,
            self.y,
            self.radius,
            self.alpha,
            self.old,
            self.mix,
            self.lift,
            self.burst,
        )


def _play(scene: Scene, stage: Sequence[Act], num_frames: int, controls: Controls) -> list[Scene]:
    bodies = [_Body(obj) for obj in scene.objects]
    held = None if controls.drag is None else under_pointer(controls.drag, scene)
    dragged = next((body for body in bodies if body.obj is held), None)
    cast = [(act, _body_for(act, scene, bodies)) for act in stage if act.verb != "stay"]
    _check_new_colours(scene, stage)
    for act, body in cast:
        _begin(act, body, bodies)
    scenes: list[Scene] = []
    for frame in range(1, num_frames + 1):
        _move(cast, bodies, frame, num_frames)
        if controls.drag is not None and dragged is not None:
            way = (_snapped(controls.drag.right / scene.zoom), _snapped(controls.drag.down / scene.zoom))
            _carry([dragged], bodies, way, frame, num_frames, pushing=True)
        if controls.push is not None:
            colour = controls.push.colour
            pushed = [body for body in bodies if colour in (None, body.obj.colour, body.old)]
            way = (_snapped(controls.push.right), _snapped(controls.push.down))
            _carry(pushed, bodies, way, frame, num_frames, pushing=colour is not None)
        for act, body in cast:
            _animate(act, body, bodies, frame, num_frames)
        objects = tuple(body.snapshot() for body in bodies if not body.gone)
        scenes.append(Scene(scene.background, objects, scene.zoom))
    return scenes


def _body_for(act: Act, scene: Scene, bodies: list[_Body]) -> _Body:
    if act.verb == "appear":
        assert act.target_colour
        assert act.target_shape
        assert act.target_size
        assert act.argument
        obj = place_in_zone(act.target_colour, act.target_shape, act.target_size, act.argument)
        bodies.append(_Body(obj))
        return bodies[-1]
    for obj, body in zip(scene.objects, bodies, strict=False):
        if obj.colour == act.target_colour:
            for wanted, found in ((act.target_shape, obj.shape), (act.target_size, obj.size)):
                if wanted not in (None, found):
                    raise ValueError(f"The {obj.colour} object is a {obj.size} {obj.shape}, not {wanted}.")
            return body
    there = ", ".join(f"{obj.colour} {obj.shape}" for obj in scene.objects) or "nothing"
    raise ValueError(f"There is no {act.target_colour} object in the scene; it has: {there}.")


def _check_new_colours(scene: Scene, stage: Sequence[Act]) -> None:
    taken = {obj.colour for obj in scene.objects}
    for act in stage:
        new = {"appear": act.target_colour, "turn": act.argument}.get(act.verb)
        if new in taken:
            raise ValueError(
                f"There is already a {new} object in the scene; use a colour that it does not have."
            )
        taken |= {new} if new else set()


def _begin(act: Act, body: _Body, bodies: list[_Body]) -> None:
    obj = body.obj
    if act.verb == "turn":
        assert act.argument
        body.old, body.mix = obj.colour, 0.0
        body.obj = SceneObject(act.argument, obj.shape, obj.size, obj.x, obj.y)
    elif act.verb in ("vanish", "explode"):
        body.solid = False
    elif act.verb == "appear":
        body.gone = not _make_room(body, bodies)
        body.solid = not body.gone
        body.radius = 0.0
    elif act.verb in ("grow", "shrink"):
        step = SIZES.index(obj.size) + (1 if act.verb == "grow" else -1)
        if 0 <= step < len(SIZES):
            body.radius = RADII[obj.size]
            body.obj = SceneObject(obj.colour, obj.shape, SIZES[step], obj.x, obj.y)


def _move(cast: Sequence[tuple[Act, _Body]], bodies: list[_Body], frame: int, num_frames: int) -> None:
    pixels = MOVE_DISTANCE * frame // num_frames - MOVE_DISTANCE * (frame - 1) // num_frames
    fall = _fallen(frame, num_frames) - _fallen(frame - 1, num_frames)
    # Pixel by pixel and taking turns, so that objects that meet do not jump over or into each other.
    for pixel in range(max(pixels, fall)):
        for act, body in cast:
            if act.verb == "fall" and pixel < fall:
                _shift(body, 0, 1, bodies, pushing=False)
            elif act.deed in DIRECTIONS and pixel < pixels:
                _shift(body, *DIRECTIONS[act.deed], bodies)


def _carry(
    movers: Sequence[_Body],
    bodies: list[_Body],
    way: tuple[int, int],
    frame: int,
    num_frames: int,
    pushing: bool,
) -> None:
    """Move bodies by a frame's share of a way, pixel by pixel, the foremost ones first."""
    before, now = (_arrived(number / num_frames) for number in (frame - 1, frame))
    for dx, dy, whole in ((1, 0, way[0]), (0, 1, way[1])):
        pixels = round(whole * now) - round(whole * before)
        sign = 1 if pixels > 0 else -1
        movers = sorted(movers, key=lambda body: -sign * (body.x * dx + body.y * dy))
        for _ in range(abs(pixels)):
            for body in movers:
                _shift(body, sign * dx, sign * dy, bodies, pushing=pushing)


def _snapped(pixels: float) -> int:
    return STEP * round(pixels / STEP)


def _arrived(share: float) -> float:
    """Return the share of its way that a control has gone: all of it after 3/4 of the clip, and then rest."""
    return min(1.0, share / 0.75)


def under_pointer(drag: Drag, scene: Scene) -> SceneObject | None:
    """Return the object of a scene that covers the pixel at which the pointer is pressed."""
    for obj, own in zip(as_seen(scene).objects, scene.objects, strict=True):
        cover = sprite(obj.shape, RADII[obj.size] if obj.radius is None else obj.radius)
        row, column = drag.y - obj.y + len(cover) // 2, drag.x - obj.x + len(cover) // 2
        if 0 <= row < len(cover) and 0 <= column < len(cover) and cover[row, column] > _TOUCHED:
            return own
    return None


def _fallen(frame: int, num_frames: int) -> int:
    # The whole height takes 7/8 of the stage, so the last frame is at rest.
    return round(FRAME_SIZE * min(1.0, frame / (0.875 * num_frames)) ** 2)


def _animate(act: Act, body: _Body, bodies: list[_Body], frame: int, num_frames: int) -> None:
    if act.verb == "turn":
        body.mix = min(1.0, frame / (num_frames // 2))
        body.old = body.old if body.mix < 1 else None
    elif act.verb in ("grow", "shrink", "appear"):
        _resize(act, body, bodies, min(1.0, frame / (num_frames // 2 + 1)))
    elif act.verb == "vanish":
        share = frame / (0.75 * num_frames)
        body.alpha, body.gone = 1 - share, share >= 1
        body.radius = RADII[body.obj.size] * (1 - 0.5 * share)
    elif act.verb == "explode":
        last = -(-7 * num_frames // 8)
        body.burst, body.gone = (frame - 1) / (last - 1), frame >= last
    elif act.verb == "jump":
        share = frame / num_frames
        body.lift = max(0, min(round(4 * _JUMP_HEIGHT * share * (1 - share)), body.y - body.half))


def _resize(act: Act, body: _Body, bodies: list[_Body], share: float) -> None:
    if body.radius is None or body.gone:
        return
    obj = body.obj
    target = RADII[obj.size]
    if act.verb == "appear":
        body.radius = target * share if share < 1 else None
        return
    start = RADII[SIZES[SIZES.index(obj.size) + (-1 if act.verb == "grow" else 1)]]
    radius, half = round(4 * (start + (target - start) * share)) / 4, body.half
    body.half = half_side(obj.shape, radius)
    if body.half > half and not _make_room(body, bodies):
        body.half = half
        if share == 1:
            # No room to grow: back to the previous size, which still fits.
            shrunk = SIZES[SIZES.index(obj.size) - 1]
            body.obj = SceneObject(obj.colour, obj.shape, shrunk, obj.x, obj.y)
            body.half = half_side(obj.shape, RADII[shrunk])
            body.radius = None
        return
    body.radius = radius if share < 1 else None


def _shift(
    mover: _Body, dx: int, dy: int, bodies: list[_Body], pushing: bool = True, ignored: _Body | None = None
) -> bool:
    """Move a body by one pixel, together with all bodies that it pushes, or move nothing."""
    chain = [mover]
    for body in chain:
        x, y, half = body.x + dx, body.y + dy, body.half
        # Walls stop what would leave the view, not what the camera left outside and comes back.
        if (dx < 0 and x < half) or (dx > 0 and x >= FRAME_SIZE - half):
            return False
        if (dy < 0 and y < half) or (dy > 0 and y >= FRAME_SIZE - half):
            return False
        for other in bodies:
            if other.solid and other is not ignored and other not in chain:
                reach = half + other.half
                if abs(x - other.x) <= reach and abs(y - other.y) <= reach:
                    if not pushing:
                        return False
                    chain.append(other)
    for body in chain:
        body.x += dx
        body.y += dy
    return True


def _make_room(grown: _Body, bodies: list[_Body]) -> bool:
    """Move a grown body inside the frame and push its neighbours away, or change nothing."""
    places = [(body, body.x, body.y) for body in bodies]
    grown.x, grown.y = (min(max(v, grown.half), FRAME_SIZE - 1 - grown.half) for v in (grown.x, grown.y))
    for _ in range(4 * FRAME_SIZE):
        other = next((body for body in bodies if _overlap(grown, body)), None)
        if other is None:
            if any(first.solid and _overlap(first, second) for first in bodies for second in bodies):
                break
            return True
        dx, dy = other.x - grown.x, other.y - grown.y
        ways = [(1 if dx >= 0 else -1, 0), (0, 1 if dy >= 0 else -1)]
        if abs(dy) > abs(dx):
            ways.reverse()
        if not any(
            _shift(other, *way, bodies, ignored=grown)
            or _shift(grown, -way[0], -way[1], bodies, ignored=other)
            for way in ways
        ):
            break
    for body, x, y in places:
        body.x, body.y = x, y
    return False


def _overlap(first: _Body, second: _Body) -> bool:
    if first is second or not second.solid:
        return False
    reach = first.half + second.half
    return abs(first.x - second.x) <= reach and abs(first.y - second.y) <= reach
