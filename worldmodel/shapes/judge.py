"""The judge of the shapes world, which finds objects in pixels and compares them with the true scene."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from worldmodel.shapes.physics import Plan
from worldmodel.shapes.render import backdrop, render, sprite
from worldmodel.shapes.scene import (
    COLOURS,
    FRAME_SIZE,
    PALETTE,
    RADII,
    SHAPES,
    Scene,
    SceneObject,
    as_seen,
    half_side_of,
)

MIN_AREA = 25.0
PLACE_TOLERANCE = 3.0
NAMED_PLACE_TOLERANCE = 4.0
AREA_RATIOS = (0.6, 1.67)

_WINDOW = 55
_MIDDLE = _WINDOW // 2
_MAX_QUARTERS = 60
"""Radius of the largest templates, of a large object as the camera magnifies it, in quarters of a pixel."""
# Rings of backdrop pixels around an object that count with their share of its colour: one for sharp edges,
# one more for the blur of a codec.
_EDGE = 2
_HIDDEN = 0.5
_COVERED = 0.9
_PALETTE = np.array(list(PALETTE.values()), np.float32)


@dataclass(frozen=True, slots=True)
class Found:
    """An object found in a frame.

    Attributes:
        colour: One of `COLOURS`.
        shape: The most similar one of `SHAPES`.
        x: Column of its centroid, in pixels.
        y: Row of its centroid, in pixels.
        area: Its area in pixels.
    """

    colour: str
    shape: str
    x: float
    y: float
    area: float


@dataclass(frozen=True, slots=True)
class ObjectVerdict:
    """The comparison of one true object with the frame.

    Attributes:
        colour: Its true colour, by which it is found.
        present: Whether enough pixels of this colour were found.
        exempt: Whether it is hidden or leaving in the true scene, and therefore not judged.
        distance: Distance of the centroid found from the true one, in pixels; infinite if not present.
        size: Whether its area is near the true one.
        shape: Whether its shape is the true one.
    """

    colour: str
    present: bool
    exempt: bool
    distance: float
    size: bool
    shape: bool

    @property
    def place(self) -> bool:
        """Whether its position is right."""
        return self.distance <= PLACE_TOLERANCE

    @property
    def right(self) -> bool:
        """Whether its presence, position, size and shape are right."""
        return self.right_within(PLACE_TOLERANCE)

    def right_within(self, tolerance: float) -> bool:
        """Return whether everything is right, with a position at most `tolerance` pixels off."""
        return self.exempt or (self.present and self.distance <= tolerance and self.size and self.shape)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of a frame with the truth.

    Attributes:
        objects: One verdict for every true object.
        extra: Colours found in the frame that are not in the truth.
    """

    objects: tuple[ObjectVerdict, ...]
    extra: tuple[str, ...]

    @property
    def strict(self) -> bool:
        """Whether every true object is right and there are no others."""
        return not self.extra and all(obj.right for obj in self.objects)

    def named_right(self, plan: Plan) -> bool:
        """Return whether the objects that the plan acts on are right, or absent if the plan removes them.

        For a plan that acts on no object, the whole frame must be right.
        """
        named, gone = _fates(plan)
        if not named | gone:
            return self.strict
        verdicts = [obj for obj in self.objects if obj.colour in named]
        return not gone & set(self.extra) and all(obj.right_within(NAMED_PLACE_TOLERANCE) for obj in verdicts)

    def others_right(self, plan: Plan) -> bool:
        """Return whether all other objects are right, and no new one has appeared."""
        named, gone = _fates(plan)
        rest = [obj for obj in self.objects if obj.colour not in named]
        return not set(self.extra) - gone and all(obj.right for obj in rest)


def find_objects(
    frame: NDArray[np.uint8], background: str, ignored: Sequence[SceneObject] = ()
) -> list[Found]:
    """Find the objects in the pixels of a frame.

    Every pixel is assigned to the nearest of the backdrop and the eight colours; each colour is one object.

    Args:
        frame: Pixels of shape [h, w, 3].
        background: Name of the background.
        ignored: Objects whose pixels are not read.

    Raises:
        ValueError: the frame has another size than this world, or there is no such background.
    """
    if frame.shape != (FRAME_SIZE, FRAME_SIZE, 3):
        raise ValueError(f"The frame has shape {frame.shape}; pass one of ({FRAME_SIZE}, {FRAME_SIZE}, 3).")
    pixels = frame.reshape(-1, 3).astype(np.float32)
    empty = backdrop(background).reshape(-1, 3).astype(np.float32)
    # |p - c|^2 without |p|^2, which all candidates share.
    to_colours = (_PALETTE**2).sum(1) - 2 * pixels @ _PALETTE.T
    to_empty = (empty**2).sum(1) - 2 * (pixels * empty).sum(1)
    labels = np.where(to_colours.min(1) < to_empty, to_colours.argmin(1), -1).reshape(FRAME_SIZE, FRAME_SIZE)
    for obj in ignored:
        reach = half_side_of(obj) + _EDGE
        rows, columns = (slice(max(0, place - reach), place + reach + 1) for place in (obj.y, obj.x))
        labels[rows, columns] = -1
    counts = np.bincount(labels[labels >= 0], minlength=len(COLOURS))
    candidates = np.flatnonzero(counts >= 0.6 * MIN_AREA).tolist()
    objects = (_measure(frame, backdrop(background), labels, label) for label in candidates)
    return [obj for obj in objects if obj.area >= MIN_AREA]


def judge(frame: NDArray[np.uint8], truth: Scene) -> Verdict:
    """Compare the objects found in a frame with the true scene.

    An object on its way to another colour is not read, since it may look like any other.

    Args:
        frame: Pixels of shape [h, w, 3].
        truth: The true scene.

    Raises:
        ValueError: the frame has another size than this world.
    """
    truth = as_seen(truth)
    expected = {obj.colour: obj for obj in _found_in_truth(truth)}
    found = {obj.colour: obj for obj in find_objects(frame, truth.background, _mixed(truth))}
    verdicts = tuple(_compare(obj, expected.get(obj.colour), found.get(obj.colour)) for obj in truth.objects)
    known = {obj.colour for obj in truth.objects} | set(expected)
    return Verdict(verdicts, tuple(colour for colour in found if colour not in known))


@lru_cache(maxsize=1024)
def _found_in_truth(truth: Scene) -> tuple[Found, ...]:
    return tuple(find_objects(render(truth), truth.background, _mixed(truth)))


def _mixed(truth: Scene) -> list[SceneObject]:
    return [obj for obj in truth.objects if obj.previous_colour is not None]


def _compare(obj: SceneObject, expected: Found | None, found: Found | None) -> ObjectVerdict:
    radius = RADII[obj.size] if obj.radius is None else obj.radius
    seen = 0.0 if expected is None else expected.area / (math.pi * radius**2 + 1e-6)
    exempt = obj.transient or obj.previous_colour is not None or seen < _HIDDEN
    if expected is None or found is None:
        return ObjectVerdict(obj.colour, found is not None, exempt, math.inf, False, False)
    shapes = (obj.shape,) if seen >= _COVERED else (obj.shape, expected.shape)
    return ObjectVerdict(
        obj.colour,
        True,
        exempt,
        math.hypot(found.x - expected.x, found.y - expected.y),
        AREA_RATIOS[0] <= found.area / expected.area <= AREA_RATIOS[1],
        found.shape in shapes,
    )


def _measure(
    frame: NDArray[np.uint8], empty: NDArray[np.uint8], labels: NDArray[np.int64], label: int
) -> Found:
    """Measure the pixels of a colour, with the partly covered ones at its edge."""
    own = labels == label
    near = own
    for _ in range(_EDGE):
        near = np.pad(near, 1)
        near = near[1:-1, 1:-1] | near[:-2, 1:-1] | near[2:, 1:-1] | near[1:-1, :-2] | near[1:-1, 2:]
    ys, xs = np.nonzero(own | (near & (labels == -1)))
    under = empty[ys, xs].astype(np.float32)
    towards = _PALETTE[label] - under
    cover = ((frame[ys, xs] - under) * towards).sum(1) / (towards**2).sum(1)
    cover = np.clip(cover, 0, 1)
    area = float(cover.sum())
    x, y = float((cover * xs).sum() / area), float((cover * ys).sum() / area)
    return Found(COLOURS[label], _nearest_shape(cover, xs - x, ys - y, area), x, y, area)


def _nearest_shape(
    cover: NDArray[np.float32], dx: NDArray[np.floating], dy: NDArray[np.floating], area: float
) -> str:
    templates, sums = _templates(min(round(4 * math.sqrt(area / math.pi)), _MAX_QUARTERS))
    window = np.zeros((_WINDOW, _WINDOW), np.float32)
    rows, columns = np.rint(dy).astype(int) + _MIDDLE, np.rint(dx).astype(int) + _MIDDLE
    within = (rows >= 0) & (rows < _WINDOW) & (columns >= 0) & (columns < _WINDOW)
    window[rows[within], columns[within]] = cover[within]
    shared = np.minimum(templates, window).sum((1, 2))
    # Pixels outside the window count against every shape.
    best = int((shared / (sums + area - shared)).argmax())
    return SHAPES[best // 9]


@lru_cache(maxsize=64)
def _templates(quarters: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return every shape at nine shifts around its centroid, `[shapes * 9, h, w]`, and their areas."""
    stack = np.zeros((len(SHAPES) * 9, _WINDOW, _WINDOW), np.float32)
    for index, shape in enumerate(SHAPES):
        patch = sprite(shape, quarters / 4)
        reach = patch.shape[0] // 2
        drop = round(float((patch.sum(1) * np.arange(-reach, reach + 1)).sum() / patch.sum()))
        for shift in range(9):
            top, left = _MIDDLE - reach - drop + shift // 3 - 1, _MIDDLE - reach + shift % 3 - 1
            stack[9 * index + shift, top : top + 2 * reach + 1, left : left + 2 * reach + 1] = patch
    return stack, stack.sum((1, 2))


def _fates(plan: Plan) -> tuple[set[str], set[str]]:
    """Return the final colours of the objects that a plan acts on, and the colours that it removes."""
    named: set[str] = set()
    gone: set[str] = set()
    for act in plan.acts:
        colours = {act.target_colour} if act.target_colour else set()
        if act.verb in ("vanish", "explode", "turn"):
            named, gone = named - colours, gone | colours
            colours = {act.argument} if act.verb == "turn" and act.argument else set()
        named, gone = named | colours, gone - colours
    return named, gone
