"""Metrics of a run reach the tracker that the config names."""

import json
import sys
from pathlib import Path

import pytest

from worldmodel.errors import ConfigError
from worldmodel.train.run_log import RunLog


def log_steps(run: Path, tracker: str) -> None:
    log = RunLog(run, "state", 4, 0, True, 2, tracker)
    for step in range(4):
        log.step(step, "rounds", {"loss": 1.0 / (step + 1)}, {"samples": 3.0}, 0.0, {"mfu": 0.5})
    log.scalars(4, {"validation/loss": 0.25})
    log.close()


def test_metrics_reach_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: worldmodel[wandb]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_steps(tmp_path / "run", "wandb")
    wandb.teardown()
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*-run-state/*.wandb")
    content = file.read_bytes()
    for name in (b"state/rounds/loss", b"state/mfu", b"state/validation/loss"):
        assert name in content


def test_metrics_reach_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="trackio is not installed: worldmodel[trackio]")
    log_steps(tmp_path / "run", "trackio")
    assert list((tmp_path / "trackio").iterdir())


def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"tracker is 'wandb'.*worldmodel\[wandb\]"):
        log_steps(tmp_path / "run", "wandb")


def test_records_of_one_step_are_one(tmp_path: Path) -> None:
    from worldmodel.train.run_log import read_metrics

    log_steps(tmp_path / "run", "none")
    records = read_metrics(tmp_path / "run")["state"]
    assert list(records) == [2, 4]
    assert records[4]["validation/loss"] == 0.25
    assert records[4]["rounds/loss"] == (1 / 3 + 1 / 4) / 2
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert all(json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
