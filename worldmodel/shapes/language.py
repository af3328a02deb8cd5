"""Sentences about scenes: actions and captions to text and back, and questions with answers."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from worldmodel.shapes.physics import DIRECTIONS, STAY, Act, Plan
from worldmodel.shapes.relations import CLEAR
from worldmodel.shapes.scene import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    SIZES,
    ZONES,
    Scene,
    SceneObject,
    place_in_zone,
    zone_of,
)

_SHAPE_WORDS = {shape: shape for shape in SHAPES} | {
    "circle": "ball",
    "square": "box",
    "rhombus": "diamond",
    "plus": "cross",
}
_SIZE_WORDS = {size: size for size in SIZES} | {"little": "small", "big": "large"}
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")
_PLURALS = {
    "ball": "balls",
    "box": "boxes",
    "triangle": "triangles",
    "diamond": "diamonds",
    "cross": "crosses",
}

# {o} the object acted on, {c} a new colour, {n} a new object, {z} a zone; the first is canonical.
_MOVE = ("{o} moves WAY", "{o} goes FAR", "{o} slides WAY", "move {o} WAY", "move {o} FAR", "{o} shifts FAR")
_PUSH = ("push {o} WAY", "push {o} FAR", "shove {o} WAY", "{o} is pushed WAY", "give {o} a push FAR")
_FAR = {"left": "to the left", "right": "to the right", "up": "upwards", "down": "downwards"}


def _towards(phrases: tuple[str, ...], direction: str) -> tuple[str, ...]:
    return tuple(phrase.replace("WAY", direction).replace("FAR", _FAR[direction]) for phrase in phrases)


_PHRASES: dict[tuple[str, str | None], tuple[str, ...]] = {
    **{(direction, None): _towards(_MOVE, direction) for direction in DIRECTIONS},
    **{("push", direction): _towards(_PUSH, direction) for direction in DIRECTIONS},
    ("grow", None): ("{o} grows", "{o} gets bigger", "make {o} bigger", "enlarge {o}", "{o} becomes larger"),
    ("shrink", None): ("{o} shrinks", "{o} gets smaller", "make {o} smaller", "{o} becomes smaller"),
    ("turn", None): (
        "{o} turns {c}",
        "{o} becomes {c}",
        "make {o} {c}",
        "paint {o} {c}",
        "{o} changes to {c}",
        "turn {o} {c}",
    ),
    ("vanish", None): ("{o} vanishes", "{o} disappears", "remove {o}", "{o} fades away", "make {o} vanish"),
    ("appear", None): (
        "a {n} appears at the {z}",
        "a {n} shows up at the {z}",
        "add a {n} at the {z}",
        "put a {n} at the {z}",
        "create a {n} at the {z}",
    ),
    ("explode", None): ("{o} explodes", "{o} blows up", "blow up {o}", "{o} bursts", "make {o} explode"),
    ("fall", None): ("{o} falls", "{o} falls down", "{o} drops", "drop {o}", "let {o} fall"),
    ("jump", None): ("{o} jumps", "{o} hops", "make {o} jump", "{o} leaps", "let {o} jump"),
    ("stay", None): (
        "nothing happens",
        "nothing moves",
        "everything stays still",
        "do nothing",
        "wait",
    ),
}


def plan_to_text(plan: Plan, scene: Scene, rng: np.random.Generator) -> str:
    """Return one of many sentences for a plan, all of which `parse` accepts.

    Args:
        plan: The plan.
        scene: The scene before it, for the sizes of objects.
        rng: Random generator for the choice of words.
    """
    sentences: list[str] = []
    for index, stage in enumerate(plan.stages):
        # The first stage may change sizes, so sentences of the second do not mention them.
        sentences.append(_join([_say(act, scene if index == 0 else None, rng) for act in stage], rng))
    if len(sentences) == 1:
        return sentences[0]
    return sentences[0] + (", then ", " and then ")[int(rng.integers(2))] + sentences[1]


def _join(parts: list[str], rng: np.random.Generator) -> str:
    if len(parts) == 2:
        return (" and " if rng.random() < 0.7 else " while ").join(parts)
    if len(parts) == 3 and rng.random() < 0.5:
        return f"{parts[0]}, {parts[1]} and {parts[2]}"
    return " and ".join(parts)


def _say(act: Act, scene: Scene | None, rng: np.random.Generator) -> str:
    phrases = _phrases(act)
    # The canonical phrase is more frequent than each of the others.
    choice = int(rng.integers(len(phrases))) if rng.random() < 0.75 else 0
    shape = act.target_shape
    if shape is not None and rng.random() < 0.1:
        shape = _pick([word for word, meant in _SHAPE_WORDS.items() if meant == shape], rng)
    obj = scene.find(act.target_colour) if scene is not None and act.target_colour else None
    size, draw = act.target_size, float(rng.random())
    if act.verb != "appear":
        if draw < 0.1:
            shape = None
        elif draw < 0.2 and obj is not None:
            size = _pick([word for word, meant in _SIZE_WORDS.items() if meant == obj.size], rng)
    return _fill(phrases[choice], act, shape, size)


def _pick(words: list[str], rng: np.random.Generator) -> str:
    return words[int(rng.integers(len(words)))]


def _phrases(act: Act) -> tuple[str, ...]:
    return _PHRASES[act.verb, act.argument if act.verb == "push" else None]


def _fill(phrase: str, act: Act, shape: str | None, size: str | None) -> str:
    noun = " ".join(word for word in (size, act.target_colour, shape or "one") if word)
    return phrase.format(o=f"the {noun}", n=noun, c=act.argument, z=act.argument)


def canonical_text(plan: Plan) -> str:
    """Return the canonical sentence of a plan, in which a push is a move, since both look the same."""
    stages: list[str] = []
    for stage in plan.stages:
        acts = [Act(a.deed, a.target_colour, a.target_shape) if a.verb == "push" else a for a in stage]
        stages.append(
            " and ".join(_fill(_phrases(act)[0], act, act.target_shape, act.target_size) for act in acts)
        )
    return ", then ".join(stages)


@lru_cache(maxsize=1)
def _patterns() -> list[tuple[re.Pattern[str], str, str | None]]:
    colour, shape = "|".join(COLOURS), "|".join(_SHAPE_WORDS)
    noun = rf"(?:(?P<size>{'|'.join(_SIZE_WORDS)}) )?(?P<colour>{colour}) (?P<shape>{shape}|one)"
    new = rf"(?P<size>{'|'.join(_SIZE_WORDS)}) (?P<colour>{colour}) (?P<shape>{shape})"
    zone = f"(?P<argument>{'|'.join(sorted(ZONES, key=len, reverse=True))})"
    gaps = {"o": f"the {noun}", "n": new, "c": f"(?P<argument>{colour})", "z": zone}
    return [
        (re.compile(phrase.format(**gaps)), verb, argument)
        for (verb, argument), phrases in _PHRASES.items()
        for phrase in phrases
    ]


def parse(text: str) -> Plan:
    """Parse a sentence about actions.

    Raises:
        ValueError: a part of the sentence is not an action of this world.
    """
    stages = re.split(r", then | and then ", text.strip().lower())
    acts = [tuple(_parse_act(part) for part in re.split(r", | and | while ", stage)) for stage in stages]
    plan = Plan(tuple(acts))
    if plan != STAY and any(act.verb == "stay" for act in plan.acts):
        raise ValueError(f"The sentence {text!r} combines an action with none; use one of the two.")
    return plan


def _parse_act(text: str) -> Act:
    for pattern, verb, argument in _patterns():
        match = pattern.fullmatch(text)
        if match is not None:
            found = match.groupdict()
            return Act(
                verb,
                found.get("colour"),
                _SHAPE_WORDS.get(found.get("shape") or ""),
                _SIZE_WORDS.get(found.get("size") or ""),
                found.get("argument") or argument,
            )
    raise ValueError(f"{text!r} is not an action of this world; use one like 'the red ball moves left'.")


def caption(scene: Scene) -> str:
    """Describe a scene: background, then size, colour, shape and zone of each object in reading order."""
    parts = [
        f"a {obj.size} {obj.colour} {obj.shape} at the {zone_of(obj.x, obj.y)}"
        for obj in sorted(scene.objects, key=_reading_order)
    ]
    return ", ".join([f"{scene.background} background", *(parts or ["nothing"])])


def _reading_order(obj: SceneObject) -> tuple[int, int]:
    return ZONES.index(zone_of(obj.x, obj.y)), COLOURS.index(obj.colour)


def parse_caption(text: str) -> Scene:
    """Parse a caption to a scene in which every object is at the centre of its zone.

    Raises:
        ValueError: the text is not a caption of this world, or two objects have the same colour.
    """
    head, *parts = text.strip().lower().split(", ")
    background = head.removesuffix(" background")
    if background not in BACKGROUNDS or background == head:
        raise ValueError(
            f"{head!r} is not a background; begin with one of {', '.join(BACKGROUNDS)} background."
        )
    noun = rf"a ({'|'.join(_SIZE_WORDS)}) ({'|'.join(COLOURS)}) ({'|'.join(_SHAPE_WORDS)}) at the (.+)"
    objects: list[SceneObject] = []
    for part in [] if parts == ["nothing"] else parts:
        match = re.fullmatch(noun, part)
        if match is None or match[4] not in ZONES:
            raise ValueError(f"{part!r} is not an object; use one like 'a small red ball at the top left'.")
        if match[2] in [obj.colour for obj in objects]:
            raise ValueError(f"Two objects of {text!r} are {match[2]}; give each its own colour.")
        objects.append(place_in_zone(match[2], _SHAPE_WORDS[match[3]], _SIZE_WORDS[match[1]], match[4]))
    return Scene(background, tuple(objects))


def question(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    """Draw a question about a scene; return it and its answer of one or two lower-case words."""
    shape = SHAPES[int(rng.integers(len(SHAPES)))]
    same = [obj for obj in scene.objects if obj.shape == shape]
    kind = int(rng.integers(7))
    if kind == 0 or not scene.objects:
        return "how many things are there", _NUMBERS[len(scene.objects)]
    if kind == 1:
        return f"how many {_PLURALS[shape]} are there", _NUMBERS[len(same)]
    if kind == 2:
        colour = COLOURS[int(rng.integers(len(COLOURS)))]
        return f"is there a {colour} thing", "no" if scene.find(colour) is None else "yes"
    obj = scene.objects[int(rng.integers(len(scene.objects)))]
    alone = sum(other.shape == obj.shape for other in scene.objects) == 1
    name = _name(obj)
    if kind == 3 and alone:
        return f"what colour is the {obj.shape}", obj.colour
    if kind <= 4:
        return f"what shape is the {obj.colour} one", obj.shape
    if kind == 5:
        return f"where is {name}", zone_of(obj.x, obj.y)
    return f"what size is {name}", obj.size


def statement(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    """Draw a statement about a scene, such as a goal; return it and whether it holds, yes or no.

    Either is as likely where there are objects. What is not clear to see, such as which of two objects is
    farther left if they are nearly at one column, is not asked.
    """
    true = bool(rng.integers(2)) and bool(scene.objects)
    answer = "yes" if true else "no"
    if not scene.objects:
        return f"there is a {COLOURS[int(rng.integers(len(COLOURS)))]} thing", answer
    obj = scene.objects[int(rng.integers(len(scene.objects)))]
    name = _name(obj)
    kind = int(rng.integers(5))
    if kind == 0:
        zone = zone_of(obj.x, obj.y)
        return f"{name} is at the {zone if true else _another(zone, ZONES, rng)}", answer
    if kind == 1:
        return f"{name} is {obj.size if true else _another(obj.size, SIZES, rng)}", answer
    if kind == 2:
        same = sum(other.shape == obj.shape for other in scene.objects)
        count = same if true else _another(same, range(len(scene.objects) + 2), rng)
        verb, noun = ("is", obj.shape) if count == 1 else ("are", _PLURALS[obj.shape])
        return f"there {verb} {_NUMBERS[count]} {noun}", answer
    if kind == 3:
        for other in scene.objects:
            right, down = other.x - obj.x, other.y - obj.y
            if abs(right) >= CLEAR:
                side = "to the left of" if (right > 0) == true else "to the right of"
                return f"{name} is {side} {_name(other)}", answer
            if abs(down) >= CLEAR:
                return f"{name} is {'above' if (down > 0) == true else 'below'} {_name(other)}", answer
    colours = [each for each in COLOURS if (scene.find(each) is not None) == true]
    return f"there is a {colours[int(rng.integers(len(colours)))]} thing", answer


def _another(value: Any, values: Sequence[Any], rng: np.random.Generator) -> Any:
    """Draw one of the values other than this one."""
    others = [each for each in values if each != value]
    return others[int(rng.integers(len(others)))]


def _name(obj: SceneObject) -> str:
    return f"the {obj.colour} {obj.shape}"
