"""Rates, means and image metrics with 95 % intervals.

SSIM and the Wilson interval agree with scikit-image and SciPy to 1e-14; those would add 200 MB to the core.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8

Z_95 = 1.959963984540054
"""Standard normal quantile of a two-sided 95 % interval."""
MAX_PSNR = 100.0
"""Replaces the infinite PSNR of equal images, so that means are finite and JSON is standard."""
SSIM_WINDOW = 7

Figure = dict[str, float | int]
"""A number for JSON: value, low and high (95 % interval), n."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A share of successes with its Wilson score interval at 95 %.

    Unlike the normal interval, it stays within 0..1 and has a width at 0 and 100 %.

    Source: Wilson 1927, J. Am. Stat. Assoc. 22:209.
    """

    successes: int
    total: int

    def __post_init__(self) -> None:
        assert 0 <= self.successes <= self.total, f"{self.successes} successes of {self.total}"

    @property
    def value(self) -> float:
        """The share; NaN of nothing."""
        return self.successes / self.total if self.total else math.nan

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self._bounds()[0]

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self._bounds()[1]

    def figure(self) -> Figure:
        """Return the rate for JSON."""
        return {"value": self.value, "low": self.low, "high": self.high, "n": self.total}

    def _bounds(self) -> tuple[float, float]:
        if not self.total:
            return 0.0, 1.0
        n, share, z2 = self.total, self.value, Z_95**2
        middle = (share + z2 / (2 * n)) / (1 + z2 / n)
        reach = Z_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n**2))
        return max(0.0, middle - reach), min(1.0, middle + reach)


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
        rates = {name: Rate(sum(counted), len(counted)).figure() for name, counted in self._answers.items()}
        return rates | {name: mean_figure(values) for name, values in self._numbers.items()}


def mean_figure(values: Iterable[float]) -> Figure:
    """Return the mean of independent measurements with its normal 95 % interval, for JSON."""
    array = np.asarray(list(values), np.float64)
    mean = float(array.mean())
    reach = Z_95 * float(array.std(ddof=1)) / math.sqrt(len(array)) if len(array) > 1 else 0.0
    return {"value": mean, "low": mean - reach, "high": mean + reach, "n": len(array)}


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
