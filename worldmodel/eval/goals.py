"""Goals: the published figures of a suite and their targets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worldmodel.eval.table import Path, Row, Unit, find


@dataclass(frozen=True, slots=True)
class Goal:
    """A published figure and its target.

    Attributes:
        title: Title in tables.
        path: Keys that lead to the figure from `results["figures"]`.
        unit: Unit.
        at_least: Target, where more is better.
        at_most: Target, where less is better; a figure with neither is shown without a target.
        baselines: Keys that lead to the same figure of simpler predictions, by their names.
    """

    title: str
    path: Path
    unit: Unit = "%"
    at_least: float | None = None
    at_most: float | None = None
    baselines: Mapping[str, Path] = field(default_factory=dict)

    def row(self, figures: Mapping[str, Any]) -> Row | None:
        """Return the row of the table; None where the figure was not measured."""
        figure = find(figures, self.path)
        if figure is None:
            return None
        found = {name: find(figures, path) for name, path in self.baselines.items()}
        beside = {name: each for name, each in found.items() if each is not None}
        paths = {name: self.baselines[name] for name in beside}
        return Row(self.title, figure, self.unit, self.at_least, self.at_most, beside, "", self.path, paths)


def measured(goals: Sequence[Goal], figures: Mapping[str, Any]) -> list[Row]:
    """Return the rows of the figures that were measured."""
    rows = [goal.row(figures) for goal in goals]
    return [row for row in rows if row is not None]
