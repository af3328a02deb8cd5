"""Strategies: which frames of a clip a model is shown, and in how many requests."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from worldmodel.flow.captions.endpoint import Endpoint, image_part, text_part, video_part
from worldmodel.flow.captions.prompts import SCHEMA, Caption, Prompts, parse_caption, parse_text
from worldmodel.media import Frame
from worldmodel.media.encoding import encode_jpeg, encode_video

CELLS = 32
"""Cells along each side on which frames are compared."""


@dataclass(frozen=True)
class View:
    """Frames of a clip, all of one size."""

    frames: Sequence[Frame]
    times: Sequence[float]
    """Seconds after the start of the clip."""
    length_s: float
    """Length of the clip; 0 for an image."""


def by_grid(view: View, prompts: Prompts, endpoint: Endpoint) -> Caption:
    """Describe a clip in one request, by one image with all frames."""
    times = ", ".join(f"{time:.1f} s" for time in view.times)
    text = prompts.grid.format(count=len(view.frames), times=times)
    return _describe([*text_part(text), image_part(encode_jpeg(grid(view.frames)))], view, prompts, endpoint)


def by_video(view: View, prompts: Prompts, endpoint: Endpoint) -> Caption:
    """Describe a clip in one request, by a video of its frames."""
    fps = len(view.frames) / view.length_s if view.length_s else 1.0
    video = video_part(encode_video(np.stack(view.frames), min(fps, 240), scale=1))
    text = prompts.video.format(length=view.length_s)
    return _describe([*text_part(text), video], view, prompts, endpoint)


def by_differences(view: View, prompts: Prompts, endpoint: Endpoint, min_change: float) -> Caption:
    """Describe the first frame, then what changes from keyframe to keyframe, and summarise that.

    Each difference is asked for with the one before in the prompt, so the requests of a clip follow each
    other.

    Source: Chen et al. 2024, ShareGPT4Video (arXiv:2406.04325), section 3.1.
    """
    kept = keyframes(view.frames, min_change)
    images = [image_part(encode_jpeg(view.frames[index])) for index in kept]
    previous = endpoint.ask([*text_part(prompts.first), images[0]], parse_text)
    notes = [f"[{view.times[kept[0]]:.1f} s] {previous}"]
    for window, (start, end) in enumerate(itertools.pairwise(kept)):
        times = {"start": view.times[start], "end": view.times[end]}
        text = prompts.difference.format(**times, previous=previous)
        previous = endpoint.ask([*text_part(text), *images[window : window + 2]], parse_text)
        notes.append("[{start:.1f} s to {end:.1f} s] ".format(**times) + previous)
    text = prompts.summary.format(length=view.length_s, descriptions="\n".join(notes))
    return _describe(text_part(text), view, prompts, endpoint)


def _describe(content: list, view: View, prompts: Prompts, endpoint: Endpoint) -> Caption:
    parse: Callable[[str], Caption]
    if not prompts.structured:
        return Caption(endpoint.ask(content, parse_text))
    parse = functools.partial(parse_caption, length_s=view.length_s)
    return endpoint.ask(content, parse, SCHEMA)


def grid(frames: Sequence[Frame]) -> Frame:
    """Return frames of one size side by side, row by row, in about as many rows as columns."""
    columns = math.ceil(math.sqrt(len(frames)))
    rows = math.ceil(len(frames) / columns)
    height, width = frames[0].shape[:2]
    canvas = np.zeros((rows * height, columns * width, 3), np.uint8)
    for index, frame in enumerate(frames):
        y, x = index // columns * height, index % columns * width
        canvas[y : y + height, x : x + width] = frame
    return canvas


def keyframes(frames: Sequence[Frame], min_change: float) -> list[int]:
    """Return the index of the first frame and of those that differ from the last one returned.

    Args:
        frames: frames of one size.
        min_change: the least mean difference of colour, as a share of the range, on a coarse grid.
    """
    small = [_coarse(frame) for frame in frames]
    kept = [0]
    for index in range(1, len(frames)):
        if np.abs(small[index] - small[kept[-1]]).mean() > 255 * min_change:
            kept.append(index)
    return kept


def _coarse(frame: Frame) -> np.ndarray:
    """Return the mean colour of each cell of a frame."""
    cells = frame.astype(np.float32)
    for axis, side in enumerate(frame.shape[:2]):
        starts = np.unique(np.arange(CELLS) * side // CELLS)
        counts = np.diff([*starts, side])
        shape = (-1, 1, 1) if axis == 0 else (1, -1, 1)
        cells = np.add.reduceat(cells, starts, axis=axis) / counts.reshape(shape)
    return cells
