"""Figures as text tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from worldmodel.eval.goals import Goal, interval, show
from worldmodel.eval.metrics import Figure

_UNITS = {"psnr": "dB", "fps": "fps", "first_frame": "s", "late_to_early": "x", "ssim": ""}


def flat(figures: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Figure]]:
    """Yield the figures of nested mappings with the keys that lead to them; lists are skipped."""
    for name, value in figures.items():
        if not isinstance(value, Mapping):
            continue
        if {"value", "low", "high", "n"} <= set(value):
            yield (name,), {key: value[key] for key in ("value", "low", "high", "n")}
        else:
            yield from (((name, *path), figure) for path, figure in flat(value))


def unit_of(path: Sequence[str]) -> str:
    """Return the unit of a figure by its last key."""
    return _UNITS.get(path[-1], "%")


def text_table(title: str, figures: Mapping[str, Any]) -> str:
    """Return nested figures as aligned lines under a title."""
    rows = [(title, "measured", "95 % interval", "n")]
    for path, figure in flat(figures):
        unit = unit_of(path)
        name = " ".join(path).replace("_", " ")
        rows.append((f"  {name}", show(figure["value"], unit), interval(figure, unit), str(figure["n"])))
    return _aligned(rows) + "\n"


def goals_table(rows: Sequence[tuple[Goal, Figure]]) -> str:
    """Return figures and their goals as aligned lines."""
    lines = [("", "goal", "measured", "95 % interval", "n")]
    for goal, figure in rows:
        mark = {True: " +", False: " -", None: "  "}[goal.met(figure)]
        measured = show(figure["value"], goal.unit) + mark
        lines.append((goal.title, goal.text, measured, interval(figure, goal.unit), str(figure["n"])))
    return _aligned(lines) + "\n(+ goal met, - goal missed)"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    first, *widths = (max(len(row[column]) for row in rows) for column in range(len(rows[0])))
    lines = (
        "  ".join([row[0].ljust(first), *(cell.rjust(w) for cell, w in zip(row[1:], widths, strict=True))])
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
