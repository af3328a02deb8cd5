"""Rates and means with 95 % intervals.

The Wilson interval agrees with SciPy to 1e-14; SciPy would add 100 MB to the core.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

Z_95 = 1.959963984540054
"""Standard normal quantile of a two-sided 95 % interval."""
BOOTSTRAPS = 1000
"""Resamples of a bootstrap interval."""

Figure = dict[str, float | int]
"""A number for JSON: value, low and high (95 % interval), n."""


def rate_figure(successes: int, total: int) -> Figure:
    """Return a share of successes with its Wilson interval at 95 %, for JSON; NaN for an empty sample.

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
    """Return the mean of independent measurements with its bootstrap interval, for JSON."""
    array = np.asarray(values, np.float64)
    return bootstrap(lambda rows: float(array[rows].mean()), len(array), len(array))


def bootstrap(value_of: Callable[[np.ndarray], float], count: int, n: int) -> Figure:
    """Return a value of measurements with its percentile bootstrap interval at 95 %, for JSON.

    The resamples are drawn with a fixed seed; those of which the value is not a number are left out.

    Source: Efron 1979, Ann. Stat. 7:1.

    Args:
        value_of: Returns the value of some measurements, given their indices.
        count: Number of measurements.
        n: Sample size of the figure.
    """
    rng = np.random.default_rng(0)
    drawn = [value_of(rng.integers(count, size=count)) for _ in range(BOOTSTRAPS)]
    low, high = np.nanpercentile(drawn, (2.5, 97.5))
    return {"value": float(value_of(np.arange(count))), "low": float(low), "high": float(high), "n": n}
