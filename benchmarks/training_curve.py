"""Accuracy of the shipped weights over minutes of training, and its extrapolation.

`training_curve.csv` has the number of right clips out of 400 for each published set of weights (`worldmodel
eval shapes-tiny --num-samples 400 --rounds 10 --seed 1234`), and the minutes of training behind them on two
shared cores. The share of failures is fitted as a power of the minutes, on all points and on the last three;
where the two differ, the second is more likely. Intervals contain 90 % of fits to resampled counts.
"""

import argparse
import csv
from pathlib import Path

import numpy as np

from worldmodel.eval.metrics import rate_figure

TABLE = Path(__file__).with_suffix(".csv")
TOTAL = 400
GOALS = {"named": 0.97, "strict": 0.92, "two acts": 0.88}
DRAWS = 2000


def read() -> dict[str, np.ndarray]:
    """Return the columns of the table."""
    with TABLE.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}


def fit(minutes: np.ndarray, right: np.ndarray) -> tuple[float, float]:
    """Return slope and intercept of log(failures) over log(minutes), by least squares."""
    failing = (TOTAL - right + 0.5) / (TOTAL + 1)
    slope, intercept = np.polyfit(np.log(minutes), np.log(failing), 1)
    return float(slope), float(intercept)


def expected(minutes: np.ndarray, right: np.ndarray, at: float, rng: np.random.Generator) -> str:
    """Return the expected share of right clips after `at` minutes, as text."""
    drawn = [right, *rng.binomial(TOTAL, right / TOTAL, (DRAWS, len(right)))]
    fits = np.array([fit(minutes, counts) for counts in drawn])
    shares = 100 * (1 - np.exp(fits[:, 0] * np.log(at) + fits[:, 1]))
    low, high = np.percentile(shares[1:], [5, 95])
    return f"{shares[0]:5.1f} ({low:.0f} to {high:.0f})"


def draw(columns: dict[str, np.ndarray], path: Path) -> None:
    """Draw failures over minutes, both logarithmic, with the goals."""
    from matplotlib import pyplot

    minutes = columns["minutes"]
    figure, axes = pyplot.subplots(figsize=(7.2, 3.8), layout="constrained")
    for colour, (name, goal) in zip(("#2563eb", "#d97706", "#0f766e"), GOALS.items(), strict=True):
        rates = [rate_figure(int(count), TOTAL) for count in columns[name]]
        failing = np.array([100 * (1 - rate["value"]) for rate in rates])
        lower = [100 * (rate["high"] - rate["value"]) for rate in rates]
        upper = [100 * (rate["value"] - rate["low"]) for rate in rates]
        axes.errorbar(
            minutes, failing, np.array([lower, upper]), fmt="o-", color=colour, capsize=2, label=name
        )
        axes.axhline(100 * (1 - goal), color=colour, linestyle=":", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="minutes of training", ylabel="wrong, % of 400 clips")
    axes.set_xticks(minutes, [f"{m:.0f}" for m in minutes])
    axes.set_yticks([3, 5, 10, 20, 50], ["3", "5", "10", "20", "50"])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title="95 % intervals; dotted: goals")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/training-curve.png"))
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    columns, rng = read(), np.random.default_rng(args.seed)
    minutes = columns["minutes"]
    print("right, %      " + "".join(f"{m:>6.0f} min" for m in minutes))
    for name in GOALS:
        print(f"{name:12s}  " + "".join(f"{100 * count / TOTAL:10.1f}" for count in columns[name]))
    print("\nexpected, %   goal   at 2x minutes: all points, last three   at 4x: all points, last three")
    for name, goal in GOALS.items():
        cells = [
            expected(minutes[last:], columns[name][last:], factor * minutes[-1], rng)
            for factor in (2, 4)
            for last in (0, -3)
        ]
        print(f"{name:12s}  {100 * goal:4.0f}   " + "   ".join(cells))
    draw(columns, args.out)
    print(f"\nplot: {args.out}")


if __name__ == "__main__":
    main()
