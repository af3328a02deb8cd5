"""Clips and results on their way to and from the catalog."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Place = tuple[int, int]
"""Position of a clip in the order of the catalog: ordinal and sub."""
BEGINNING: Place = (-1, -1)


class Listed(NamedTuple):
    """How far a source is listed in the catalog."""

    rows: int = 0
    bookmark: Any = None
    """Of its listing behind these rows, where it has one."""
    digest: str | None = None
    """Of the settings that say what the source is; None in catalogs that were made before it."""


@dataclass(frozen=True)
class NewClip:
    """A clip to add."""

    id: str
    address: str
    licence: str = ""
    start_s: float | None = None
    end_s: float | None = None
    row: Mapping[str, Any] = field(default_factory=dict)
    content: bytes | None = field(default=None, repr=False)
    """Its file, where the rows of the source hold the files."""
    place: str | None = None
    """Of `content` in the buffer, once it is stored there."""


@dataclass(frozen=True)
class Waiting:
    """A clip and the state it is in."""

    id: str
    place: Place
    state: str


@dataclass(frozen=True)
class Result:
    """What a stage made of a clip."""

    clip: str
    state: Literal["done", "dropped", "dead"] = "done"
    reason: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    place: str | None = None
    parts: tuple[tuple[float, float], ...] = ()
    """Start and end of each part in seconds, of a stage that divides clips."""


def clip_id(*parts: object) -> str:
    """Return the id of a clip from what identifies it."""
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


def part_id(whole: str, start_s: float, end_s: float) -> str:
    """Return the id of a part of a clip."""
    return clip_id(whole, round(start_s, 3), round(end_s, 3))
