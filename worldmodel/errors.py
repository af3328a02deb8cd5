"""Errors caused by a user's input; each message is one sentence that names the bad value and the remedy.

WorldModelError(ValueError)
├── ConfigError     a key or value in a configuration
├── DatabaseError   a database that does not answer, or refuses
├── InputError      an image, video, text or action that cannot be used
├── ModelError      a model name or folder that cannot be loaded
└── OutputError     a file or folder that cannot be written
"""

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable

DISTRIBUTION = "openworldmodel"
"""Name for pip. PyPI refuses `worldmodel`, which is too similar to the name of another project."""


class WorldModelError(ValueError):
    """Base class of user errors; the command line prints the message and exits with code 2."""


class ConfigError(WorldModelError):
    """A configuration key or value is wrong."""


class DatabaseError(WorldModelError):
    """A database does not answer, or refuses."""


class InputError(WorldModelError):
    """An observation, action or prompt cannot be used."""


class ModelError(WorldModelError):
    """A model name or folder cannot be loaded."""


class OutputError(WorldModelError):
    """A file or folder cannot be written."""


def cause(message: str) -> str:
    """Return a message without what differs between two of one cause: quoted names, numbers, bytes."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|[\d.]+", "#", message)


def did_you_mean(value: object, options: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` with the closest of the options, or nothing if none is close."""
    close = difflib.get_close_matches(str(value), list(options), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def pip_install(*extras: str) -> str:
    """Return the command that adds extras of this package: `pip install 'openworldmodel[gym,data]'`.

    It also works where the package was installed from a clone, since pip keeps a distribution that is there.
    """
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"


def exit_code(command: Callable[[], object]) -> int:
    """Run a command and return its exit code; a user error is printed in one sentence, without a traceback.

    0 success, 2 a user error, 130 interrupted, 141 the reader of a pipe has gone; a bug is raised.
    """
    try:
        command()
        sys.stdout.flush()
        return 0
    except WorldModelError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # `worldmodel … | head`: redirect what is still buffered, or flushing at exit would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except SystemExit as stop:  # argparse exits after --help and --version
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
