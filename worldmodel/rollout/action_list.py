"""Lists of actions written as text, on the command line or in a file."""

import json
from pathlib import Path

from worldmodel.actions import Action, control_kinds
from worldmodel.errors import InputError

MAX_FILE_BYTES = 2**20


def parse_action(text: str) -> Action:
    """Parse one action: a sentence, `KIND:VALUE` such as `keys:red+left`, `wait`, or JSON.

    Raises:
        InputError: the text is empty, or its value or JSON cannot be parsed.
    """
    kind, colon, value = text.strip().partition(":")
    if kind == "wait" and not value:
        return Action()
    for each in control_kinds():
        if kind == each.name and colon:
            return Action(**{kind: each.parse_argument(value, text)})
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
