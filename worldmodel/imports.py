"""Functions of users, named on a command line."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from worldmodel.errors import InputError


def import_object(name: str) -> Any:
    """Import what `module:name` names; modules in the current folder are found, too.

    Raises:
        ImportError, AttributeError, ValueError: there is no such module, or no such name in it.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:  # a command has the folder of its script there instead
        sys.path.append(os.getcwd())
    return getattr(import_module(module), attribute)


def import_callable(what: str, name: str) -> Callable[..., Any]:
    """Import a function, or an instance of a class without arguments, given as `module:name`.

    Args:
        what: What it is, for messages.
        name: Its name.

    Raises:
        InputError: there is none, the class takes arguments, or it cannot be called.
    """
    try:
        found: Any = import_object(name)
        found = found() if isinstance(found, type) else found
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"The {what} {name!r} cannot be made ({error}); pass MODULE:NAME of a function, or of a class "
            "without arguments."
        ) from None
    if not callable(found):
        raise InputError(f"The {what} {name!r} cannot be called; give it __call__.")
    return found
