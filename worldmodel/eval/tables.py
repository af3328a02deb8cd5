"""Figures as text tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from worldmodel.eval.goals import Goal, interval, show
from worldmodel.eval.metrics import Figure

_SUBJECTS = {"": "", "copy_": "copy: ", "forecast_": "0 steps: "}
_VERDICTS = {"named": "named object", "strict": "whole frame"}
_ROWS = {
    "model": "model",
    "zero_steps": "0 denoising steps",
    "codec": "codec alone",
    "copy": "copy of the first frame",
    "truth": "recorded frames",
}
"""Titles of the rows of tables on recorded episodes, in their order."""
_MEASURES = {
    "psnr": ("PSNR, dB", "dB"),
    "ssim": ("SSIM", ""),
    "perceptual": ("perceptual distance", ""),
    "sharpness": ("sharpness against the recorded frames", "x"),
    "right": ("right by the judge", "%"),
    "action": ("action recognised in the frames", "%"),
    "action_error": ("error of the recognised action", ""),
    "differ": ("another action, another picture", "%"),
    "own_nearer": ("own action nearer to the truth", "%"),
    "recognised": ("other action recognised", "%"),
    "same_start_differ": ("same start: differs where the truth does", "%"),
    "same_start_agree": ("same start: agrees where the truth does", "%"),
    "moved": ("the action changes the picture", "%"),
    "returned": ("back at the start", "%"),
    "frechet": ("Fréchet distance", ""),
    "reward_f1": ("rewards, F1", ""),
    "reward_recall": ("rewards found", "%"),
    "reward_precision": ("rewards right", "%"),
    "end_f1": ("ends, F1", ""),
    "end_recall": ("ends found", "%"),
    "end_precision": ("ends right", "%"),
    "reward_error": ("error of the reward", ""),
}
"""Titles and units of measures on recorded episodes."""
_MAX_COLUMNS = 8
_UNITS = {
    "psnr": "dB",
    "fps": "fps",
    "first_frame": "s",
    "late_to_early": "x",
    "ssim": "",
    "reward_f1": "",
    "end_f1": "",
    "reward_error": "",
    "total_variation": "",
    "sampling_noise": "",
}


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
    """Return the unit of a figure by the last of its keys that names a measure."""
    units = {measure: unit for measure, (_, unit) in _MEASURES.items()} | _UNITS
    return next((units[key] for key in reversed(path) if key in units), "%")


class Table(NamedTuple):
    """A table of a split: its title, a sentence about it, and its rows, a head first."""

    title: str
    about: str
    rows: list[tuple[str, ...]]


def split_tables(figures: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the tables of a split beside its rates: its kinds of sentence and its confusions."""
    if "by_kind" in figures:
        columns = {
            prefix + name: before + title
            for prefix, before in _SUBJECTS.items()
            for name, title in _VERDICTS.items()
        }
        rows = [("", *columns.values(), "n")]
        for kind, rates in figures["by_kind"].items():
            cells = [_rate(rates[name]) if name in rates else "" for name in columns]
            rows.append((kind, *cells, str(next(iter(rates.values()))["n"])))
        about = "Copy repeats the first frame; 0 steps decodes the forecast. In brackets: 95 % intervals."
        yield Table("by kind", about, rows)
    if "confusion" in figures:
        confusion = figures["confusion"]
        shown = dict.fromkeys([*confusion, *(name for row in confusion.values() for name in row)])
        rows = [("asked for", *shown)]
        rows += [(asked, *(str(row.get(name, "")) for name in shown)) for asked, row in confusion.items()]
        yield Table("confusions", "Rows: what was asked for. Columns: what the frames show.", rows)


def data_tables(figures: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the tables on recorded episodes, whose rows are the model and simpler predictions."""
    horizon = dict(figures.get("horizon", {}))
    trend, frechet = horizon.pop("trend", None), horizon.pop("frechet", None)
    for measure, rows in horizon.items():
        title, unit = _MEASURES[measure]
        length = max(map(len, rows.values()))
        numbers = sorted({round(1 + i * (length - 1) / (_MAX_COLUMNS - 1)) for i in range(_MAX_COLUMNS)})
        head = ("", *(f"round {number}" for number in numbers), "n")
        body = [
            (
                _ROWS[row],
                *(_in_table(rows[row][number - 1], unit) for number in numbers),
                str(rows[row][0]["n"]),
            )
            for row in _ROWS
            if row in rows
        ]
        yield Table(f"{title[0].upper()}{title[1:]}, by round", "In brackets: 95 % intervals.", [head, *body])
    if trend:
        about = "Mean slope of the episodes over their rounds; in brackets: 95 % intervals."
        yield _by_measure("Change per round", about, trend)
    if frechet:
        about = "Between the features of the last frames of all predicted and all recorded rounds."
        yield _by_measure("Fréchet distance over the given network", about, frechet)
    for name, (title, about) in _SECTIONS.items():
        if figures.get(name):
            yield _by_measure(title, about, figures[name])


_SECTIONS = {
    "counterfactuals": (
        "Counterfactuals",
        "Recorded rounds, played with their own and with another action. Rounds with the same start: pairs "
        "in the data. In brackets: 95 % intervals.",
    ),
    "outcomes": (
        "Rewards and ends",
        "Predicted on the model's own frames. A reward counts from half the mean size of the recorded ones "
        "that are not 0. With a copy of the first frame nothing happens: no reward and no end. In brackets: "
        "95 % intervals.",
    ),
    "returns": (
        "Action and inverse",
        "PSNR and return are of the worlds whose picture the action changes, against the start; those of a "
        "copy, which never leaves the start, are of all worlds.",
    ),
}


def _by_measure(title: str, about: str, measures: Mapping[str, Mapping[str, Figure]]) -> Table:
    """Return a table with a column for each measure."""
    names = {measure: _MEASURES.get(measure, (measure, "")) for measure in measures}
    rows = [
        (
            _ROWS[row],
            *(_in_table(each[row], names[name][1]) if row in each else "" for name, each in measures.items()),
        )
        for row in _ROWS
        if any(row in each for each in measures.values())
    ]
    return Table(title, about, [("", *(text for text, _ in names.values())), *rows])


def _in_table(figure: Figure, unit: str) -> str:
    return f"{show(figure['value'], unit)} ({interval(figure, unit)})"


def _rate(figure: Figure) -> str:
    return f"{show(figure['value'], '%')} ({interval(figure, '%')})"


def text_table(title: str, figures: Mapping[str, Any]) -> str:
    """Return nested figures as aligned lines under a title."""
    rows = [(title, "measured", "95 % interval", "n")]
    for path, figure in flat(figures):
        unit = unit_of(path)
        name = " ".join(path).replace("_", " ")
        rows.append((f"  {name}", show(figure["value"], unit), interval(figure, unit), str(figure["n"])))
    return aligned(rows) + "\n"


def goals_table(rows: Sequence[tuple[Goal, Figure]]) -> str:
    """Return figures and their goals as aligned lines."""
    lines = [("", "goal", "measured", "95 % interval", "n")]
    for goal, figure in rows:
        mark = {True: " +", False: " -", None: "  "}[goal.met(figure)]
        measured = show(figure["value"], goal.unit) + mark
        lines.append((goal.title, goal.text, measured, interval(figure, goal.unit), str(figure["n"])))
    if not any(goal.text for goal, _ in rows):
        return aligned([(title, *cells) for title, _, *cells in lines])
    return aligned(lines) + "\n(+ goal met, - goal missed)"


def markdown(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows, a head first, as a table in markdown."""
    head, *body = rows
    lines = [head, ("---", *["---:"] * (len(head) - 1)), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows as lines with aligned columns."""
    first, *widths = (max(len(row[column]) for row in rows) for column in range(len(rows[0])))
    lines = (
        "  ".join([row[0].ljust(first), *(cell.rjust(w) for cell, w in zip(row[1:], widths, strict=True))])
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
