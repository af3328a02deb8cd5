"""Actions in words, and words as actions: the answers of inverse dynamics.

A text stands for itself; the other parts follow their name: "keys left+jump", "vector 0.5 -1", "mouse 0.1 0",
"camera 0 0 0.25 0 0 0 1" (the motion's translation and quaternion). Parts are joined by "; ", and the actions
of a round by " | ", unless all are equal.
"""

from typing import Any

from worldmodel.actions.action import Action
from worldmodel.actions.config import ActionConfig
from worldmodel.actions.registry import action_kinds, control_kinds

NOTHING_HAPPENS = "nothing happens"
"""The action in words with which the words of another one are compared (`Session.confidence`)."""

PARTS, ACTIONS = "; ", " | "


def say(action: Action) -> str:
    """Return an action in words; numbers have three significant digits."""
    if action.chunk:
        said = [say(each) for each in action.chunk]
        return said[0] if len(set(said)) == 1 else ACTIONS.join(said)
    parts = []
    for kind in action_kinds():
        if (value := action.part(kind.name)) is not None and (words := kind.say(value)):
            parts.append(words if kind.is_language else f"{kind.name} {words}")
    return PARTS.join(parts) or NOTHING_HAPPENS


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
    controls = {kind.name: kind for kind in control_kinds()}
    found: dict[str, Any] = {}
    said: list[str] = []
    for part in filter(None, map(str.strip, text.split(PARTS.strip()))):
        name, _, rest = part.partition(" ")
        if name not in controls:
            said.append(part)
        elif name in takes.kinds and (value := controls[name].understand(rest.strip(), takes.kinds[name])):
            found[name] = value
    words = PARTS.join(said)
    for kind in action_kinds():
        if kind.is_language and kind.name in takes.kinds and words and words != NOTHING_HAPPENS:
            found[kind.name] = kind.understand(words, takes.kinds[kind.name])
    return Action(**found)
