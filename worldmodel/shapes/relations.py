"""References to objects by their place or size: "the one next to the box"."""

import math
from dataclasses import dataclass

from worldmodel.shapes.scene import SIZES, Scene, SceneObject

CLEAR = 6
"""Pixels by which an object must be further out than others, so that a viewer agrees with the relation."""
_NEARER = 1.5
_WAYS = ((1, 0), (-1, 0), (0, 1), (0, -1))


@dataclass(frozen=True, slots=True)
class RelationWords:
    """Words for relations; the four of a field are for left, right, up and down.

    Attributes:
        extremes: For the object that is furthest out.
        sides: For an object beside another, whose name follows.
        biggest: For the object of the largest size.
        smallest: For the object of the smallest size.
        near: For the object nearest to another, whose name follows.
    """

    extremes: tuple[str, str, str, str]
    sides: tuple[str, str, str, str]
    biggest: str
    smallest: str
    near: str


EVALUATED = RelationWords(
    ("the leftmost one", "the rightmost one", "the topmost one", "the lowest one"),
    ("the one to the left of", "the one to the right of", "the one above", "the one below"),
    "the biggest one",
    "the smallest one",
    "the one next to",
)
"""The words of the split `paraphrases`."""


def relations(scene: Scene, obj: SceneObject, words: RelationWords = EVALUATED) -> list[str]:
    """Return the references that fit this object of the scene and no other one."""
    others = [other for other in scene.objects if other is not obj]
    if not others:
        return []
    descriptions = [
        phrase
        for phrase, way in zip(words.extremes, _WAYS, strict=True)
        if all(_along(other, way) - _along(obj, way) >= CLEAR for other in others)
    ]
    sizes = [SIZES.index(other.size) for other in others]
    if SIZES.index(obj.size) > max(sizes):
        descriptions.append(words.biggest)
    if SIZES.index(obj.size) < min(sizes):
        descriptions.append(words.smallest)
    for landmark in others:
        rest = [other for other in others if other is not landmark]
        name = _name(scene, landmark)
        for phrase, way in zip(words.sides, _WAYS, strict=True):
            border = _along(landmark, way)
            if border - _along(obj, way) >= CLEAR and all(_along(other, way) >= border for other in rest):
                descriptions.append(f"{phrase} {name}")
        if all(_distance(other, landmark) >= _NEARER * _distance(obj, landmark) for other in rest):
            descriptions.append(f"{words.near} {name}")
    return descriptions


def _along(obj: SceneObject, way: tuple[int, int]) -> int:
    return obj.x * way[0] + obj.y * way[1]


def _distance(first: SceneObject, second: SceneObject) -> float:
    return math.hypot(first.x - second.x, first.y - second.y)


def _name(scene: Scene, obj: SceneObject) -> str:
    """Return a name of an object, by its shape alone where no other one has it."""
    alone = sum(other.shape == obj.shape for other in scene.objects) == 1
    return f"the {obj.shape}" if alone else f"the {obj.colour} {obj.shape}"
