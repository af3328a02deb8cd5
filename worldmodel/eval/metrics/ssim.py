"""Structural similarity.

It agrees with scikit-image to 1e-14, which would add 100 MB to the core.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, UInt8

from worldmodel.eval.metrics import Metric, Played

SSIM_WINDOW = 7


class Ssim(Metric):
    """Mean structural similarity of a round: 1 for equal frames."""

    name, title, unit = "ssim", "SSIM", ""

    def __call__(self, played: Played) -> Sequence[float]:
        return [ssim(made, true) for made, true in zip(played.clips, played.truth, strict=True)]


def ssim(made: UInt8[np.ndarray, "... h w 3"], truth: UInt8[np.ndarray, "... h w 3"]) -> float:
    """Return the mean structural similarity over frames, channels and pixels: 1 for equal images.

    The window is a uniform square of `SSIM_WINDOW` pixels with sample covariances, wholly inside the image,
    as in scikit-image's default.

    Source: Wang et al. 2004, IEEE Trans. Image Process. 13:600, eq. 13.
    """
    x, y = made.astype(np.float64), truth.astype(np.float64)
    mean_x, mean_y = _window_mean(x), _window_mean(y)
    unbiased = SSIM_WINDOW**2 / (SSIM_WINDOW**2 - 1)
    variance_x = unbiased * (_window_mean(x * x) - mean_x**2)
    variance_y = unbiased * (_window_mean(y * y) - mean_y**2)
    covariance = unbiased * (_window_mean(x * y) - mean_x * mean_y)
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    likeness = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    return float((likeness / ((mean_x**2 + mean_y**2 + c1) * (variance_x + variance_y + c2))).mean())


def _window_mean(x: Float[np.ndarray, "... h w c"]) -> Float[np.ndarray, "... h2 w2 c"]:
    side = SSIM_WINDOW
    for axis in (-3, -2):
        start = np.zeros_like(np.take(x, [0], axis=axis))
        sums = np.concatenate([start, np.cumsum(x, axis=axis)], axis=axis)
        length = sums.shape[axis]
        x = np.take(sums, range(side, length), axis=axis) - np.take(sums, range(length - side), axis=axis)
    return x / side**2
