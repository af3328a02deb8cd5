"""The HTML report of an evaluation, a folder of files without references to other sites."""

import base64
import importlib.resources
import json
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

from worldmodel.errors import OutputError
from worldmodel.eval.charts import Chart
from worldmodel.eval.table import Table
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


def write_report(results: Mapping[str, Any], folder: str | Path) -> Path:
    """Write the results of `evaluate` as a page with tables, charts and examples; return the page's path.

    An earlier report in the folder is replaced when the new one is complete.

    Raises:
        OutputError: The folder cannot be written, or holds files other than a report.
    """
    folder = check_folder(folder)
    with atomic_folder(folder) as temporary:
        _write(results, temporary)
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
    """Return the results without their charts and examples."""
    return {name: value for name, value in results.items() if name not in ("charts", "examples")}


def _write(results: Mapping[str, Any], folder: Path) -> None:
    (folder / DATA).write_text(json.dumps(json_values(results), indent=1) + "\n", encoding="utf-8")
    tables = [Table.from_json(each) for each in results["tables"]]
    sections = [_section(table.title, table.about, table.html()) for table in tables if not table.details]
    sections[1:1] = [_chart(Chart.from_json(each), folder) for each in results["charts"]]
    details = [
        f"<details><summary>{escape(table.title)}</summary><p>{escape(table.about)}</p>{table.html()}</details>"
        for table in tables
        if table.details
    ]
    if details:
        sections.append(_section("All numbers", "", "".join(details)))
    sections += [*_examples(results.get("examples", []), folder), _conditions(results)]
    template = (
        importlib.resources.files("worldmodel.eval").joinpath("report.html").read_text(encoding="utf-8")
    )
    met = [row.met for row in tables[0].rows if row.met is not None] if tables else []
    reached = f"{met.count(True)} of {len(met)} goals met. " if met else ""
    page = Template(template).substitute(
        title=escape(f"Evaluation of {results.get('model', 'a world model')}"),
        summary=escape(
            f"Frames are judged by their pixels against the true outcome. {reached}Ranges are 95 % intervals."
        ),
        sections="\n".join(sections),
    )
    (folder / PAGE).write_text(page, encoding="utf-8")


def _chart(chart: Chart, folder: Path) -> str:
    (folder / f"{chart.name}.png").write_bytes(chart.draw())
    return _section(chart.title, chart.about, f'<img src="{chart.name}.png" alt="{escape(chart.title)}">')


def _examples(examples: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
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
        body = ""
        for right, title in ((True, "<h3>Right</h3>"), (False, "<h3>Wrong</h3>"), (None, "")):
            if blocks[right]:
                body += f'{title}<div class="examples{small}">{"".join(blocks[right])}</div>'
        about = _ABOVE_BELOW if any(example["compared"] for _, example in pairs) else ""
        name = figure[:1].upper() + figure[1:]
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
