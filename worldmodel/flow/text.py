"""Text that databases and Arrow can hold."""

import re
from typing import Any

_ODD = re.compile("[\0\ud800-\udfff]")
"""Half a surrogate pair, which is not valid in UTF-8, and NUL, which PostgreSQL refuses."""


def is_odd(text: str) -> bool:
    """Return whether a text has a character that cannot be stored."""
    return _ODD.search(text) is not None


def storable(text: str) -> str:
    """Replace characters that cannot be stored with U+FFFD."""
    return _ODD.sub("\ufffd", text)


def storable_json(value: Any) -> Any:
    """Apply `storable` to every string of a JSON value."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, list):
        return [storable_json(each) for each in value]
    if isinstance(value, dict):
        return {storable(name): storable_json(each) for name, each in value.items()}
    return value
