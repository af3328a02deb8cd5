"""The shapes world behind the library's protocol."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from worldmodel import shapes
from worldmodel.config import ImageSize
from worldmodel.episodes import StartImage
from worldmodel.media import Frame
from worldmodel.shapes.recording import ShapesEpisodes
from worldmodel.shapes.scene import COLOURS, FRAME_SIZE, PALETTE, SHAPES
from worldmodel.shapes.source import LABEL_WORDS
from worldmodel.worlds.base import SuggestedAction, Target, World

if TYPE_CHECKING:
    from worldmodel.eval.suite import EvalSuite
    from worldmodel.recording.episode import Recordable

MAX_COVER = 0.5
"""Share of coloured pixels above which a frame is not one of this world."""
NEWCOMER_ZONES = ("top left", "bottom right", "center", "top right", "bottom left")

_OBJECT = re.compile(rf"\b({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})\b")
_SCENES = {
    "First steps": "dusk background, a medium red ball at the left, a small yellow triangle at the top "
    "right, a small blue box at the bottom",
    "Crossing": "dusk background, a large yellow ball at the left, a small cyan cross at the right",
    "Crowd": "forest background, a small red box at the top left, a medium white diamond at the center, "
    "a small orange triangle at the bottom, a small purple ball at the right",
    "Still life": "slate background, a large orange diamond at the center, a small green ball at the left",
    "One box": "night background, a medium cyan box at the bottom",
}
_ACTS = {
    "←": "moves left",
    "→": "moves right",
    "↑": "moves up",
    "↓": "moves down",
    "jump": "jumps",
    "grow": "grows",
    "shrink": "shrinks",
    "turn": "turns {colour}",
    "vanish": "vanishes",
    "explode": "explodes",
}
"""Suggested actions of an object by the label of their button."""


class ShapesWorld(World):
    """Shapes of eight colours on dark backgrounds that obey sentences; see the package."""

    name = "shapes"

    def recordable(self, seed: int, rounds: int, size: ImageSize | None = None) -> "Recordable":
        return ShapesEpisodes(seed, rounds, size)

    def documents(self, rng: np.random.Generator) -> Iterator[str]:
        return shapes.documents(rng)

    def label_words(self) -> Mapping[str, Sequence[str]]:
        return LABEL_WORDS

    def start(self, rng: np.random.Generator) -> Mapping[str, Any]:
        return {"observation": shapes.render(shapes.random_scene(rng))}

    def eval_suite(self) -> "EvalSuite":
        from worldmodel.shapes.evaluation.suite import ShapesSuite

        return ShapesSuite()

    def start_images(self) -> Sequence[StartImage]:
        return [
            StartImage(title, shapes.render(shapes.parse_caption(text))) for title, text in _SCENES.items()
        ]

    def targets_in(self, frame: Frame) -> tuple[Target, ...]:
        if frame.shape != (FRAME_SIZE, FRAME_SIZE, 3):
            return ()
        found = shapes.find_objects(frame, "night")
        if sum(obj.area for obj in found) > MAX_COVER * FRAME_SIZE**2:
            return ()
        return tuple(_target(obj.colour, obj.shape) for obj in sorted(found, key=lambda one: -one.area))

    def targets_named(self, text: str) -> tuple[Target, ...]:
        return tuple(dict.fromkeys(_target(*match) for match in _OBJECT.findall(text.lower())))

    def target_actions(self, targets: Sequence[Target]) -> list[list[SuggestedAction]]:
        free = _free_colours(targets)
        return [_acts(target, free[index % len(free)]) for index, target in enumerate(targets)]

    def other_actions(self, targets: Sequence[Target], seed: int) -> list[SuggestedAction]:
        """Return an action by which a new object appears."""
        if not targets:
            return []
        rng = np.random.default_rng(seed)
        colour, shape, zone = (
            words[int(rng.integers(len(words)))] for words in (_free_colours(targets), SHAPES, NEWCOMER_ZONES)
        )
        name = f"a small {colour} {shape}"
        return [SuggestedAction(f"+ {name}", f"{name} appears at the {zone}")]


def _target(colour: str, shape: str) -> Target:
    return Target(f"{colour} {shape}", PALETTE[colour])


def _free_colours(targets: Sequence[Target]) -> list[str]:
    taken = {target.name.split()[0] for target in targets}
    return [colour for colour in COLOURS if colour not in taken] or list(COLOURS)


def _acts(target: Target, colour: str) -> list[SuggestedAction]:
    return [
        SuggestedAction(
            label,
            f"the {target.name} {act}".format(colour=colour),
            PALETTE[colour] if label == "turn" else None,
        )
        for label, act in _ACTS.items()
    ]
