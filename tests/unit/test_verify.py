"""Published figures and `worldmodel verify`."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from worldmodel.cli import main
from worldmodel.errors import ModelError
from worldmodel.eval.card import with_figures
from worldmodel.eval.figures import rate_figure
from worldmodel.eval.published import Run, compare, comparison_text, published_table, read_runs, runs_text
from worldmodel.eval.suite import EvalSettings
from worldmodel.eval.table import Row
from worldmodel.models.loading.location import resolve, shipped_models
from worldmodel.shapes.evaluation.suite import ShapesSuite

SETTINGS = {"split": "held-out", "num_samples": 8, "rounds": 10, "seed": 1234, "num_inference_steps": 0}
STRICT = ("action_following", "held-out", "strict")
COPY = ("action_following", "held-out", "copy_strict")


def published(right: int, copied: int = 0, total: int = 8) -> Run:
    row = Row(
        "the frame is right",
        rate_figure(right, total),
        at_least=0.9,
        baselines={"copy": rate_figure(copied, total)},
        path=STRICT,
        baseline_paths={"copy": COPY},
    )
    return Run({**SETTINGS, "num_samples": total}, [row])


def results(right: int, copied: int, total: int) -> dict[str, Any]:
    figures = {"strict": rate_figure(right, total), "copy_strict": rate_figure(copied, total)}
    return {"action_following": {"held-out": figures}}


def test_a_value_outside_the_published_interval_is_outside() -> None:
    run = published(320, 20, 400)  # 80 %, 75.8 to 83.6
    verdicts = {right: compare(run, results(right, 20, 400))[0].inside for right in (302, 304, 334, 336)}
    assert verdicts == {302: False, 304: True, 334: True, 336: False}
    assert [each.inside for each in compare(run, results(320, 200, 400))] == [True, False], "baselines, too"


def test_quick_runs_are_inside_if_the_intervals_overlap() -> None:
    run = published(320, 0, 400)
    assert compare(run, results(47, 0, 50), quick=True)[0].inside is False  # 83.8 to 97.9
    assert compare(run, results(45, 0, 50), quick=True)[0].inside is True  # 78.6 to 95.7
    assert compare(run, results(45, 0, 50))[0].inside is False
    (missing, _) = compare(run, {}, quick=True)
    assert missing.measured is None and missing.inside is None
    assert "not measured" in comparison_text([missing])


def test_quick_takes_an_eighth_of_the_samples() -> None:
    counts = {total: published(1, 0, total).quick().settings["num_samples"] for total in (8, 100, 200, 400)}
    assert counts == {8: 8, 100: 24, 200: 25, 400: 50}


def test_only_parts_with_published_rows_are_measured() -> None:
    run = published(8)
    assert run.needs("action_following/held-out")
    for part in ("action_following/val", "rollouts", "steps", "inverse_dynamics", "speed"):
        assert not run.needs(part)


def test_runs_survive_their_file(tmp_path: Path) -> None:
    run = published(7, 1)
    (tmp_path / "figures.json").write_text(runs_text([run, run]))
    first, second = read_runs(tmp_path)
    assert first == second == replace(run, conditions={})
    for text in ("{}", '{"format": 9, "runs": []}', "text", '{"format": 1, "runs": [{"rows": [{}]}]}'):
        (tmp_path / "figures.json").write_text(text)
        with pytest.raises(ModelError, match=r"figures\.json"):
            read_runs(tmp_path)


@pytest.mark.parametrize("name", [name for name in shipped_models() if name != "codec-games"])
def test_shipped_figures_can_be_measured_and_stand_in_the_card(name: str) -> None:
    folder = resolve(name)
    runs = read_runs(folder)
    assert all(
        row.figure["low"] - 1e-9 <= row.figure["value"] <= row.figure["high"] + 1e-9
        for run in runs
        for row in run.rows
    )
    goals = {goal.path: goal for goal in ShapesSuite.goals}
    for run in runs:
        if run.recording is None:
            EvalSettings(**{**run.settings, "metrics": ()})
            for row in run.rows:
                goal = goals[row.path]
                assert dict(row.baseline_paths).items() <= dict(goal.baselines).items(), row.title
    stored = with_figures((folder / "README.md").read_text(encoding="utf-8"), runs)
    assert published_table(runs).markdown() in stored
    data: Any = ModelCard(stored).data
    shown = published_table(runs).rows
    assert shown and all(row.goal for row in shown)
    expected = {row.title: pytest.approx(row.figure["value"]) for row in shown}
    assert {each.metric_name: each.metric_value for each in data.eval_results} == expected
    assert with_figures(stored, runs) == stored


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve("shapes-memory"), tmp_path / "mine"))


@pytest.mark.slow
def test_the_command_line_from_figures_to_exit_code(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The simulator's own truth for eight held-out samples: the shipped model is right in nearly all."""
    (copied / "figures.json").write_text(runs_text([published(8)]))
    assert main(["verify", str(copied)]) in (0, 1)
    measured = capsys.readouterr().out
    assert "the frame is right" in measured and "– copy" in measured
    (copied / "figures.json").write_text(runs_text([published(0, 8)]))
    assert main(["verify", str(copied)]) == 1
    said = capsys.readouterr().out
    assert "OUTSIDE" in said and "outside." in said
    assert main(["verify", str(copied), "--write"]) == 0
    capsys.readouterr()
    (row,) = read_runs(copied)[0].rows
    assert row.figure["n"] == 8 and row.figure["value"] > 0.5 and row.baselines["copy"]["value"] < 0.5
    assert "| the frame is right | ≥ 90 % |" in (copied / "README.md").read_text()
    assert main(["verify", str(copied)]) == 0
    assert "inside" in capsys.readouterr().out


def test_wrong_use_is_one_sentence(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads((copied / "figures.json").read_text())
    values["runs"][0]["settings"]["judge"] = "gone:Judge"
    for arguments, said in (
        (["verify", "no-such-model"], "no-such-model"),
        (["verify", str(copied), "--quick", "--write"], "--quick"),
        (["verify", str(copied)], "--trust"),
    ):
        if said == "--trust":
            (copied / "figures.json").write_text(json.dumps(values))
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and said in error and error.count("\n") == 1
    (copied / "figures.json").unlink()
    assert main(["verify", str(copied)]) == 2
    assert "figures.json" in capsys.readouterr().err
