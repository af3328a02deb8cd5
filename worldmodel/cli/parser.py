"""Argument parsing whose complaints read like every other error."""

import argparse
from typing import NoReturn

from worldmodel.errors import InputError


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are sentences like every other error."""

    def __init__(self, prog: str, description: str, example: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=f"example:\n  {example}" if example else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; `{self.prog} --help` shows how it is used.")
