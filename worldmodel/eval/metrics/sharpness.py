"""Sharpness relative to the true frames."""

import math
from collections.abc import Sequence

import numpy as np

from worldmodel.eval.metrics import Metric, Played
from worldmodel.media import Frames

GRADIENT_FLOOR = 1.0
"""Grey levels that are added to gradients, so that the ratio of flat pictures is defined."""


class Sharpness(Metric):
    """Gradient of the frames relative to the true ones: below 1 is blurred, above 1 noisy."""

    name, title, unit = "sharpness", "sharpness against the true frames", "x"

    def __call__(self, played: Played) -> Sequence[float]:
        ratios: list[float] = []
        for made, true in zip(played.clips, played.truth, strict=True):
            ratios.append((gradient(made) + GRADIENT_FLOOR) / (gradient(true) + GRADIENT_FLOOR))
        return ratios


def gradient(frames: Frames) -> float:
    """Return the root mean square difference between neighbouring pixels, in grey levels."""
    pixels = frames.astype(np.float32)
    rows, columns = np.diff(pixels, axis=-3), np.diff(pixels, axis=-2)
    return math.sqrt((float(np.square(rows).mean()) + float(np.square(columns).mean())) / 2)
