"""Registry of the kinds of action."""

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from worldmodel.errors import ConfigError

if TYPE_CHECKING:
    from worldmodel.actions.kind import ActionKind

GROUP = "worldmodel.actions"
"""Entry points of this group name subclasses of `ActionKind`, which are registered on first use."""
RESERVED = frozenset(
    {"blank", "chunk", "dropout", "kinds", "marker", "parts", "per_round", "places", "settings", "spec"}
    | {"answer", "end", "name", "question", "rewards", "start", "takes", "terminated", "video", "widgets"}
)
"""Names of settings, weights and data columns that no kind may have."""

_KINDS: dict[str, "ActionKind"] = {}
_unread: list[EntryPoint] = list(entry_points(group=GROUP))


def register_action_kind(kind: "ActionKind") -> None:
    """Add a kind of action, or replace one of the same name.

    Register it before models are made and before `worldmodel.serving` is imported, which builds its request
    bodies from the kinds; an entry point of the group `worldmodel.actions` does this on its own.

    Raises:
        ConfigError: its name cannot be a field of an action.
    """
    if not kind.name.isidentifier() or kind.name.startswith("_") or kind.name in RESERVED:
        raise ConfigError(
            f"A kind of action is called {kind.name!r}; choose an identifier other than "
            f"{', '.join(sorted(RESERVED))}."
        )
    _KINDS[kind.name] = kind


def action_kinds() -> "tuple[ActionKind, ...]":
    """Return all kinds, in the order of their positions in the backbone's sequence."""
    _load_entry_points()
    return tuple(_KINDS.values())


def action_kind(name: str) -> "ActionKind":
    """Return a kind by its name.

    Raises:
        KeyError: there is none.
    """
    _load_entry_points()
    return _KINDS[name]


def control_kinds() -> "tuple[ActionKind, ...]":
    """Return the kinds that are not language."""
    return tuple(kind for kind in action_kinds() if not kind.is_language)


def kind_of_spec(spec_kind: str) -> "ActionKind":
    """Return the kind that a number of an action spec belongs to.

    Raises:
        ConfigError: there is none.
    """
    for kind in action_kinds():
        if spec_kind and kind.spec_kind == spec_kind:
            return kind
    known = ", ".join(kind.spec_kind for kind in action_kinds() if kind.spec_kind)
    raise ConfigError(f"kind is {spec_kind!r}; use one of {known}.")


def _load_entry_points() -> None:
    # Taken from the list first: the module of a kind may ask for the kinds while it is imported.
    while _unread:
        entry = _unread.pop()
        try:
            kind = entry.load()()
        except Exception as error:
            _unread.append(entry)
            raise ConfigError(
                f"The kind of action {entry.name!r} ({entry.value}) cannot be loaded "
                f"({type(error).__name__}: {error}); update or uninstall its package."
            ) from error
        register_action_kind(kind)
