"""Responses with frames, encoded as the query parameter `format` requests."""

import asyncio
import io
import zipfile
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Query, Response

from worldmodel.episodes import Outcome
from worldmodel.media import Frames
from worldmodel.media.encoding import encode_png, encode_video

FrameFormat = Literal["mp4", "zip", "npy"]
Format = Annotated[
    FrameFormat,
    Query(description="mp4 (H.264, lossy), zip (one PNG per frame) or npy (NumPy array uint8 [t, h, w, 3])."),
]
MEDIA_TYPES: dict[FrameFormat, str] = {
    "mp4": "video/mp4",
    "zip": "application/zip",
    "npy": "application/x-npy",
}

FRAME_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Frames: an MP4 (H.264), a ZIP of PNGs, or a NumPy .npy file of uint8 [t, h, w, 3].",
        "content": {
            media_type: {"schema": {"type": "string", "format": "binary"}}
            for media_type in MEDIA_TYPES.values()
        },
        "headers": {
            name: {"schema": {"type": "integer"}, "description": description}
            for name, description in {
                "x-round": "Round of the world after these frames.",
                "x-step-id": "Step that produced the frames; 0 for the initial observation.",
                "x-num-frames": "Number of frames.",
                "x-fps": "Frames per second.",
            }.items()
        }
        | {
            "x-reward": {"schema": {"type": "number"}, "description": "Reward, if the model predicts it."},
            "x-ended": {
                "schema": {"type": "boolean"},
                "description": "Whether the episode ends with the round, if the model predicts it.",
            },
            "x-confidence": {
                "schema": {"type": "number"},
                "description": "How well the round fits the text of the action, if `confidence` asks for it.",
            },
        },
    }
}
"""OpenAPI description of a response with frames."""


async def frames_response(
    format: FrameFormat,
    frames: np.ndarray,
    fps: float,
    round_number: int,
    outcome: Outcome | None = None,
    confidence: float | None = None,
) -> Response:
    """Encode frames in a thread; return them with headers that describe them."""
    data = await encode_frames(format, frames, fps)
    headers = {
        "x-round": str(round_number),
        "x-step-id": str(round_number),
        "x-num-frames": str(len(frames)),
        "x-fps": f"{fps:g}",
        "cache-control": "no-store",
    }
    if outcome is not None:
        headers |= {"x-reward": f"{outcome.reward:g}", "x-ended": str(outcome.ended).lower()}
    if confidence is not None:
        headers |= {"x-confidence": f"{confidence:.4f}"}
    return Response(data, media_type=MEDIA_TYPES[format], headers=headers)


async def encode_frames(format: FrameFormat, frames: np.ndarray, fps: float) -> bytes:
    """Encode frames in a thread, as a file of `MEDIA_TYPES[format]`."""
    encoders: dict[FrameFormat, Callable[[np.ndarray], bytes]] = {
        "mp4": partial(encode_video, fps=fps),
        "zip": encode_png_frames,
        "npy": encode_npy,
    }
    return await asyncio.to_thread(encoders[format], frames)


def encode_png_frames(frames: Frames) -> bytes:
    """Encode a clip as a ZIP of PNGs called 00000.png, 00001.png, ...; equal frames give equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for index, frame in enumerate(frames):
            archive.writestr(zipfile.ZipInfo(f"{index:05d}.png"), encode_png(frame))
    return buffer.getvalue()


def encode_npy(frames: Frames) -> bytes:
    """Encode a clip as NumPy's .npy: uint8 `[t, h, w, 3]`, read by `np.load(..., allow_pickle=False)`."""
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(frames), allow_pickle=False)
    return buffer.getvalue()
