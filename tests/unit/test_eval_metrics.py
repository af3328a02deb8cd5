"""The registry of metrics, and a metric from outside the package in every place that prints figures."""

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import numpy as np
import pytest

from worldmodel.actions import Action
from worldmodel.cli import main
from worldmodel.errors import InputError
from worldmodel.eval import metrics
from worldmodel.eval.action_following import METRICS, action_following, following_tables
from worldmodel.eval.card import model_card
from worldmodel.eval.examples import Album
from worldmodel.eval.judge import Case, Verdict
from worldmodel.eval.metrics import Metric, Played, get_metric, get_metrics, metric_names
from worldmodel.eval.published import Run, runs_text
from worldmodel.eval.suite import CardText, EvalSettings
from worldmodel.eval.table import Row, Table, row_from_json
from worldmodel.shapes.evaluation.suite import ShapesSuite

SIZE, FRAMES = 16, 2


class Brightness(Metric):
    """Difference of the mean grey level from the truth."""

    name, title, unit, baseline = "brightness", "error of brightness", "", True

    def __call__(self, played: Played) -> Sequence[float]:
        pairs = zip(played.clips, played.truth, strict=True)
        return [abs(float(made.mean()) - float(true.mean())) for made, true in pairs]


NAME = f"{__name__}:Brightness"


class Grey:
    """Worlds whose frames all have one grey level."""

    def __init__(self, level: int, count: int) -> None:
        self.clip = np.full((count, FRAMES, SIZE, SIZE, 3), level, np.uint8)

    def step(self, actions: Sequence[Action]) -> np.ndarray:
        return self.clip


class GreySubject:
    def __init__(self, level: int) -> None:
        self.level = level

    def open(self, starts: np.ndarray, seeds: Sequence[int]) -> Grey:
        return Grey(self.level, len(starts))


def judge(frame: np.ndarray, truth: int, /) -> Verdict:
    right = bool((frame == truth).all())
    return Verdict(right, right, right)


def grey_case(start: int, end: int) -> Case:
    frames = np.full((FRAMES, SIZE, SIZE, 3), end, np.uint8)
    return Case(
        "dim", Action("dim"), np.full((SIZE, SIZE, 3), start, np.uint8), start, frames, [end] * FRAMES
    )


def test_metrics_are_found_by_name() -> None:
    assert {
        "psnr",
        "ssim",
        "sharpness",
        "perceptual",
        "named",
        "others",
        "strict",
        "every_frame",
        "right",
    } <= {*metric_names()}
    for name in metric_names():
        if name != "perceptual":  # takes the file of its weights
            metric = get_metric(name)
            assert metric.name == name and metric.title


def test_a_metric_from_outside_has_figures_baselines_and_a_row() -> None:
    chosen = get_metrics((*METRICS, NAME))
    cases = [grey_case(100, 60)] * 4
    found = action_following(GreySubject(80), cases, judge, metrics=chosen, forecast=GreySubject(70))
    assert found["brightness"]["value"] == 20
    assert found["copy_brightness"]["value"] == 40
    assert found["forecast_brightness"]["value"] == 10
    (table, *_) = following_tables(found, "Dimming", chosen)
    row = next(row for row in table.rows if row.title == "error of brightness")
    assert (row.figure["value"], row.unit) == (20, "")
    assert {name: each["value"] for name, each in row.baselines.items()} == {"0 steps": 10, "copy": 40}
    for printed in (table.text(), table.markdown(), table.html(), json.dumps(table.to_json())):
        assert "error of brightness" in printed and "20" in printed


def test_a_suite_measures_a_metric_from_outside() -> None:
    suite = ShapesSuite()
    settings = EvalSettings("held-out", 2, metrics=(NAME,))

    class Still(GreySubject):
        def open(self, starts: np.ndarray, seeds: Sequence[int]) -> Grey:
            worlds = Grey(0, 1)
            worlds.clip = np.repeat(starts[:, None], 8, axis=1)
            return worlds

        def with_steps(self, num_inference_steps: int) -> "Still":
            return self

    (part,) = suite.parts(settings, None, Album())
    assert part.tables is not None
    found = part.measure(Still(0))  # type: ignore[arg-type]
    assert found["brightness"] == found["copy_brightness"]
    assert any(row.title == "error of brightness" for table in part.tables(found) for row in table.rows)


def test_metrics_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("brightness", NAME, metrics.GROUP)
    monkeypatch.setattr(metrics, "entry_points", lambda group: EntryPoints((point,)).select(group=group))
    assert "brightness" in metric_names()
    assert type(get_metric("brightness")).__name__ == "Brightness"


def test_unknown_metrics_are_input_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("gone", "gone.module:Metric", f"{__name__}:Gone", f"{__name__}:SIZE", "perceptual"):
        with pytest.raises(InputError, match=name.partition(":")[0]):
            get_metric(name)
    argv = ["eval", "shapes-tiny", "--report", str(tmp_path / "report"), "--metric", "gone"]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "'gone'" in error and error.count("\n") == 1


def test_one_table_is_printed_everywhere() -> None:
    good = {"value": 0.95, "low": 0.9, "high": 0.98, "n": 100}
    poor = {"value": 0.2, "low": 0.1, "high": 0.3, "n": 100}
    rows = [
        Row(
            "reached",
            good,
            at_least=0.9,
            baselines={"copy": poor},
            path=("a", 0),
            baseline_paths={"copy": ("b",)},
        ),
        Row("not reached", poor, at_least=0.9, note="why"),
        Row("no goal", {"value": 31.25, "low": 30.0, "high": 32.0, "n": 7}, "dB"),
    ]
    table = Table("Figures", rows)
    values = json.loads(json.dumps(table.to_json()))
    assert [row.get("met") for row in values["rows"]] == [True, False, None]
    assert Table.from_json(values) == replace(table, rows=[row_from_json(row) for row in values["rows"]])
    assert Table.from_json(values).rows[0].path == ("a", 0)
    text = table.text().splitlines()
    assert text[1].split("  ")[0] == "reached" and "95 % +" in text[1] and "20 % -" in text[2]
    markdown = table.markdown().splitlines()
    assert markdown[0] == "| Figure | Goal | Measured | 95 % interval | Copy | N | Notes |"
    assert markdown[2] == "| reached | ≥ 90 % | 95 % | 90 to 98 | 20 % | 100 | – |"
    assert "20 % (missed)" in markdown[3] and "31.2 dB" in markdown[4]
    html = table.html()
    assert html.count("<tr>") == 4 and 'class="number missed">20 % ✗' in html


def test_a_card_has_one_table_and_few_words() -> None:
    goals = ShapesSuite.goals[:32]
    figure = {"value": 0.5, "low": 0.4, "high": 0.6, "n": 400}
    rows = [Row(goal.title, figure, goal.unit, goal.at_least, path=goal.path) for goal in goals]
    settings = {"split": None, "num_samples": 400, "rounds": 10, "seed": 1234, "num_inference_steps": 1}
    card = model_card([Run(settings, rows)], "shapes-tiny", ShapesSuite.card)
    text = card.partition("\n---\n")[2]
    assert text.count("| Figure |") == 1
    # Numbers, units and rules of the table are not words to read.
    words = [word for word in text.split() if any(sign.isalpha() for sign in word)]
    assert len(words) <= 600
    assert isinstance(ShapesSuite.card, CardText) and "worldmodel verify shapes-tiny" in card
    assert json.loads(runs_text([Run(settings, rows)]))["runs"][0]["rows"][0]["title"] == goals[0].title
