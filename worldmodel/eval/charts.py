"""Charts of the report; matplotlib is imported when the first one is drawn."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from worldmodel.eval.figures import Figure
from worldmodel.eval.table import Unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

INK, GREY, GRID = "#1d2433", "#667085", "#e4e7ec"
COLOURS = ("#2563eb", "#d97706", "#0f766e", GREY, INK)


@dataclass(frozen=True, slots=True)
class Chart:
    """Figures to draw: as lines over `labels`, or as bars beside them.

    Attributes:
        name: Name of the image file, without suffix.
        title: Title.
        labels: One label for each position.
        series: Figures by name, one for each position.
        kind: Lines or horizontal bars.
        about: A sentence below the title.
        unit: Unit of the figures.
        axis: Name of the axis of the labels.
        targets: Goals by position.
    """

    name: str
    title: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[Figure]]
    kind: Literal["lines", "bars"] = "lines"
    about: str = ""
    unit: Unit = "%"
    axis: str = "round"
    targets: Mapping[int, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON; positions of targets become strings there."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Chart":
        """Return the chart of plain values."""
        targets = {int(position): value for position, value in values.get("targets", {}).items()}
        return cls(**{**values, "targets": targets})

    def draw(self) -> bytes:
        """Return the chart as PNG."""
        return _lines(self) if self.kind == "lines" else _bars(self)


def _lines(chart: Chart) -> bytes:
    canvas, axes = _canvas(3.6)
    scale = 100.0 if chart.unit == "%" else 1.0
    for (name, figures), colour in zip(chart.series.items(), COLOURS, strict=False):
        positions = range(len(figures))
        values, low, high = ([scale * each[end] for each in figures] for end in ("value", "low", "high"))
        axes.plot(positions, values, "o-", color=colour, markersize=4, label=name)
        axes.fill_between(positions, low, high, color=colour, alpha=0.13, linewidth=0)
    if chart.targets:
        goals = [scale * goal for goal in chart.targets.values()]
        axes.plot(list(chart.targets), goals, "_", color=INK, markersize=16, markeredgewidth=2, label="goal")
    if chart.unit == "%":
        axes.set_ylim(-2, 102)
    shown = range(0, len(chart.labels), max(1, len(chart.labels) // 12))  # long rollouts have many rounds
    axes.set_xticks(list(shown), [chart.labels[position] for position in shown])
    axes.set_xlabel(chart.axis)
    axes.set_ylabel("right, %" if chart.unit == "%" else chart.unit)
    axes.grid(axis="y", color=GRID)
    axes.legend(**_LEGEND)
    return _png(canvas)


def _bars(chart: Chart) -> bytes:
    canvas, axes = _canvas(0.42 * len(chart.labels) + 1.1)
    height = 0.76 / len(chart.series)
    for index, ((name, figures), colour) in enumerate(zip(chart.series.items(), COLOURS, strict=False)):
        positions = [place + (index - (len(chart.series) - 1) / 2) * height for place in range(len(figures))]
        values = [100 * each["value"] for each in figures]
        below = [max(0.0, 100 * (each["value"] - each["low"])) for each in figures]
        above = [max(0.0, 100 * (each["high"] - each["value"])) for each in figures]
        axes.barh(positions, values, 0.95 * height, color=colour, label=name)
        style: dict[str, Any] = {"fmt": "none", "ecolor": GREY, "elinewidth": 0.9, "capsize": 2}
        axes.errorbar(values, positions, xerr=[below, above], **style)
    axes.set_yticks(range(len(chart.labels)), list(chart.labels))
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("right, % (95 % intervals)")
    axes.grid(axis="x", color=GRID)
    axes.legend(**_LEGEND)
    return _png(canvas)


_LEGEND: dict[str, Any] = {
    "frameon": False,
    "loc": "lower left",
    "bbox_to_anchor": (-0.01, 1.0),
    "ncols": 4,
    "borderaxespad": 0.2,
    "handlelength": 1.4,
    "columnspacing": 1.4,
}


def _canvas(height: float) -> "tuple[Canvas, Axes]":
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": GREY,
        "axes.edgecolor": GRID,
    }
    with mpl.rc_context({**style, "xtick.color": INK, "ytick.color": INK}):
        canvas, axes = pyplot.subplots(figsize=(7.2, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    return canvas, axes


def _png(canvas: "Canvas") -> bytes:
    from matplotlib import pyplot

    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=200, facecolor="white")
    pyplot.close(canvas)
    return buffer.getvalue()
