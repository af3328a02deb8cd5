"""An argument parser that raises typed errors, and the options that several verbs share."""

import argparse
from typing import NoReturn

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


def seed_number(text: str) -> int:
    """Read the seed of an option, as its `type`."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is no seed; use 0 to 2^63 - 1")
    return int(text)


MODEL_HELP = "name of a shipped model, or path of a model folder (default: %(default)s)"
OVERRIDES_HELP = "settings that override the file, for example seed=1 mesh.sp=2"
