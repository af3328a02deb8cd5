"""Action spaces, and the conversion of their elements to actions of a world."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from worldmodel.actions import Action, ActionKind, action_kinds
from worldmodel.actions.kind import describe_value
from worldmodel.config import ActionConfig
from worldmodel.errors import ConfigError, InputError

ActionType = str
"""Name of a space: `"keys"`, `"key"` (exactly one of the keys), `"vector"`, `"mouse"`, `"camera"`, `"text"`,
or one of a kind of your own (`ActionKind.spaces`). The default is the first that the model supports."""
ActionTypes = ActionType | tuple[ActionType, ...]
"""One type, or several whose actions are combined."""


def offered_spaces(config: ActionConfig) -> "dict[ActionType, tuple[ActionKind, spaces.Space]]":
    """Return the spaces in which actions of a model can be given, with their kinds; controls before words."""
    found = {}
    for kind in sorted(action_kinds(), key=lambda kind: kind.is_language):
        if kind.name in config.kinds:
            for name, space in kind.spaces(config.kinds[kind.name]).items():
                found[name] = kind, space
    return found


def resolve_action_types(
    requested: ActionType | Sequence[ActionType] | None, config: ActionConfig
) -> ActionTypes:
    """Return the requested type or types, or the first that the model supports.

    Raises:
        ConfigError: the model does not support a requested type.
    """
    offered = offered_spaces(config)
    if not offered:
        kinds = ", ".join(kind.name for kind in action_kinds())
        raise ConfigError(f"This world takes no actions; enable one of {kinds} in the model's config.action.")
    if requested is None:
        return next(iter(offered))
    several = isinstance(requested, tuple | list)
    types = cast(list[ActionType], list(requested) if several else [requested])
    for each in types:
        if each not in offered:
            raise ConfigError(f"actions is {each!r}, but this world takes {' or '.join(offered)}.")
    if not types or len({offered[each][0].name for each in types}) < len(types):
        raise ConfigError(f"actions is {types}; name each type once, of {', '.join(offered)}.")
    return tuple(types) if several else types[0]


def action_space(action_types: ActionTypes, config: ActionConfig) -> spaces.Space:
    """Return the space of one or several action types; the model accepts every sample.

    With several actions in a round, it is the batched space of so many.
    """
    offered = offered_spaces(config)
    if isinstance(action_types, str):
        space = offered[action_types][1]
    else:
        space = spaces.Dict({each: offered[each][1] for each in action_types})
    return space if config.per_round == 1 else batch_space(space, config.per_round)


def to_action(action_types: ActionTypes, value: Any, config: ActionConfig) -> Action:
    """Convert an element of the action space.

    A blank text, and keys of which none is pressed, are the null action. Texts may be longer than the space
    allows, up to the model's own limit.

    Raises:
        InputError: the value is not in the action space.
    """
    if config.per_round == 1:
        return _to_action(action_types, value, config)
    chunk = split_actions(value)
    if len(chunk) != config.per_round:
        raise InputError(
            f"An action of this environment is {config.per_round} actions, those of a round in order, not "
            f"{describe_value(value)}."
        )
    return Action(chunk=tuple(_to_action(action_types, each, config) for each in chunk))


def _to_action(action_types: ActionTypes, value: Any, config: ActionConfig) -> Action:
    offered = offered_spaces(config)
    if isinstance(action_types, str):
        value = {action_types: value}
        action_types = (action_types,)
    elif not isinstance(value, Mapping) or set(value) != set(action_types):
        raise InputError(
            f"An action of this environment is a mapping of {', '.join(action_types)}, not "
            f"{describe_value(value)}."
        )
    parts: dict[str, Any] = {}
    for each in action_types:
        kind, _ = offered[each]
        parts[kind.name] = kind.of_element(each, value[each], config.kinds[kind.name])
    return Action(**parts)


def split_actions(actions: Any) -> list[Any]:
    """Split a batch of actions (a sequence, or a mapping of sequences): one per world, or those of a round.

    Values of any other type give an empty list.
    """
    if isinstance(actions, Mapping):
        try:
            rows = zip(*map(list, actions.values()), strict=True)
            return [dict(zip(actions, row, strict=True)) for row in rows]
        except (TypeError, ValueError):
            return []
    return [] if isinstance(actions, str) or not isinstance(actions, Iterable) else list(actions)


def parse_action_schema(schema: Mapping[str, Any]) -> ActionConfig:
    """Parse the action schema that a server publishes for a model; kinds that are not known here are ignored.

    Raises:
        ConfigError: a field has an invalid value.
    """
    kinds = {kind.name: schema["kinds"].get(kind.name) for kind in action_kinds()}
    return ActionConfig(per_round=schema["per_round"], **kinds)
