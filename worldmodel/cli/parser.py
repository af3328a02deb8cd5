"""An argument parser that raises typed errors, and the options that several verbs share."""

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from worldmodel.errors import InputError


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` with an example below its options."""

    def __init__(self, prog: str, description: str, example: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see `{self.prog} --help`.")


def option(
    group: "argparse._ActionsContainer",
    name: str,
    about: str,
    default: Any = None,
    *,
    kind: Callable[[str], Any] | None = None,
    metavar: str | None = None,
    repeated: bool = False,
) -> None:
    """Add an option with a value.

    Args:
        group: The parser or a group of it.
        name: The option, such as `--rounds`.
        about: Its help, to which its default is added unless it says what happens by default.
        default: Its default; numbers also give the type of the value.
        kind: Reads the value; by default the type of a default that is a number.
        metavar: Its value in the help; by default N for counts and X for other numbers.
        repeated: Whether it may be repeated, and gives a list.
    """
    if kind is None and isinstance(default, int | float):
        kind = type(default)
    if metavar is None and (kind is int or kind is float):
        metavar = "N" if kind is int else "X"
    if default not in (None, "") and "(default:" not in about:
        about += " (default: %(default)s)"
    if repeated:
        group.add_argument(name, action="append", default=[], metavar=metavar, help=about)
    else:
        group.add_argument(name, default=default, type=kind or str, metavar=metavar, help=about)


def seed_number(text: str) -> int:
    """Read the seed of an option, as its `type`."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed; use 0 to 2^63 - 1")
    return int(text)


MODEL_HELP = "name of a shipped model, or path of a model folder (default: %(default)s)"
OVERRIDES_HELP = "settings that override the file, for example seed=1 mesh.sp=2"
