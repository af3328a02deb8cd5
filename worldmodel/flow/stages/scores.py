"""Scores of a clip by its frames, with which `filter` judges it."""

from collections.abc import Sequence

import cv2
import numpy as np
from jaxtyping import UInt8

from worldmodel.media import Frames

Grey = UInt8[np.ndarray, "t h w"]
DARK = 24
"""Grey values up to this are black."""
EDGE = 40
"""Differences between neighbouring grey values from which they are an edge."""


def to_grey(frames: Frames) -> Grey:
    """Return the grey values of RGB frames."""
    return np.stack([cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in frames])


def motion(grey: Grey, times: Sequence[float]) -> float | None:
    """Return the speed of the image content in frame sides per second, averaged; None of a single frame.

    It is the mean length of the optical flow (DIS) over the longer side of the frame.
    """
    if len(grey) < 2:
        return None
    flow = cv2.DISOpticalFlow.create(cv2.DISOPTICAL_FLOW_PRESET_ULTRAFAST)
    speeds = []
    for before, after, start, end in zip(grey[:-1], grey[1:], times[:-1], times[1:], strict=True):
        moved = flow.calc(before, after, None)  # type: ignore[call-overload]
        length = float(np.linalg.norm(moved, axis=-1).mean())
        speeds.append(length / max(grey.shape[1:]) / max(end - start, 1e-3))
    return float(np.mean(speeds))


def sharpness(grey: Grey) -> float:
    """Return the variance of the Laplacian, the median over frames; blurred frames have low values."""
    return float(np.median([cv2.Laplacian(frame, cv2.CV_32F).var() for frame in grey]))


def black(grey: Grey) -> float:
    """Return the share of frames that are black, but for 2 % of their pixels."""
    return float(np.mean(np.percentile(grey, 98, axis=(1, 2)) <= DARK))


def letterbox(grey: Grey) -> float:
    """Return the share of the frame that black bars at its edges take, in all frames.

    A bar ends in a straight line: where less than a third of the line next to it is bright, the dark area is
    a part of the scene.
    """
    bright = grey.max(axis=0) > DARK
    shown = 1.0
    for lines in (bright, bright.T):
        share = lines.mean(axis=1)
        bars = _dark_lines(share) + _dark_lines(share[::-1])
        shown *= max(0.0, 1 - bars / len(lines))
    return 1 - shown if bright.any() else 0.0  # a black clip is not letterboxed


def _dark_lines(share: np.ndarray) -> int:
    """Return the number of dark lines before the first others, by the bright share of each, if they end."""
    count = int(np.argmax(share > 0.02))
    softened = share[count : count + 3]  # compression blurs the border
    return count if softened.max() > 1 / 3 else 0


def text_area(grey: Grey) -> float:
    """Estimate the share of the frame that text overlays take.

    Overlays stay where they are and consist of strokes: their edges are strong in every frame, close to each
    other, and form lines that are wider than high. A still scene with such a texture is taken for text, and
    text that moves with the scene is not found.
    """
    kernel = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (3, 3))
    edges = np.min([cv2.morphologyEx(frame, cv2.MORPH_GRADIENT, kernel) for frame in grey], axis=0)
    strokes = (edges > EDGE).astype(np.uint8)
    height, width = strokes.shape
    gap = cv2.getStructuringElement(cv2.MORPH_RECT, (max(3, width // 24), 1))
    lines = cv2.morphologyEx(strokes, cv2.MORPH_CLOSE, gap)
    _, _, found, _ = cv2.connectedComponentsWithStats(lines, connectivity=4)
    area = 0
    for left, top, wide, high, _ in found[1:]:  # the first is the background
        inside = strokes[top : top + high, left : left + wide]
        strokes_per_row = (np.diff(inside, axis=1) == 1).sum() / high
        if (
            0.02 * height <= high <= 0.25 * height
            and wide >= 2 * high
            and inside.mean() > 0.35
            and strokes_per_row >= 1.0
        ):
            area += wide * high
    return area / strokes.size
