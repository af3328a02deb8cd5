"""Rates, means and image metrics with 95 % intervals.

SSIM and the Wilson interval agree with scikit-image and SciPy to 1e-14; those would add 200 MB to the core.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float, UInt8

Z_95 = 1.959963984540054
"""Standard normal quantile of a two-sided 95 % interval."""
MAX_PSNR = 100.0
"""Replaces the infinite PSNR of equal images, so that means are finite and JSON is standard."""
SSIM_WINDOW = 7
BOOTSTRAPS = 1000
"""Resamples of a bootstrap interval."""

Figure = dict[str, float | int]
"""A number for JSON: value, low and high (95 % interval), n."""


def rate_figure(successes: int, total: int) -> Figure:
    """Return a share of successes with its Wilson interval at 95 %, for JSON; that of nothing is NaN.

    Unlike the normal interval, it stays within 0..1 and has a width at 0 and 100 %.

    Source: Wilson 1927, J. Am. Stat. Assoc. 22:209.
    """
    assert 0 <= successes <= total, f"{successes} successes of {total}"
    if not total:
        return {"value": math.nan, "low": 0.0, "high": 1.0, "n": 0}
    share, z2 = successes / total, Z_95**2
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    reach = Z_95 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return {"value": share, "low": max(0.0, middle - reach), "high": min(1.0, middle + reach), "n": total}


class Tally:
    """Named counts of booleans and samples of numbers."""

    def __init__(self) -> None:
        self._answers: dict[str, list[bool]] = {}
        self._numbers: dict[str, list[float]] = {}

    def count(self, **answers: bool) -> None:
        """Add one boolean to each name."""
        for name, answer in answers.items():
            self._answers.setdefault(name, []).append(bool(answer))

    def measure(self, **numbers: float) -> None:
        """Add one number to each name."""
        for name, number in numbers.items():
            self._numbers.setdefault(name, []).append(float(number))

    def figures(self) -> dict[str, Figure]:
        """Return the rate or mean of every name, for JSON."""
        rates = {name: rate_figure(sum(counted), len(counted)) for name, counted in self._answers.items()}
        return rates | {name: mean_figure(values) for name, values in self._numbers.items()}


def mean_figure(values: Iterable[float]) -> Figure:
    """Return the mean of independent measurements with its normal 95 % interval, for JSON."""
    array = np.asarray(list(values), np.float64)
    mean = float(array.mean())
    reach = Z_95 * float(array.std(ddof=1)) / math.sqrt(len(array)) if len(array) > 1 else 0.0
    return {"value": mean, "low": mean - reach, "high": mean + reach, "n": len(array)}


def bootstrap_figure(values: Sequence[float]) -> Figure:
    """Return the mean of independent measurements with its percentile bootstrap interval at 95 %, for JSON.

    The resamples are drawn with a fixed seed.

    Source: Efron 1979, Ann. Stat. 7:1.
    """
    array = np.asarray(values, np.float64)
    rng = np.random.default_rng(0)
    means = np.concatenate(
        [array[rng.integers(len(array), size=(50, len(array)))].mean(axis=1) for _ in range(BOOTSTRAPS // 50)]
    )
    low, high = np.percentile(means, (2.5, 97.5))
    return {"value": float(array.mean()), "low": float(low), "high": float(high), "n": len(array)}


def psnr(made: UInt8[np.ndarray, "..."], truth: UInt8[np.ndarray, "..."]) -> float:
    """Return the peak signal-to-noise ratio of an image or a whole clip in dB, at most `MAX_PSNR`."""
    error = float(np.square(made.astype(np.float64) - truth).mean())
    return MAX_PSNR if error == 0 else min(MAX_PSNR, 10 * math.log10(255**2 / error))


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
