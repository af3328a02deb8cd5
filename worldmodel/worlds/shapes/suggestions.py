"""Start images and actions that the demo offers in the shapes world."""

import re
from collections.abc import Sequence

import numpy as np

from worldmodel.media import Frame
from worldmodel.worlds.base import StartImage, SuggestedAction, Target
from worldmodel.worlds.shapes.judge import find_objects
from worldmodel.worlds.shapes.language import parse_caption
from worldmodel.worlds.shapes.render import render
from worldmodel.worlds.shapes.scene import COLOURS, FRAME_SIZE, PALETTE, SHAPES

MAX_COVER = 0.5
"""Share of coloured pixels above which a frame is considered not to be of this world."""
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


def start_images() -> list[StartImage]:
    """Return the scenes of the demo's start page."""
    return [StartImage(title, render(parse_caption(text))) for title, text in _SCENES.items()]


def targets_in(frame: Frame) -> tuple[Target, ...]:
    """Return the objects in a frame, the largest first; empty if the frame is not one of this world."""
    if frame.shape != (FRAME_SIZE, FRAME_SIZE, 3):
        return ()
    found = find_objects(frame, "night")
    if sum(obj.area for obj in found) > MAX_COVER * FRAME_SIZE**2:
        return ()
    return tuple(_target(obj.colour, obj.shape) for obj in sorted(found, key=lambda one: -one.area))


def targets_named(text: str) -> tuple[Target, ...]:
    """Return the objects that a text names, each once."""
    return tuple(dict.fromkeys(_target(*match) for match in _OBJECT.findall(text.lower())))


def target_actions(targets: Sequence[Target]) -> list[list[SuggestedAction]]:
    """Return the actions of every target."""
    free = _free_colours(targets)
    return [_acts(target, free[index % len(free)]) for index, target in enumerate(targets)]


def newcomer(targets: Sequence[Target], seed: int) -> SuggestedAction:
    """Return an action by which a new object appears."""
    free, rng = _free_colours(targets), np.random.default_rng(seed)
    colour, shape = free[int(rng.integers(len(free)))], SHAPES[int(rng.integers(len(SHAPES)))]
    name = f"a small {colour} {shape}"
    return SuggestedAction(
        f"+ {name}", f"{name} appears at the {NEWCOMER_ZONES[int(rng.integers(len(NEWCOMER_ZONES)))]}"
    )


def _target(colour: str, shape: str) -> Target:
    return Target(f"{colour} {shape}", PALETTE[colour])


def _free_colours(targets: Sequence[Target]) -> list[str]:
    taken = {target.name.split()[0] for target in targets}
    return [colour for colour in COLOURS if colour not in taken] or list(COLOURS)


def _acts(target: Target, colour: str) -> list[SuggestedAction]:
    acts = {
        "←": "moves left",
        "→": "moves right",
        "↑": "moves up",
        "↓": "moves down",
        "jump": "jumps",
        "grow": "grows",
        "shrink": "shrinks",
        "turn": f"turns {colour}",
        "vanish": "vanishes",
        "explode": "explodes",
    }
    return [
        SuggestedAction(label, f"the {target.name} {act}", PALETTE[colour] if label == "turn" else None)
        for label, act in acts.items()
    ]
