"""Charts of the report; matplotlib is imported when the first one is drawn."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from worldmodel.eval.goals import Goal
from worldmodel.eval.metrics import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

INK, GREY, GRID = "#1d2433", "#667085", "#e4e7ec"
BLUE, ORANGE, TEAL = "#2563eb", "#d97706", "#0f766e"
_ROWS = {
    "model": ("model", BLUE),
    "zero_steps": ("0 steps", TEAL),
    "codec": ("codec alone", GREY),
    "copy": ("copy of the first frame", ORANGE),
    "truth": ("recorded frames", INK),
}
"""Labels and colours of predictions of recorded episodes."""
_NAMES = {"named": "named object", "strict": "whole frame", "others": "other objects"}
_COLOURS = {"named": BLUE, "strict": ORANGE, "others": TEAL}


def verbs(following: Mapping[str, Any]) -> bytes:
    """Draw the rates of one split by verb, as PNG."""
    by_verb = following["by_verb"]
    canvas, axes = _canvas(0.42 * len(by_verb) + 1.1)
    for offset, name in ((-0.19, "named"), (0.19, "strict")):
        figures = [rates[name] for rates in by_verb.values()]
        positions = [index + offset for index in range(len(figures))]
        values = [100 * figure["value"] for figure in figures]
        axes.barh(positions, values, 0.36, color=_COLOURS[name], label=_NAMES[name])
        axes.errorbar(
            values, positions, xerr=_reach(figures), fmt="none", ecolor=GREY, elinewidth=0.9, capsize=2
        )
    counts = [f"{verb} ({rates['strict']['n']})" for verb, rates in by_verb.items()]
    axes.set_yticks(range(len(counts)), counts)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("right, % of clips (number of clips in brackets, 95 % intervals)")
    axes.grid(axis="x", color=GRID)
    axes.legend(**_LEGEND)
    return _png(canvas)


def rounds(rollouts: Mapping[str, Sequence[Figure]], goals: Sequence[Goal]) -> bytes:
    """Draw the rates of rollouts by round, as PNG."""
    canvas, axes = _canvas(3.6)
    for name in ("named", "others", "strict"):
        _line(axes, range(1, len(rollouts[name]) + 1), rollouts[name], _COLOURS[name], _NAMES[name])
    targets = [
        (int(goal.path[2]) + 1, 100 * goal.at_least)
        for goal in goals
        if goal.path[:2] == ("rollouts", "strict") and goal.at_least is not None
    ]
    shown = [target for target in targets if target[0] <= len(rollouts["strict"])]
    if shown:
        numbers, shares = zip(*shown, strict=True)
        axes.plot(numbers, shares, "_", color=INK, markersize=16, markeredgewidth=2, label="goal")
    axes.set_ylim(-2, 102)
    axes.set_xticks(range(1, len(rollouts["strict"]) + 1))
    axes.set_xlabel("round")
    axes.set_ylabel("right, % of rollouts")
    axes.grid(axis="y", color=GRID)
    axes.legend(**_LEGEND)
    return _png(canvas)


def steps(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Draw quality against denoising steps, as PNG."""
    canvas, axes = _canvas(3.6)
    positions = range(len(rows))
    for name in ("named", "strict"):
        _line(axes, positions, [row[name] for row in rows], _COLOURS[name], _NAMES[name])
    low = min(row["strict"]["low"] for row in rows)
    axes.set_ylim(max(-2, 100 * low - 5), 102)
    axes.set_ylabel("right, % of clips")
    axes.set_xlabel("denoising steps")
    labels = [str(row["steps"]) if row["steps"] else "forecast\nalone" for row in rows]
    axes.set_xticks(positions, labels)
    right = axes.twinx()
    right.spines[["top", "left"]].set_visible(False)
    right.spines["right"].set_color(GRID)
    values = [row["psnr"]["value"] for row in rows]
    right.plot(positions, values, "s--", color=TEAL, markersize=4, label="PSNR, dB (right)")
    right.set_ylim(min(values) - 2, max(values) + 2)
    right.set_ylabel("PSNR, dB", color=GREY)
    right.tick_params(length=0, labelcolor=INK)
    axes.grid(axis="y", color=GRID)
    lines = [*axes.get_lines(), *right.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], **_LEGEND)
    return _png(canvas)


def horizon(rows: Mapping[str, Sequence[Figure]]) -> bytes:
    """Draw a measure by round for the model and simpler predictions, as PNG."""
    from matplotlib.ticker import MaxNLocator

    canvas, axes = _canvas(3.6)
    verdicts = all(figure["high"] <= 1 for figures in rows.values() for figure in figures)
    scale = 100.0 if verdicts else 1.0
    for name, (title, colour) in _ROWS.items():
        if name in rows:
            _line(axes, range(1, len(rows[name]) + 1), rows[name], colour, title, scale)
    axes.set_xlabel("round")
    axes.set_ylabel("% of episodes" if verdicts else "dB")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=GRID)
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


def _line(
    axes: "Axes",
    positions: Sequence[int],
    figures: Sequence[Figure],
    colour: str,
    label: str,
    scale: float = 100.0,
) -> None:
    axes.plot(
        positions,
        [scale * figure["value"] for figure in figures],
        "o-",
        color=colour,
        markersize=4,
        label=label,
    )
    low, high = ([scale * figure[end] for figure in figures] for end in ("low", "high"))
    axes.fill_between(positions, low, high, color=colour, alpha=0.13, linewidth=0)


def _reach(figures: Sequence[Figure]) -> list[list[float]]:
    """Return the distances from the values to the ends of their intervals, in percent."""
    below = [100 * (figure["value"] - figure["low"]) for figure in figures]
    above = [100 * (figure["high"] - figure["value"]) for figure in figures]
    return [[max(0.0, reach) for reach in side] for side in (below, above)]


def _png(canvas: "Canvas") -> bytes:
    from matplotlib import pyplot

    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=200, facecolor="white")
    pyplot.close(canvas)
    return buffer.getvalue()
