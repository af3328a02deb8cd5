"""What the demo offers: scenes to start from, and actions that fit what is seen."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

import numpy as np

from worldmodel.media.files import Picture, read_image
from worldmodel.worlds.shapes import COLOURS, FRAME_SIZE, SHAPES, parse_caption, render
from worldmodel.worlds.shapes.judge import find_things

MAX_THINGS = 5
"""More rows of suggestions than this would push the film strip off the screen."""
BUSY = 0.5
"""Share of coloured pixels above which a frame is no scene of shapes, but something else."""

_THING = re.compile(rf"\b({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})\b")
_DRAWN = {
    "Crossing": "dusk background, a large yellow ball at the left, a small cyan cross at the right",
    "Crowd": "forest background, a small red box at the top left, a medium white diamond at the center, "
    "a small orange triangle at the bottom, a small purple ball at the right",
    "Still life": "slate background, a large orange diamond at the center, a small green ball at the left",
    "One box": "night background, a medium cyan box at the bottom",
}


@dataclass(frozen=True)
class Scene:
    """A scene to start from."""

    title: str
    frame: Picture


@dataclass(frozen=True)
class Thing:
    """Something that can be acted on by name."""

    colour: str
    shape: str

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}"


@lru_cache(maxsize=1)
def examples() -> tuple[Scene, ...]:
    """Return the scenes that the start page shows."""
    first = files("worldmodel.demo").joinpath("first_frame.png").read_bytes()
    drawn = (Scene(title, render(parse_caption(told))) for title, told in _DRAWN.items())
    return (Scene("First steps", read_image(first, FRAME_SIZE)), *drawn)


def find(frame: Picture) -> tuple[Thing, ...]:
    """Return the things in a frame of the shapes world; none where it shows something else."""
    if frame.shape != (FRAME_SIZE, FRAME_SIZE, 3):
        return ()
    found = find_things(frame, "night")
    if sum(thing.area for thing in found) > BUSY * FRAME_SIZE**2:
        return ()
    return tuple(Thing(thing.colour, thing.shape) for thing in sorted(found, key=lambda one: -one.area))


def named(text: str) -> tuple[Thing, ...]:
    """Return the things that a text names, each once."""
    return tuple(dict.fromkeys(Thing(*match) for match in _THING.findall(text.lower())))


def suggestions(things: Iterable[Thing]) -> list[tuple[Thing, list[tuple[str, str]]]]:
    """Return what each thing could do, as short labels and whole sentences."""
    things = list(things)[:MAX_THINGS]
    taken = {thing.colour for thing in things}
    free = [colour for colour in COLOURS if colour not in taken] or list(COLOURS)
    return [(thing, _deeds(thing, free[index % len(free)])) for index, thing in enumerate(things)]


def _deeds(thing: Thing, colour: str) -> list[tuple[str, str]]:
    deeds = {
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
    return [(label, f"the {thing} {deed}") for label, deed in deeds.items()]


def newcomer(things: Iterable[Thing], turn: int) -> str:
    """Return a sentence by which something new appears."""
    taken = {thing.colour for thing in things}
    free = [colour for colour in COLOURS if colour not in taken] or list(COLOURS)
    places = ("top left", "bottom right", "center", "top right", "bottom left")
    rng = np.random.default_rng(turn)
    colour, shape = free[int(rng.integers(len(free)))], SHAPES[int(rng.integers(len(SHAPES)))]
    return f"a small {colour} {shape} appears at the {places[int(rng.integers(len(places)))]}"
