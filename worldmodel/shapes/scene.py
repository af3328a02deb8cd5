"""Scenes: objects of eight colours, five shapes and three sizes on one of four dark backgrounds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

FRAME_SIZE = 64
MAX_ZOOM = 1.5

# Backgrounds are dark and "white" is a light grey so that an edge pixel, half colour and half background,
# is never nearer to a third colour: finding objects in pixels stays a nearest-colour lookup.
PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (255, 10, 45),
    "orange": (255, 150, 0),
    "yellow": (225, 205, 60),
    "green": (0, 226, 16),
    "cyan": (42, 220, 224),
    "blue": (60, 48, 255),
    "purple": (192, 4, 221),
    "white": (195, 200, 195),
}
COLOURS: tuple[str, ...] = tuple(PALETTE)
SHAPES: tuple[str, ...] = ("ball", "box", "triangle", "diamond", "cross")
SIZES: tuple[str, ...] = ("small", "medium", "large")
RADII: dict[str, float] = {"small": 5.5, "medium": 7.5, "large": 10.0}
BACKGROUNDS: tuple[str, ...] = ("night", "forest", "slate", "dusk")
ZONES: tuple[str, ...] = (
    "top left",
    "top",
    "top right",
    "left",
    "center",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)

# Half the side of a shape's square outline at radius 1, chosen so that every shape covers pi.
EXTENTS: dict[str, float] = {
    "ball": 1.0,
    "box": math.sqrt(math.pi) / 2,
    "triangle": math.sqrt(math.pi / 2),
    "diamond": math.sqrt(math.pi / 2),
    "cross": math.sqrt(9 * math.pi / 20),
}

_ZONE_COORDINATES = (11, 32, 52)
_COUNT_WEIGHTS = (0.15, 0.35, 0.35, 0.15)


@dataclass(frozen=True, slots=True)
class SceneObject:
    """One object of a scene, at an integer pixel position.

    The fields after `y` describe an object during an action; at rest they have their defaults.

    Attributes:
        colour: One of `COLOURS`.
        shape: One of `SHAPES`.
        size: One of `SIZES`; of a growing or shrinking object, its final size.
        x: Column of the centre, in pixels.
        y: Row of the centre, in pixels, counted from the top.
        radius: Drawn radius in pixels; None follows from the size.
        alpha: Opacity in 0..1.
        previous_colour: Original colour of an object that changes its colour.
        mix: Share of `colour` against `previous_colour` in 0..1.
        lift: Height of a jump, in pixels.
        burst: Progress of an explosion in 0..1; None without one.
    """

    colour: str
    shape: str
    size: str
    x: int
    y: int
    radius: float | None = None
    alpha: float = 1.0
    previous_colour: str | None = None
    mix: float = 1.0
    lift: int = 0
    burst: float | None = None

    @property
    def transient(self) -> bool:
        """Whether the object is leaving the scene."""
        return self.alpha < 1.0 or self.burst is not None

    @property
    def at_rest(self) -> bool:
        """Whether the object is drawn by its first five attributes alone."""
        return not self.transient and self.radius is None and self.previous_colour is None and self.lift == 0


@dataclass(frozen=True, slots=True)
class Scene:
    """A background and the objects on it, whose colours are pairwise distinct.

    The view is a window into a plane without end: objects that the camera left are outside of it and come
    back with it. The background is at infinity and never moves.

    Attributes:
        background: One of `BACKGROUNDS`.
        objects: Objects, at positions in the view as it is without magnification.
        zoom: Magnification of the view about its centre, 1 to `MAX_ZOOM`.
    """

    background: str
    objects: tuple[SceneObject, ...] = ()
    zoom: float = 1.0

    def find(self, colour: str) -> SceneObject | None:
        """Return the object of this colour, or None."""
        return next((obj for obj in self.objects if obj.colour == colour), None)


@lru_cache(maxsize=4096)
def half_side(shape: str, radius: float) -> int:
    """Return half the side of a shape's square outline, which collides with walls and objects, in pixels."""
    return math.ceil(EXTENTS[shape] * radius - 0.5)


def half_side_of(obj: SceneObject) -> int:
    """Return the half side of the object's square outline, in pixels."""
    return half_side(obj.shape, RADII[obj.size] if obj.radius is None else obj.radius)


def apart(first: SceneObject, second: SceneObject, margin: int = 0) -> bool:
    """Return whether two objects' square outlines share no pixel and leave `margin` pixels between them."""
    reach = half_side_of(first) + half_side_of(second) + margin
    return abs(first.x - second.x) > reach or abs(first.y - second.y) > reach


def as_seen(scene: Scene) -> Scene:
    """Return the scene without magnification that looks like this one: larger objects, further apart."""
    if scene.zoom == 1:
        return scene
    zoom, middle = scene.zoom, (FRAME_SIZE - 1) / 2
    objects = tuple(
        replace(
            obj,
            x=round(middle + (obj.x - middle) * zoom),
            y=round(middle + (obj.y - middle) * zoom),
            radius=zoom * (RADII[obj.size] if obj.radius is None else obj.radius),
            lift=round(obj.lift * zoom),
        )
        for obj in scene.objects
    )
    return Scene(scene.background, objects)


def in_view(scene: Scene) -> tuple[SceneObject, ...]:
    """Return the objects that are whole in the view."""
    found: list[SceneObject] = []
    for obj, seen in zip(scene.objects, as_seen(scene).objects, strict=True):
        half = half_side_of(seen)
        if all(half <= place < FRAME_SIZE - half for place in (seen.x, seen.y)):
            found.append(obj)
    return tuple(found)


def zone_center(zone: str) -> tuple[int, int]:
    """Return the centre (x, y) of a zone, in pixels.

    Raises:
        ValueError: there is no such zone.
    """
    if zone not in ZONES:
        raise ValueError(f"There is no zone {zone!r}; use one of {', '.join(ZONES)}.")
    row, column = divmod(ZONES.index(zone), 3)
    return _ZONE_COORDINATES[column], _ZONE_COORDINATES[row]


def zone_of(x: float, y: float) -> str:
    """Return the name of the zone that a position lies in."""
    column, row = (min(2, max(0, int(value * 3 // FRAME_SIZE))) for value in (x, y))
    return ZONES[3 * row + column]


def place_in_zone(colour: str, shape: str, size: str, zone: str) -> SceneObject:
    """Return an object at the centre of a zone, moved inwards if it would leave the frame."""
    half = half_side(shape, RADII[size])
    x, y = (min(max(value, half), FRAME_SIZE - 1 - half) for value in zone_center(zone))
    return SceneObject(colour, shape, size, x, y)


def random_scene(rng: np.random.Generator, num_objects: int | None = None) -> Scene:
    """Draw a scene of objects that do not touch.

    Args:
        rng: Random generator.
        num_objects: Number of objects, random by default; fewer if they do not fit.

    Raises:
        ValueError: `num_objects` is not from 0 to 8.
    """

    def place(colour: str, shape: str, size: str, *_: Any) -> SceneObject:
        half = half_side(shape, RADII[size])
        x, y = rng.integers(half, FRAME_SIZE - half, 2).tolist()
        return SceneObject(colour, shape, size, x, y)

    return _fill(rng, _draw_count(rng, num_objects), place)


def zone_scene(rng: np.random.Generator, num_objects: int | None = None) -> Scene:
    """Draw a scene whose objects are at the centres of different zones, so that its caption is exact.

    Args:
        rng: Random generator.
        num_objects: Number of objects, random by default; fewer if they do not fit.

    Raises:
        ValueError: `num_objects` is not from 0 to 8.
    """
    count = _draw_count(rng, num_objects)
    zones = [ZONES[index] for index in rng.permutation(len(ZONES))]

    def place(colour: str, shape: str, size: str, attempt: int, others: Sequence[SceneObject]) -> SceneObject:
        free = [zone for zone in zones if zone not in {zone_of(other.x, other.y) for other in others}]
        return place_in_zone(colour, shape, size, free[attempt % len(free)])

    return _fill(rng, count, place)


def _fill(rng: np.random.Generator, count: int, place: Callable[..., SceneObject]) -> Scene:
    """Draw up to `count` objects of different colours, placed so that they do not touch."""
    objects: list[SceneObject] = []
    for colour in rng.permutation(len(COLOURS))[:count].tolist():
        for attempt in range(24):
            # Late attempts are small, so a crowded scene loses size before it loses objects.
            size = SIZES[int(rng.integers(3))] if attempt < 12 else "small"
            shape = SHAPES[int(rng.integers(len(SHAPES)))]
            obj = place(COLOURS[colour], shape, size, attempt, objects)
            if all(apart(obj, other, margin=1) for other in objects):
                objects.append(obj)
                break
    return Scene(BACKGROUNDS[int(rng.integers(len(BACKGROUNDS)))], tuple(objects))


def _draw_count(rng: np.random.Generator, num_objects: int | None) -> int:
    if num_objects is None:
        return 1 + int(rng.choice(len(_COUNT_WEIGHTS), p=_COUNT_WEIGHTS))
    if not 0 <= num_objects <= len(COLOURS):
        raise ValueError(f"num_objects is {num_objects}; use 0 to {len(COLOURS)}, one per colour.")
    return num_objects
