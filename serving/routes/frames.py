"""Frames as an answer, in the format that the client asks for."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from fastapi import Request, Response

from worldmodel.serving.errors import ApiError
from worldmodel.serving.media import encoding

MP4, ZIP, NPY = "video/mp4", "application/zip", "application/x-npy"


class NotAcceptableError(ApiError):
    """The client takes none of the formats that there are."""

    status, code = 406, "not_acceptable"


FRAMES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Frames: an MP4 (H.264), a ZIP of PNGs, or NumPy's .npy of uint8 [t, h, w, 3]. "
        "`x-round` is the world's round after them, `x-step-id` the step that made them.",
        "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in (MP4, ZIP, NPY)},
        "headers": {
            name: {"schema": {"type": "integer"}, "description": about}
            for name, about in {
                "x-round": "Rounds played.",
                "x-step-id": "The step that made the frames; 0 for a first observation.",
                "x-num-frames": "How many frames there are.",
                "x-fps": "Frames per second.",
            }.items()
        },
    }
}
"""How OpenAPI describes an answer of frames."""


def chosen_format(request: Request) -> str:
    """Return the format that `Accept` likes best; MP4 where it has no wish.

    Raises:
        NotAcceptableError: it takes none of them.
    """
    wishes = [_wish(part) for part in request.headers.get("accept", "*/*").split(",") if part.strip()]
    best = max(
        ((_quality(wishes, kind), -place, kind) for place, kind in enumerate((MP4, ZIP, NPY))),
        default=(1.0, 0, MP4),
    )
    if wishes and best[0] <= 0:
        raise NotAcceptableError(f"Frames come as {MP4}, {ZIP} or {NPY}; accept one of them.")
    return best[2]


def _wish(part: str) -> tuple[str, float]:
    name, *parameters = (piece.strip().lower() for piece in part.split(";"))
    quality = next((piece[2:] for piece in parameters if piece.startswith("q=")), "1")
    try:
        return name, min(1.0, max(0.0, float(quality)))
    except ValueError:
        return name, 1.0


def _quality(wishes: list[tuple[str, float]], kind: str) -> float:
    """Return how much a format is wanted; the most exact of the wishes that fit it counts."""
    for name in (kind, f"{kind.partition('/')[0]}/*", "*/*"):
        found = [quality for wished, quality in wishes if wished == name]
        if found:
            return max(found)
    return 0.0


async def answer_frames(
    kind: str, frames: np.ndarray, fps: float, round_number: int, step_id: int | None = None
) -> Response:
    """Encode frames beside the event loop and say which round they are."""
    encoders: dict[str, Callable[[np.ndarray], bytes]] = {
        MP4: partial(encoding.encode_mp4, fps=fps),
        ZIP: encoding.encode_png_frames,
        NPY: encoding.encode_npy,
    }
    data = await asyncio.to_thread(encoders[kind], frames)
    headers = {
        "x-round": str(round_number),
        "x-step-id": str(round_number if step_id is None else step_id),
        "x-num-frames": str(len(frames)),
        "x-fps": f"{fps:g}",
        "cache-control": "no-store",
    }
    return Response(data, media_type=kind, headers=headers)
