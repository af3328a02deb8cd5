"""Prompts by version, and the structure of the answers. A released version never changes: add another."""

import json
import math
from dataclasses import dataclass, field
from typing import Any

from worldmodel.errors import InputError


@dataclass(frozen=True)
class Prompts:
    """Texts of the requests; a version whose answers are plain text may leave them empty."""

    grid: str = ""
    """With {count} and {times}."""
    video: str = ""
    """With {length}."""
    first: str = ""
    difference: str = ""
    """With {start}, {end} and {previous}."""
    summary: str = ""
    """With {length} and {descriptions}."""
    structured: bool = True
    """Whether answers follow `SCHEMA`."""


_ANSWER = (
    " Answer in JSON: `caption`, one paragraph in the order of time about subjects, surroundings and what "
    "happens; `camera_motion`, how the camera moves, or `static`; and `events`, each with `start` and `end` "
    "in seconds, `text` as a sentence, the `actor` who acts, named so that it is told from others, and the "
    "`action` as a verb phrase. Name only what is visible."
)
PROMPTS = {
    "1": Prompts(
        grid="The image shows {count} frames of one video, row by row, taken at these times: {times}."
        + _ANSWER,
        video="The video is {length:.1f} seconds long." + _ANSWER,
        first="This is the first frame of a video. Describe in detail the subjects with their appearance and "
        "position, the surroundings, and the view of the camera. Name only what is visible.",
        difference="These are two frames of one video, at {start:.1f} s and at {end:.1f} s. Before them: "
        "{previous}\nDescribe what happened between the two: movements and actions, and by which subject, "
        "what appeared or disappeared, and how the camera moved. Do not repeat what stayed the same.",
        summary="These notes describe a video of {length:.1f} seconds: its first frame, and what happened "
        "between later ones.\n{descriptions}" + _ANSWER,
    ),
    "plain": Prompts(structured=False),
}
"""`plain` asks nothing: for models that describe what they get, such as those of `worldmodel serve`."""

_TEXT, _SECONDS = {"type": "string"}, {"type": "number", "minimum": 0}
_EVENT = {"start": _SECONDS, "end": _SECONDS, "text": _TEXT, "actor": _TEXT, "action": _TEXT}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMA = _object(
    {"caption": _TEXT, "camera_motion": _TEXT, "events": {"type": "array", "items": _object(_EVENT)}}
)


@dataclass(frozen=True)
class Caption:
    """Description of a clip."""

    caption: str
    camera_motion: str | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    """Each with `start` and `end` in seconds after the start of the clip, `text`, `actor` and `action`."""


def parse_text(answer: str) -> str:
    """Return an answer in plain text.

    Raises:
        InputError: it is empty.
    """
    if not answer.strip():
        raise InputError("The model answered nothing.")
    return answer.strip()


def parse_caption(answer: str, length_s: float) -> Caption:
    """Return an answer in JSON; times are limited to the clip, and events outside of it are left out.

    Raises:
        InputError: it does not follow the schema.
    """
    text = answer.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
    try:
        found = json.loads(text)
        events = [_event(event, length_s) for event in found["events"]]
        caption, camera = found["caption"], found["camera_motion"]
    except (ValueError, TypeError, KeyError):
        raise InputError(f"The model's answer does not follow the schema: {answer[:80]!r}.") from None
    if not isinstance(caption, str) or not caption.strip() or not isinstance(camera, str):
        raise InputError(f"The model's answer has no caption: {answer[:80]!r}.")
    kept = sorted((event for event in events if event is not None), key=lambda event: event["start"])
    return Caption(caption.strip(), camera.strip(), kept)


def _event(event: dict[str, Any], length_s: float) -> dict[str, Any] | None:
    start, end = (float(event[name]) for name in ("start", "end"))
    if not (math.isfinite(start) and math.isfinite(end)):
        raise ValueError("a time is not finite")
    texts = {name: str(event[name]).strip() for name in ("text", "actor", "action")}
    start, end = max(0.0, start), min(end, length_s) if length_s else end
    return {"start": start, "end": end, **texts} if start < end and texts["text"] else None
