"""Scores of a clip by its frames, with which a flow's `filter` and `worldmodel data check` judge it.

OpenCV is needed for `to_grey`, `motion` and `text_area` alone.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

from worldmodel.media.video import Frames

Grey = UInt8[np.ndarray, "t h w"]
DARK = 24
"""Grey values up to this are black."""
EDGE = 40
"""Differences between neighbouring grey values from which they are an edge."""
PLAIN = 250.0
"""Variance of grey values below which a frame is plain."""
SHOWN, STROKES = 0.9, 0.06
"""Share of the frames in which an edge of text is seen, and of the pixels of a line that rise, or fall."""


def to_grey(frames: Frames) -> Grey:
    """Return the grey values of RGB frames."""
    import cv2

    return np.stack([cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in frames])


def motion(grey: Grey, times: Sequence[float]) -> float | None:
    """Return the speed of the image content in frame sides per second, averaged; None of a single frame.

    It is the mean length of the optical flow (DIS) over the longer side of the frame.
    """
    if len(grey) < 2:
        return None
    import cv2

    flow = cv2.DISOpticalFlow.create(cv2.DISOPTICAL_FLOW_PRESET_ULTRAFAST)
    speeds = []
    for before, after, start, end in zip(grey[:-1], grey[1:], times[:-1], times[1:], strict=True):
        moved = flow.calc(before, after, None)  # type: ignore[call-overload]
        length = float(np.linalg.norm(moved, axis=-1).mean())
        speeds.append(length / max(grey.shape[1:]) / max(end - start, 1e-3))
    return float(np.mean(speeds))


def sharpness(grey: Grey) -> float:
    """Return the variance of the Laplacian over the variance of the brightness, the median over frames.

    Blurred and plain frames have low values, dark ones the same as bright ones.
    """
    ratios = [laplacian(frame).var() / max(frame.var(), PLAIN) for frame in grey]
    return float(np.median(ratios))


def laplacian(image: np.ndarray) -> np.ndarray:
    """Return the Laplacian of an image `[h, w]`, which is mirrored at its edges."""
    wide = np.pad(image.astype(np.float32), 1, mode="reflect")
    around = wide[:-2, 1:-1] + wide[2:, 1:-1] + wide[1:-1, :-2] + wide[1:-1, 2:]
    return around - 4 * wide[1:-1, 1:-1]


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

    Overlays stay where they are and consist of strokes: brightness rises and falls again and again along a
    line, at the same pixels of nearly every frame. A still scene with such a texture is taken for text, and
    text that moves with the scene is not found.
    """
    import cv2

    steps = np.diff(grey.astype(np.int16), axis=2)
    height, width = steps.shape[1:]
    window = (max(9, width // 12) | 1, max(3, height // 30) | 1)
    dense = [
        cv2.boxFilter(((sign * steps > EDGE).mean(axis=0) >= SHOWN).astype(np.float32), -1, window)
        for sign in (1, -1)
    ]
    return float((np.minimum(*dense) > STROKES).mean())
