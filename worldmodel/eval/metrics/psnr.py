"""Peak signal-to-noise ratio."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8

from worldmodel.eval.metrics import Metric, Played

MAX_PSNR = 100.0
"""Replaces the infinite PSNR of equal images, so that means are finite and JSON is standard."""


class Psnr(Metric):
    """Peak signal-to-noise ratio of a round in dB."""

    name, title, unit = "psnr", "PSNR", "dB"

    def __call__(self, played: Played) -> Sequence[float]:
        return [psnr(made, true) for made, true in zip(played.clips, played.truth, strict=True)]


def psnr(made: UInt8[np.ndarray, "..."], truth: UInt8[np.ndarray, "..."]) -> float:
    """Return the peak signal-to-noise ratio of an image or a whole clip in dB, at most `MAX_PSNR`."""
    error = float(np.square(made.astype(np.float64) - truth).mean())
    return MAX_PSNR if error == 0 else min(MAX_PSNR, 10 * math.log10(255**2 / error))
