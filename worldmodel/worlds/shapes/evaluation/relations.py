"""References to objects by their place or size: "the one next to the box"."""

import math

from worldmodel.worlds.shapes import SIZES, Scene, SceneObject

CLEAR = 6
"""Pixels by which an object must be further out than others, so that a viewer agrees with the relation."""
_NEARER = 1.5

_EXTREMES = {"leftmost": (1, 0), "rightmost": (-1, 0), "topmost": (0, 1), "lowest": (0, -1)}
_SIDES = {"to the left of": (1, 0), "to the right of": (-1, 0), "above": (0, 1), "below": (0, -1)}


def relations(scene: Scene, obj: SceneObject) -> list[str]:
    """Return the references that fit this object of the scene and no other one."""
    others = [other for other in scene.objects if other is not obj]
    if not others:
        return []
    descriptions = [
        f"the {word} one"
        for word, way in _EXTREMES.items()
        if all(_along(other, way) - _along(obj, way) >= CLEAR for other in others)
    ]
    sizes = [SIZES.index(other.size) for other in others]
    if SIZES.index(obj.size) > max(sizes):
        descriptions.append("the biggest one")
    if SIZES.index(obj.size) < min(sizes):
        descriptions.append("the smallest one")
    for landmark in others:
        rest = [other for other in others if other is not landmark]
        name = _name(scene, landmark)
        for words, way in _SIDES.items():
            border = _along(landmark, way)
            if border - _along(obj, way) >= CLEAR and all(_along(other, way) >= border for other in rest):
                descriptions.append(f"the one {words} {name}")
        if all(_distance(other, landmark) >= _NEARER * _distance(obj, landmark) for other in rest):
            descriptions.append(f"the one next to {name}")
    return descriptions


def _along(obj: SceneObject, way: tuple[int, int]) -> int:
    return obj.x * way[0] + obj.y * way[1]


def _distance(first: SceneObject, second: SceneObject) -> float:
    return math.hypot(first.x - second.x, first.y - second.y)


def _name(scene: Scene, obj: SceneObject) -> str:
    """Return a name of an object, by its shape alone where no other one has it."""
    alone = sum(other.shape == obj.shape for other in scene.objects) == 1
    return f"the {obj.shape}" if alone else f"the {obj.colour} {obj.shape}"
