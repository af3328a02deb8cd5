"""The result table: figures with their intervals, goals and baselines, as text, markdown, HTML and JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, Literal

from worldmodel.eval.figures import Figure

Unit = Literal["%", "dB", "fps", "s", "x", ""]
"""A share as percent, decibels, frames per second, seconds, a ratio, or none."""

Path = tuple[str | int, ...]
"""Keys that lead to a figure in the nested results of an evaluation."""


@dataclass(frozen=True, slots=True)
class Row:
    """A figure, its target, and the same figure of simpler predictions.

    Attributes:
        title: Name of the figure in words.
        figure: Value, 95 % interval (`low`, `high`) and sample size (`n`).
        unit: Unit of all numbers of the row.
        at_least: Target, where more is better.
        at_most: Target, where less is better; without either the figure has no target.
        baselines: The figure of simpler predictions, such as a copy of the first frame, by their names.
        note: A remark, shown in the last column.
        path: Keys that lead to the figure in the results.
        baseline_paths: Keys that lead to each baseline.
    """

    title: str
    figure: Figure
    unit: Unit = "%"
    at_least: float | None = None
    at_most: float | None = None
    baselines: Mapping[str, Figure] = field(default_factory=dict)
    note: str = ""
    path: Path = ()
    baseline_paths: Mapping[str, Path] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """True if the measured value reaches the target; None without a target."""
        if self.at_least is not None:
            return self.figure["value"] >= self.at_least
        return self.figure["value"] <= self.at_most if self.at_most is not None else None

    @property
    def goal(self) -> str:
        """The target with its unit; empty without a target."""
        if self.at_least is not None:
            return f"≥ {show(self.at_least, self.unit)}"
        return "" if self.at_most is None else f"≤ {show(self.at_most, self.unit)}"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title.

    Attributes:
        title: Title.
        rows: The figures.
        about: A sentence below the title.
        details: Whether only the report shows it, folded.
    """

    title: str
    rows: Sequence[Row]
    about: str = ""
    details: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain values for JSON."""
        rows: list[dict[str, Any]] = []
        for row in self.rows:
            values = {key: value for key, value in asdict(row).items() if value not in (None, {}, "", ())}
            # A missed goal stands in the JSON, so that readers need not compare.
            rows.append({"unit": row.unit, **values, **({} if row.met is None else {"met": row.met})})
        return {"title": self.title, "about": self.about, "details": self.details, "rows": rows}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Table":
        """Return the table of plain values."""
        return cls(
            values["title"],
            [row_from_json(row) for row in values["rows"]],
            values.get("about", ""),
            values.get("details", False),
        )

    @property
    def baselines(self) -> list[str]:
        """Names of the baselines of any row, in their order."""
        return list(dict.fromkeys(name for row in self.rows for name in row.baselines))

    def cells(self, met: str = " +", missed: str = " -") -> list[tuple[str, ...]]:
        """Return the table as text, the head first; columns that no row fills are left out.

        Args:
            met: Mark after a value that reaches its goal.
            missed: Mark after a value that does not.
        """
        baselines = self.baselines
        marks = {True: met, False: missed, None: ""}
        rows = [("", "goal", "measured", "95 % interval", *baselines, "n", "notes")]
        for row in self.rows:
            beside = [row.baselines.get(name) for name in baselines]
            rows.append(
                (
                    row.title,
                    row.goal,
                    show(row.figure["value"], row.unit) + marks[row.met],
                    interval(row.figure, row.unit),
                    *("" if figure is None else show(figure["value"], row.unit) for figure in beside),
                    str(row.figure["n"]),
                    row.note,
                )
            )
        used = [
            column for column, cells in enumerate(zip(*rows[1:], strict=True)) if column == 0 or any(cells)
        ]
        return [tuple(row[column] for column in used) for row in rows]

    def text(self) -> str:
        """Return the table as lines with aligned columns."""
        lines = aligned(self.cells())
        return lines + ("\n(+ goal met, - goal missed)" if any(row.goal for row in self.rows) else "")

    def markdown(self) -> str:
        """Return the table in markdown."""
        head, *body = self.cells(met="", missed=" (missed)")
        titles = tuple(name[:1].upper() + name[1:] for name in ("Figure", *head[1:]))
        return markdown([titles, *body])

    def html(self) -> str:
        """Return the table as HTML, with the intervals below the values."""
        goals = any(row.goal for row in self.rows)
        notes = any(row.note for row in self.rows)
        head = ["<th>Figure", *["<th class=number>Goal"] * goals, "<th class=number>Measured"]
        head += [f"<th class=number>{escape(name)}" for name in self.baselines]
        head += ["<th class='number samples'>n", *["<th>Notes"] * notes]
        body: list[str] = []
        for row in self.rows:
            style = {True: " met", False: " missed", None: ""}[row.met]
            mark = {True: " ✓", False: " ✗", None: ""}[row.met]
            cells = [f"<td>{escape(row.title)}", *[f"<td class=number>{row.goal}"] * goals]
            cells.append(f'<td class="number{style}">{_value(row.figure, row.unit, mark)}')
            for name in self.baselines:
                figure = row.baselines.get(name)
                cells.append(f"<td class=number>{'' if figure is None else _value(figure, row.unit)}")
            cells += [f'<td class="number samples">{row.figure["n"]}', *[f"<td>{escape(row.note)}"] * notes]
            body.append(f"<tr>{''.join(cells)}</tr>")
        return f"<div class=wide><table><tr>{''.join(head)}</tr>{''.join(body)}</table></div>"


def row_from_json(values: Mapping[str, Any]) -> Row:
    """Return the row of plain values."""
    given = {key: value for key, value in values.items() if key != "met"}
    paths = {name: tuple(path) for name, path in values.get("baseline_paths", {}).items()}
    return Row(**{**given, "path": tuple(values.get("path", ())), "baseline_paths": paths})


def is_figure(value: object) -> bool:
    """Return whether a value of the results is a figure."""
    return isinstance(value, Mapping) and {"value", "low", "high", "n"} <= set(value)


def find(figures: Any, path: Path) -> Figure | None:
    """Return the figure at a path of nested results; None where it was not measured."""
    for key in path:
        try:
            figures = figures[key]
        except (KeyError, IndexError):
            return None
    return figures


def flat_rows(value: Any, units: Mapping[str, Unit], prefix: Sequence[str] = ()) -> Iterable[Row]:
    """Yield every figure of nested mappings; lists and single numbers are skipped.

    Args:
        value: A mapping, a figure, or something to skip.
        units: Units by key; other figures are shares.
        prefix: Keys that lead to `value`.
    """
    if is_figure(value):
        known: list[Unit] = [units[key] for key in reversed(prefix) if key in units]
        unit: Unit = known[0] if known else "%"
        figure = {key: value[key] for key in ("value", "low", "high", "n")}
        yield Row(" · ".join(prefix).replace("_", " "), figure, unit)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from flat_rows(each, units, (*prefix, name))


def show(value: float, unit: str) -> str:
    """Format a number with its unit."""
    if unit == "%":
        return f"{100 * value:.1f} %".replace(".0 %", " %")
    if unit == "s":
        return f"{value:.3f} s"
    return f"{value:.2f} {unit}".strip() if unit in ("x", "") else f"{value:.1f} {unit}"


def interval(figure: Figure, unit: str) -> str:
    """Format the 95 % interval of a figure."""
    low, high = (show(figure[end], unit).removesuffix(f" {unit}") for end in ("low", "high"))
    return f"{low} to {high}"


def markdown(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows, the head first, as a table in markdown."""
    head, *body = rows
    rule = ("---", *["---:"] * (len(head) - 1))
    return "\n".join(f"| {' | '.join(cell or '–' for cell in row)} |" for row in (head, rule, *body))


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows as lines with aligned columns."""
    first, *widths = (max(len(row[column]) for row in rows) for column in range(len(rows[0])))
    lines: list[str] = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths, strict=True)]
        lines.append("  ".join([row[0].ljust(first), *cells]).rstrip())
    return "\n".join(lines)


def _value(figure: Figure, unit: str, mark: str = "") -> str:
    return f"{show(figure['value'], unit)}{mark}<small>{interval(figure, unit)}</small>"
