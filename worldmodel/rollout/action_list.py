"""Lists of actions written as text, on the command line or in a file."""

import json
from pathlib import Path

from worldmodel.errors import InputError
from worldmodel.types import Action

MAX_FILE_BYTES = 2**20


def parse_action(text: str) -> Action:
    """Parse one action: a sentence, `keys:red+left`, `mouse:0.1,-0.5`, `vector:0.1,-0.5`, `wait`, or JSON.

    Raises:
        InputError: the text is empty, has an empty key name or a value that is not a number, or is not the
            JSON of an action.
    """
    kind, _, value = text.strip().partition(":")
    if kind == "wait" and not value:
        return Action()
    if kind == "keys":
        keys = tuple(key.strip() for key in value.split("+"))
        if not all(keys):
            raise InputError(f"The action {text!r} has an empty key name; write it like keys:red+left.")
        return Action(keys=keys)
    if kind in ("mouse", "vector"):
        try:
            return Action.of({kind: [float(number) for number in value.split(",")]})
        except ValueError:
            raise InputError(
                f"The action {text!r} is not a list of numbers; write it like {kind}:0.1,-0.5."
            ) from None
    if text.lstrip().startswith("{"):
        try:
            return Action.of(json.loads(text))
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, InputError) else "it is not valid JSON."
            raise InputError(f"The action {text!r} cannot be parsed: {reason}") from None
    return Action.of(text)


def read_actions(file: str | Path) -> list[Action]:
    """Read a text file with one action per line; `#` begins a comment line.

    Raises:
        InputError: the file cannot be read, is not UTF-8 text, is larger than 1 MiB, has no actions, or has
            one that cannot be parsed.
    """
    try:
        with Path(file).open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        lines = [line.strip() for line in data.decode("utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise InputError(f"The file {str(file)!r} cannot be read ({reason}); pass a text file.") from None
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"The file {str(file)!r} is larger than 1 MiB; split it.")
    actions = [parse_action(line) for line in lines if line and not line.startswith("#")]
    if not actions:
        raise InputError(f"The file {str(file)!r} has no actions; write one per line.")
    return actions
