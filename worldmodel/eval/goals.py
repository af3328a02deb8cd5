"""Goals: published figures and their targets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from worldmodel.eval.metrics import Figure

Unit = Literal["%", "dB", "fps", "s", "x", ""]


@dataclass(frozen=True, slots=True)
class Goal:
    """A published figure and its target.

    Attributes:
        title: Title in the report.
        path: Keys that lead to the figure from `results["figures"]`.
        unit: Unit: a share as percent, decibels, frames per second, seconds, a ratio, or none.
        at_least: Target, where more is better.
        at_most: Target, where less is better; a figure with neither is shown without a target.
    """

    title: str
    path: tuple[str | int, ...]
    unit: Unit = "%"
    at_least: float | None = None
    at_most: float | None = None

    def find(self, results: Mapping[str, Any]) -> Figure | None:
        """Return the figure, or None where it was not measured."""
        value: Any = results["figures"]
        for key in self.path:
            try:
                value = value[key]
            except (KeyError, IndexError):
                return None
        return value

    def met(self, figure: Figure) -> bool | None:
        """Whether the measured value reaches the target; None where there is none."""
        if self.at_least is not None:
            return figure["value"] >= self.at_least
        return figure["value"] <= self.at_most if self.at_most is not None else None

    @property
    def text(self) -> str:
        """The target with its unit; empty where there is none."""
        if self.at_least is not None:
            return f"≥ {show(self.at_least, self.unit)}"
        return "" if self.at_most is None else f"≤ {show(self.at_most, self.unit)}"


def measured(goals: Sequence[Goal], results: Mapping[str, Any]) -> list[tuple[Goal, Figure]]:
    """Return the goals whose figures are in the results, with the figures."""
    found = [(goal, goal.find(results)) for goal in goals]
    return [(goal, figure) for goal, figure in found if figure is not None]


def show(value: float, unit: str) -> str:
    """Format a number with its unit."""
    if unit == "%":
        return f"{100 * value:.1f} %".replace(".0 %", " %")
    if unit == "s":
        return f"{value:.3f} s"
    return f"{value:.2f} {unit}".strip() if unit in ("x", "") else f"{value:.1f} {unit}"


def interval(figure: Figure, unit: str) -> str:
    """Format a figure's 95 % interval."""
    low, high = (show(figure[end], unit).removesuffix(f" {unit}") for end in ("low", "high"))
    return f"{low} to {high}"
