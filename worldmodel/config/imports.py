"""Functions and classes of users, named on a command line or in a config."""

import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from worldmodel.errors import ConfigError, InputError, WorldModelError, did_you_mean


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


def check_extension(setting: str, name: str, group: str, built_in: Collection[str]) -> None:
    """Check the name of an extension in a config, without importing it.

    Args:
        setting: The setting that names it, for messages.
        name: One of `built_in`, an entry point of the group, or MODULE:NAME.
        group: A group of entry points, such as `worldmodel.objectives`.
        built_in: Names that this package brings.

    Raises:
        ConfigError: it is none of them.
    """
    known = [*built_in, *(each for each in _installed(group) if each not in built_in)]
    if name not in known and ":" not in name:
        raise ConfigError(
            f"{setting} is {name!r}; use {', '.join([*known, ''])}or MODULE:NAME of your own"
            f"{did_you_mean(name, known)}."
        )


def find_extension(setting: str, name: str, group: str, built_in: Mapping[str, Any]) -> Any:
    """Return what a config names: built in, an entry point of an installed package, or MODULE:NAME.

    Names of this package come first, so that an installed package cannot change what a config means.

    Args:
        setting: The setting that names it, for messages.
        name: Its name.
        group: A group of entry points, such as `worldmodel.objectives`.
        built_in: What this package brings, by name.

    Raises:
        ConfigError: there is none of that name, or it cannot be imported.
    """
    check_extension(setting, name, group, built_in.keys())
    if name in built_in:
        return built_in[name]
    try:
        return _installed(group)[name].load() if name in _installed(group) else import_object(name)
    except WorldModelError:  # of a plug-in whose own package is missing
        raise
    except Exception as error:  # whatever the user's module raises when it is imported
        raise ConfigError(
            f"{setting} is {name!r}, which cannot be imported ({type(error).__name__}: {error}); use "
            "MODULE:NAME of a module in the current folder or of an installed package."
        ) from error


def check_arguments(setting: str, function: Callable[..., Any], num_given: int, given: Any) -> None:
    """Check that a function or class takes keyword arguments of a config beside those that it always gets.

    Args:
        setting: The setting that holds the arguments, for messages.
        function: The function or class.
        num_given: Number of positional arguments that the package passes.
        given: The keyword arguments of the config.

    Raises:
        ConfigError: it does not.
    """
    try:
        inspect.signature(function).bind(*[None] * num_given, **given)
    except TypeError as error:
        raise ConfigError(
            f"{setting} is {given}, which {getattr(function, '__name__', function)} does not take ({error}); "
            "give the arguments that it has."
        ) from None


@cache
def _installed(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name; read once, since it reads the metadata of every package."""
    return {each.name: each for each in entry_points(group=group)}
