"""Times of texts and actions, which count from the start of their clip, in the parts of a divided clip."""

import json
from contextlib import suppress
from typing import Any

from worldmodel.actions import action_kinds
from worldmodel.data.columns import ASKED


def is_timed(column: str) -> bool:
    """Return whether values of a column, or of a field of the column `row`, may have a start and an end."""
    return column in (*ASKED, "events") or any(kind.name == column for kind in action_kinds())


def in_part(column: str, value: Any, start_s: float, end_s: float) -> Any:
    """Return the value that a column of a clip has in a part of it; those without times stay as they are.

    Intervals are cut at the ends of the part, and those outside of it are left out. Which interval counts at
    a time of the part is the same as in the whole clip.
    """
    if column == "row":
        return {name: in_part(name, each, start_s, end_s) for name, each in value.items()}
    entries = value
    if is_timed(column) and isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(json.JSONDecodeError):  # a sentence may begin with a bracket
            entries = json.loads(value)
    if not is_timed(column) or not isinstance(entries, list):
        return value
    try:
        times = [(float(entry["start"]), float(entry["end"])) for entry in entries]
    except (KeyError, TypeError, ValueError, IndexError):
        return value
    return [
        {**entry, "start": max(start - start_s, 0.0), "end": min(end, end_s) - start_s}
        for entry, (start, end) in zip(entries, times, strict=True)
        if start < end_s and end > start_s
    ]
