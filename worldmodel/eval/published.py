"""Published figures of a model, figures.json of its folder: what was measured, and the settings to repeat it.

`worldmodel publish` writes the file, `worldmodel verify` measures its rows again.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from worldmodel.config import ImageSize
from worldmodel.errors import ModelError
from worldmodel.eval.figures import Figure
from worldmodel.eval.table import Row, Table, aligned, find, interval, row_from_json, show

FILE, FORMAT = "figures.json", 1
SPEED = "speed"
"""First key of figures that depend on the machine."""
LEAST_SAMPLES = 24
QUICK_SHARE = 8
"""A quick run has this part of the published samples, at least `LEAST_SAMPLES`."""
TOLERANCE = 1e-6
"""Relative tolerance at the ends of an interval, for sums in another order."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Episodes that are recorded from an environment before an evaluation on them.

    Attributes:
        env_id: Environment, as `worldmodel record` takes it.
        episodes: Number of episodes.
        policy: Policy that plays.
        size: Side of the frames, or height and width.
        max_steps: Longest episode.
        seed: Seed of the episodes.
        held_out_by: How `worldmodel data split` divides them; None holds out all of them.
    """

    env_id: str
    episodes: int
    policy: str
    size: ImageSize
    max_steps: int
    seed: int = 0
    held_out_by: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One evaluation and its published rows.

    Attributes:
        settings: Fields of `EvalSettings`, or of `DataSettings` for recorded episodes.
        rows: Published figures.
        recording: The episodes of an evaluation on recorded episodes.
        conditions: Machine and software of the measurement.
    """

    settings: Mapping[str, Any]
    rows: Sequence[Row]
    recording: Recording | None = None
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def quick(self) -> "Run":
        """Return the same run on fewer samples."""
        published = self.settings["num_samples"]
        count = min(published, max(LEAST_SAMPLES, math.ceil(published / QUICK_SHARE)))
        return replace(self, settings={**self.settings, "num_samples": count})

    def needs(self, part: str) -> bool:
        """Return whether a part of a suite, named by its keys joined by `/`, measures any of the rows."""
        keys = tuple(part.split("/"))
        paths = [path for row in self.rows for path in (row.path, *row.baseline_paths.values())]
        if part == "inverse_dynamics":  # trains the network behind `action` and `recognised`
            return any({"action", "recognised"} & set(path) for path in paths)
        return any(path[: len(keys)] == keys for path in paths)


def run_of(results: Mapping[str, Any], recording: Recording | None = None) -> Run:
    """Return the published run of an evaluation: the table of its goals."""
    table = Table.from_json(results["tables"][0])
    return Run(results["settings"], table.rows, recording, results["machine"])


def read_runs(folder: Path) -> list[Run]:
    """Read the published runs of a model folder.

    Raises:
        ModelError: The folder has no figures, or they cannot be read.
    """
    path = folder / FILE
    if not path.is_file():
        raise ModelError(f"{folder} has no {FILE}, so no figures can be verified; run worldmodel publish.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']}")
        return [_run(each) for each in values["runs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} cannot be read ({error}); fetch the model again.") from None


def runs_text(runs: Iterable[Run]) -> str:
    """Return runs as the text of figures.json, with one row a line."""
    texts: list[str] = []
    for run in runs:
        entry: dict[str, Any] = {"settings": dict(run.settings), "conditions": dict(run.conditions)}
        if run.recording is not None:
            recording = run.recording
            entry["recording"] = {name: getattr(recording, name) for name in recording.__dataclass_fields__}
        head = json.dumps(entry, ensure_ascii=False).removesuffix("}")
        rows = [json.dumps(row, ensure_ascii=False) for row in Table("", run.rows).to_json()["rows"]]
        texts.append(head + ', "rows": [\n  ' + ",\n  ".join(rows) + "\n ]}")
    return f'{{"format": {FORMAT}, "runs": [\n ' + ",\n ".join(texts) + "\n]}\n"


def published_table(runs: Iterable[Run]) -> Table:
    """Return the rows that have a goal as one table, for the model card; all rows if none has one."""
    rows = [row for run in runs for row in run.rows]
    return Table("Figures", [row for row in rows if row.goal] or rows)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A published figure and the same figure measured now.

    Attributes:
        title: Name of the figure.
        unit: Unit.
        published: The published figure.
        measured: The figure measured now; None where the samples had none.
        inside: Whether they agree; None without a measured figure.
    """

    title: str
    unit: str
    published: Figure
    measured: Figure | None
    inside: bool | None


def compare(run: Run, figures: Mapping[str, Any], quick: bool = False) -> list[Comparison]:
    """Compare the rows of a run, and their baselines, with figures measured now.

    On as many samples as published, a row is inside if the measured value lies in the published interval; on
    fewer (`quick`), if the two intervals overlap.
    """
    found: list[Comparison] = []
    for row in run.rows:
        named = [(row.title, row.figure, row.path)]
        named += [(f"– {name}", row.baselines[name], path) for name, path in row.baseline_paths.items()]
        for title, published, path in named:
            measured = find(figures, path)
            if measured is None:
                found.append(Comparison(title, row.unit, published, None, None))
                continue
            slack = TOLERANCE * max(1.0, abs(published["value"]))
            low, high = published["low"] - slack, published["high"] + slack
            if quick:
                inside = measured["high"] >= low and measured["low"] <= high
            else:
                inside = low <= measured["value"] <= high
            found.append(Comparison(title, row.unit, published, measured, inside))
    return found


def comparison_text(comparisons: Sequence[Comparison]) -> str:
    """Return comparisons as lines with aligned columns."""
    rows: list[tuple[str, ...]] = [
        ("", "published", "95 % interval", "n", "measured", "95 % interval", "n", "")
    ]
    words = {True: "inside", False: "OUTSIDE", None: "not measured"}
    for each in comparisons:
        shown: list[str] = []
        for figure in (each.published, each.measured):
            if figure is None:
                shown += ["", "", ""]
            else:
                shown += [show(figure["value"], each.unit), interval(figure, each.unit), str(figure["n"])]
        rows.append((each.title, *shown, words[each.inside]))
    return aligned(rows)


def _run(values: Mapping[str, Any]) -> Run:
    recording = values.get("recording")
    if recording is not None:
        size = recording["size"]
        recording = Recording(**{**recording, "size": tuple(size) if isinstance(size, list) else size})
    rows = [row_from_json(row) for row in values["rows"]]
    return Run(values["settings"], rows, recording, values.get("conditions", {}))
