"""Actions in words, and words as actions: the answers of inverse dynamics.

A text stands for itself; the other parts follow their name: "keys left+jump", "vector 0.5 -1", "mouse 0.1 0",
"camera 0 0 0.25 0 0 0 1" (the motion's translation and quaternion). Parts are joined by "; ", and the actions
of a round by " | ", unless all are equal.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from worldmodel.config import ActionConfig
from worldmodel.types import MAX_NUMBER, NOTHING_HAPPENS, Action, Camera, Pose

PARTS, ACTIONS = "; ", " | "


def say(action: Action) -> str:
    """Return an action in words; numbers have three significant digits."""
    if action.chunk:
        said = [say(each) for each in action.chunk]
        return said[0] if len(set(said)) == 1 else ACTIONS.join(said)
    pose = action.camera.pose if action.camera else None
    numbers = {
        "vector": action.vector,
        "mouse": action.mouse,
        "camera": (*pose.translation, *pose.rotation) if pose else None,
    }
    parts = [action.text, f"keys {'+'.join(action.keys)}" if action.keys else None]
    parts += [f"{name} {' '.join(f'{x:.3g}' for x in each)}" for name, each in numbers.items() if each]
    return PARTS.join(filter(None, parts)) or NOTHING_HAPPENS


def understand(text: str, takes: ActionConfig) -> Action:
    """Return the action that generated words stand for, as far as the model takes it.

    Unknown keys, numbers of another count and parts that the model does not take are left out, and numbers
    are clipped to their bounds, so the model takes what is returned.
    """
    actions = [_one(each, takes) for each in text.split(ACTIONS.strip())]
    if len(actions) == 1 or takes.per_round == 1:
        return actions[0]
    actions = actions[: takes.per_round]
    return Action(chunk=(*actions, *actions[-1:] * (takes.per_round - len(actions))))


def _one(text: str, takes: ActionConfig) -> Action:
    readers: Mapping[str, Callable[[str], Any]] = {
        "keys": lambda words: tuple(dict.fromkeys(key for key in words.split("+") if key in takes.keys)),
        "vector": lambda words: _vector(_numbers(words, takes.vector_size), takes),
        "mouse": lambda words: _clipped(_numbers(words, 2), (-1.0, -1.0), (1.0, 1.0)),
        "camera": lambda words: _camera(_numbers(words, 7)),
    }
    found: dict[str, Any] = {}
    said: list[str] = []
    for part in filter(None, map(str.strip, text.split(PARTS.strip()))):
        name, _, rest = part.partition(" ")
        if name not in readers:
            said.append(part)
        elif takes.takes[name] and (value := readers[name](rest.strip())):
            found[name] = value
    words = PARTS.join(said)
    if takes.text and words and words != NOTHING_HAPPENS:
        found["text"] = words
    return Action(**found)


def _numbers(words: str, count: int) -> tuple[float, ...] | None:
    try:
        numbers = tuple(float(word) for word in words.replace(",", " ").split())
    except ValueError:
        return None
    return numbers if len(numbers) == count and all(abs(x) <= MAX_NUMBER for x in numbers) else None


def _clipped(
    numbers: tuple[float, ...] | None, low: Sequence[float], high: Sequence[float]
) -> tuple[float, ...] | None:
    if numbers is None:
        return None
    return tuple(min(max(x, least), most) for x, least, most in zip(numbers, low, high, strict=True))


def _vector(numbers: tuple[float, ...] | None, takes: ActionConfig) -> tuple[float, ...] | None:
    return _clipped(numbers, takes.vector_low, takes.vector_high) if takes.vector_low else numbers


def _camera(numbers: tuple[float, ...] | None) -> Camera | None:
    length = math.hypot(*numbers[3:]) if numbers else 0.0
    if numbers is None or length < 1e-3:
        return None
    return Camera("velocity", Pose(numbers[:3], tuple(x / length for x in numbers[3:])))
