"""Clips and results on their way to and from the catalog."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Place = tuple[int, int]
"""Position of a clip in the order of the catalog: ordinal and sub."""
BEGINNING: Place = (-1, -1)
LAST_SUB = 2**31 - 1
"""The largest `sub`: (ordinal, LAST_SUB) is behind a listed clip and all its parts."""


class Listed(NamedTuple):
    """Progress of listing a source in the catalog."""

    rows: int = 0
    bookmark: Any = None
    """Of its listing behind these rows, where it has one."""
    digest: str | None = None
    """Of the settings that say what the source is; None before the first listing."""


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
class Claim:
    """A clip that a worker works on, and nobody else while its lease goes on."""

    clip: str
    delivery: int
    """How often the clip was claimed in its stage, from 1."""


@dataclass(frozen=True)
class Retry:
    """Why a clip is to be tried again."""

    reason: str
    after_s: float = 0.0
    """Seconds until then."""


@dataclass(frozen=True)
class Result:
    """Result of a stage for a clip."""

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
