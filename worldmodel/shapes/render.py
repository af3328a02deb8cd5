"""Rendering of scenes: cached anti-aliased sprites, blended onto a backdrop."""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from worldmodel.shapes.scene import (
    EXTENTS,
    FRAME_SIZE,
    PALETTE,
    RADII,
    SHAPES,
    Scene,
    SceneObject,
    as_seen,
)

_SUPERSAMPLING = 8
_SHARD_TRAVEL = 16.0
_WHITE_HOT = (245, 245, 225)

Colour = tuple[float, float, float]


@lru_cache(maxsize=8)
def backdrop(background: str) -> NDArray[np.uint8]:
    """Return the empty frame of a background, read-only, of shape [h, w, 3].

    Raises:
        ValueError: there is no such background.
    """
    frame = np.empty((FRAME_SIZE, FRAME_SIZE, 3), np.uint8)
    rows, columns = np.mgrid[:FRAME_SIZE, :FRAME_SIZE]
    if background == "night":
        frame[:] = (10, 14, 40)
    elif background == "forest":
        frame[:] = (8, 30, 14)
    elif background == "slate":
        tiles = ((rows // 8 + columns // 8) % 2).astype(bool)
        frame[:] = np.where(tiles[..., None], (34, 34, 37), (26, 26, 28))
    elif background == "dusk":
        share = (rows / (FRAME_SIZE - 1))[..., None]
        frame[:] = np.round((1 - share) * (34, 14, 38) + share * (12, 8, 20))
    else:
        raise ValueError(f"There is no background {background!r}; use one of night, forest, slate, dusk.")
    frame.flags.writeable = False
    return frame


def sprite(shape: str, radius: float) -> NDArray[np.float32]:
    """Return a shape's coverage in 0..1 around its centre pixel, read-only, of odd shape [n, n].

    Args:
        shape: One of `SHAPES`.
        radius: Radius of the ball of the same area in pixels; drawn to the nearest quarter.
    """
    return _sprite(shape, round(radius * 4))


@lru_cache(maxsize=1024)
def _sprite(shape: str, quarters: int) -> NDArray[np.float32]:
    assert shape in SHAPES
    extent = EXTENTS[shape] * quarters / 4
    reach = max(0, math.ceil(extent - 0.5))
    side = 2 * reach + 1
    steps = (np.arange(side * _SUPERSAMPLING) + 0.5) / _SUPERSAMPLING - side / 2
    x, y = steps[None, :], steps[:, None]
    if shape == "ball":
        filled = x**2 + y**2 <= extent**2
    elif shape == "box":
        filled = np.maximum(abs(x), abs(y)) <= extent
    elif shape == "diamond":
        filled = abs(x) + abs(y) <= extent
    elif shape == "triangle":
        filled = (abs(x) <= (y + extent) / 2) & (y <= extent)
    else:
        arms = np.minimum(abs(x), abs(y)) <= extent / 3
        filled = arms & (np.maximum(abs(x), abs(y)) <= extent)
    coverage = filled.reshape(side, _SUPERSAMPLING, side, _SUPERSAMPLING).mean((1, 3), dtype=np.float32)
    coverage.flags.writeable = False
    return coverage


@lru_cache(maxsize=4096)
def _paint(
    shape: str, quarters: int, colour: Colour, alpha: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    coverage = _sprite(shape, quarters)[..., None] * np.float32(alpha)
    # Spread over the three channels here because blending without broadcasting is twice as fast.
    keep = np.ascontiguousarray(np.broadcast_to(1 - coverage, (*coverage.shape[:2], 3)))
    return keep, coverage * np.asarray(colour, np.float32)


def render(scene: Scene) -> NDArray[np.uint8]:
    """Draw a scene as one frame of shape [h, w, 3]."""
    return render_clip((scene,))[0]


def render_clip(scenes: Sequence[Scene]) -> NDArray[np.uint8]:
    """Draw scenes that share a background as frames of shape [t, h, w, 3].

    Leaving and jumping objects are drawn in front of the others, which never overlap.
    """
    assert len({scene.background for scene in scenes}) == 1
    scenes = [as_seen(scene) for scene in scenes]
    canvas = np.empty((len(scenes), FRAME_SIZE, FRAME_SIZE, 3), np.float32)
    canvas[:] = backdrop(scenes[0].background)
    still = [
        obj for obj in scenes[0].objects if obj.at_rest and all(obj in scene.objects for scene in scenes)
    ]
    for obj in still:
        _draw(canvas, obj)
    for index, scene in enumerate(scenes):
        moving = [obj for obj in scene.objects if obj not in still]
        for obj in sorted(moving, key=_depth):
            _draw(canvas[index : index + 1], obj)
    canvas += 0.5
    return canvas.astype(np.uint8)


def _depth(obj: SceneObject) -> int:
    return 2 if obj.lift else 1 if obj.transient else 0


def _draw(canvas: NDArray[np.float32], obj: SceneObject) -> None:
    colour: Colour = PALETTE[obj.colour]
    if obj.previous_colour is not None:
        colour = _blend(PALETTE[obj.previous_colour], colour, obj.mix)
    radius = RADII[obj.size] if obj.radius is None else obj.radius
    y = obj.y - obj.lift
    if obj.burst is None:
        _blit(canvas, obj.shape, radius, colour, obj.alpha, obj.x, y)
    elif obj.burst == 0:
        _blit(canvas, obj.shape, radius * 1.15, _blend(colour, _WHITE_HOT, 0.6), 1.0, obj.x, y)
    else:
        distance = 0.3 * radius + _SHARD_TRAVEL * obj.burst
        shard = max(1.25, radius * (0.36 - 0.16 * obj.burst))
        for eighth in range(8):
            angle = (eighth + 0.5) * math.pi / 4
            shard_x = obj.x + round(distance * math.cos(angle))
            shard_y = y + round(distance * math.sin(angle))
            _blit(canvas, "ball", shard, colour, 1 - 0.5 * obj.burst, shard_x, shard_y)


def _blend(first: Colour, second: Colour, share: float) -> Colour:
    return tuple(a + (b - a) * share for a, b in zip(first, second, strict=True))  # type: ignore[return-value]


def _blit(
    canvas: NDArray[np.float32], shape: str, radius: float, colour: Colour, alpha: float, x: int, y: int
) -> None:
    keep, paint = _paint(shape, round(radius * 4), colour, alpha)
    reach = keep.shape[0] // 2
    top, left = y - reach, x - reach
    bottom, right = y + reach + 1, x + reach + 1
    if top < 0 or left < 0 or bottom > FRAME_SIZE or right > FRAME_SIZE:
        rows = slice(max(0, -top), max(0, FRAME_SIZE - top))
        columns = slice(max(0, -left), max(0, FRAME_SIZE - left))
        keep, paint = keep[rows, columns], paint[rows, columns]
        top, left = max(0, top), max(0, left)
    patch = canvas[:, top : max(0, bottom), left : max(0, right)]
    patch *= keep
    patch += paint
