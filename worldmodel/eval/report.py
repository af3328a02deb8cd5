"""The HTML report of an evaluation, a folder of files without references to other sites."""

import base64
import importlib.resources
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

from worldmodel.errors import OutputError
from worldmodel.eval import plots
from worldmodel.eval.goals import interval, measured, show
from worldmodel.eval.suite import EvalSuite
from worldmodel.eval.tables import Table, data_tables, flat, split_tables, unit_of
from worldmodel.io import TEMPORARY_PREFIX, atomic_folder

PAGE = "index.html"
DATA = "results.json"
_MARKS = {
    True: '<span class="met">✓</span> ',
    False: '<span class="missed">✗</span> ',
    None: "",
}
"""Marks of examples that are right, wrong, or not judged."""
_ABOVE_BELOW = "Above the true frames, below the model's."


def write_report(results: Mapping[str, Any], folder: str | Path, suite: EvalSuite) -> Path:
    """Write the results as a page with charts and examples; return the page's path.

    An earlier report in the folder is replaced when the new one is complete.

    Raises:
        OutputError: The folder cannot be written, or holds files other than a report.
    """
    folder = check_folder(folder)
    with atomic_folder(folder) as temporary:
        _write(results, temporary, suite)
    return folder / PAGE


def check_folder(folder: str | Path) -> Path:
    """Return the folder's full path after checking that a report may be written to it.

    Raises:
        OutputError: It cannot be written, or holds files other than a report.
    """
    path = Path(folder).expanduser().resolve()
    try:
        if path.exists() and not path.is_dir():
            raise OutputError(f"{str(path)!r} is a file; name a folder for the report.")
        if (
            path.is_dir()
            and any(path.iterdir())
            and not ((path / PAGE).is_file() and (path / DATA).is_file())
        ):
            raise OutputError(f"{str(path)!r} holds files other than a report; name a new folder.")
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=path.parent).cleanup()
    except OSError as error:
        raise OutputError(
            f"{str(path)!r} cannot be written ({error.strerror}); choose another folder."
        ) from None
    return path


def json_values(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results without their examples."""
    return {name: value for name, value in results.items() if name != "examples"}


def _write(results: Mapping[str, Any], folder: Path, suite: EvalSuite) -> None:
    (folder / DATA).write_text(json.dumps(json_values(results), indent=1) + "\n", encoding="utf-8")
    charts = _charts(results["figures"], folder, suite)
    tables = _tables(results["figures"], suite)
    sections = [_goals(results, suite), *charts, *tables, _more(results["figures"])]
    sections += [*_examples(results.get("examples", []), folder, suite), _conditions(results)]
    template = (
        importlib.resources.files("worldmodel.eval").joinpath("report.html").read_text(encoding="utf-8")
    )
    name = results.get("model", "a world model")
    rows = measured(suite.goals, results)
    met = [goal.met(figure) for goal, figure in rows]
    goals = len(met) - met.count(None)
    reached = f"{met.count(True)} of {goals} goals met. " if goals else ""
    page = Template(template).substitute(
        title=escape(f"Evaluation of {name}"),
        summary=escape(
            f"Frames are judged by their pixels against the true outcome. {reached}Ranges are 95 % intervals."
        ),
        sections="\n".join(section for section in sections if section),
    )
    (folder / PAGE).write_text(page, encoding="utf-8")


def _goals(results: Mapping[str, Any], suite: EvalSuite) -> str:
    rows: list[str] = []
    for goal, figure in measured(suite.goals, results):
        met = goal.met(figure)
        style = "" if met is None else " met" if met else " missed"
        mark = "" if met is None else " ✓" if met else " ✗"
        rows.append(
            f"<tr><td>{escape(goal.title)}</td><td class=number>{goal.text}</td>"
            f'<td class="number{style}">{show(figure["value"], goal.unit)}{mark}'
            f"<small>{interval(figure, goal.unit)}</small></td>"
            f'<td class="number samples">{figure["n"]}</td></tr>'
        )
    head = (
        "<tr><th>Figure<th class=number>Goal<th class=number>Measured<th class='number samples'>Samples</tr>"
    )
    return _section("Figures and goals", "", f"<table>{head}{''.join(rows)}</table>")


def _charts(figures: Mapping[str, Any], folder: Path, suite: EvalSuite) -> list[str]:
    sections: list[str] = []

    def add(name: str, title: str, about: str, draw: Callable[[Any], bytes], values: object) -> None:
        (folder / f"{name}.png").write_bytes(draw(values))
        sections.append(_section(title, about, f'<img src="{name}.png" alt="{escape(title)}">'))

    for split, following in figures.get("action_following", {}).items():
        about = "A clip counts under each verb of its action."
        add(f"verbs-{split}", f"{suite.splits[split]}, by verb", about, plots.verbs, following)
    if "rollouts" in figures:
        about = "Each round starts from the model's own frames; errors add up. Shaded: 95 % intervals."
        draw = partial(plots.rounds, goals=suite.goals)
        add("rounds", "Rollouts, round by round", about, draw, figures["rollouts"])
    for measure, title in (
        ("psnr", "PSNR"),
        ("right", "Right by the judge"),
        ("action", "Action recognised"),
    ):
        if rows := figures.get("horizon", {}).get(measure):
            about = "Each round starts from the model's own frames; errors add up. Shaded: 95 % intervals."
            add(f"horizon-{measure}", f"{title}, round by round", about, plots.horizon, rows)
    if "steps" in figures:
        about = "With 0 steps, the forecast from the states is decoded."
        add("steps", "Denoising steps against quality", about, plots.steps, figures["steps"])
    return sections


def _tables(figures: Mapping[str, Any], suite: EvalSuite) -> list[str]:
    sections: list[str] = []
    for split, following in figures.get("action_following", {}).items():
        sections += [
            _section(f"{suite.splits[split]}, {table.title}", table.about, _table(table))
            for table in split_tables(following)
        ]
    sections += [_section(table.title, table.about, _table(table)) for table in data_tables(figures)]
    return sections


def _table(table: Table) -> str:
    head, *rows = table.rows
    titles = "".join(f"<th class=number>{escape(cell)}" for cell in head[1:])
    body = ""
    for row in rows:
        cells = "".join(f"<td class=number>{_cell(cell)}" for cell in row[1:])
        body += f"<tr><td>{escape(row[0])}{cells}</tr>"
    return f"<div class=wide><table><tr><th>{escape(head[0])}{titles}</tr>{body}</table></div>"


def _cell(text: str) -> str:
    """Return a cell with the interval of a rate below it."""
    value, bracket, rest = text.partition(" (")
    return escape(value) + (f"<small>{escape(rest.removesuffix(')'))}</small>" if bracket else "")


def _more(figures: Mapping[str, Any]) -> str:
    """List every rate and mean."""
    rows: list[str] = []
    for path, figure in flat(figures):
        unit = unit_of(path)
        value = f"{show(figure['value'], unit)}<small>{interval(figure, unit)}</small>"
        rows.append(
            f"<tr><td>{escape(' · '.join(path).replace('_', ' '))}</td><td class=number>{value}</td>"
            f"<td class='number samples'>{figure['n']}</td></tr>"
        )
    head = "<tr><th>Figure<th class=number>Measured<th class='number samples'>Samples</tr>"
    table = f"<table>{head}{''.join(rows)}</table>"
    return _section("All numbers", "", f"<details><summary>{len(rows)} figures</summary>{table}</details>")


def _examples(examples: Sequence[Mapping[str, Any]], folder: Path, suite: EvalSuite) -> list[str]:
    (folder / "examples").mkdir()
    sections: list[str] = []
    numbered = groupby(enumerate(examples), key=lambda pair: pair[1]["figure"])
    for figure, group in numbered:
        pairs = list(group)
        blocks: dict[bool | None, list[str]] = {True: [], False: [], None: []}
        for number, example in pairs:
            file = f"examples/{number:03d}.png"
            (folder / file).write_bytes(base64.b64decode(example["image"].partition(",")[2]))
            note = f"<br>{_shown(example['note'])}" if example["note"] else ""
            mark = _MARKS[example["right"]]
            blocks[example["right"]].append(
                f"<figure><figcaption>{mark}<b>{_shown(example['caption'])}</b>{note}</figcaption>"
                f'<img src="{file}" alt="{_shown(example["caption"])}" loading="lazy"></figure>'
            )
        small = " pair" if all(example["still"] for _, example in pairs) else ""
        body = "".join(
            f'{title}<div class="examples{small}">{"".join(blocks[right])}</div>'
            for right, title in ((True, "<h3>Right</h3>"), (False, "<h3>Wrong</h3>"), (None, ""))
            if blocks[right]
        )
        about = _ABOVE_BELOW if any(example["compared"] for _, example in pairs) else ""
        name = suite.splits.get(figure, figure[0].upper() + figure[1:])
        sections.append(_section(f"Examples: {name}", f"{about} The first of each kind, not selected.", body))
    return sections


def _shown(text: str) -> str:
    """Escape a text; the output of an untrained model also has bytes that HTML does not allow."""
    return escape("".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text))


def _conditions(results: Mapping[str, Any]) -> str:
    values = {**results["settings"], **results["machine"]}
    if "speed" in results["figures"]:
        values["first frame, 95th percentile"] = f"{results['figures']['speed']['first_frame_p95_s']:.3f} s"
    items = "".join(
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(str(value))}</dd>"
        for name, value in values.items()
        if value is not None
    )
    return _section("Conditions", "The same seed measures on the same samples.", f"<dl>{items}</dl>")


def _section(title: str, about: str, body: str) -> str:
    paragraph = f"<p>{escape(about.strip())}</p>" if about.strip() else ""
    return f"<section><h2>{escape(title)}</h2>{paragraph}{body}</section>"
