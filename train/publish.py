"""Publication of a finished run as a model folder with an evaluation report and a model card.

worldmodel publish runs/shapes-tiny runs/shapes-tiny/published
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from worldmodel.errors import ModelError
from worldmodel.eval.card import model_card
from worldmodel.eval.report import write_report
from worldmodel.eval.speed import machine
from worldmodel.eval.suite import EvalSettings, EvalSuite, evaluate, suite_of
from worldmodel.models.world_model import WorldModel
from worldmodel.train.run_log import read_metrics

LONGEST_STEP_S = 300.0
"""Longer gaps between two records without `step_s` are interruptions of the run."""


def publish(run: Path, folder: Path, settings: EvalSettings, suite: EvalSuite | None = None) -> None:
    """Evaluate `run/model`, write the report into the run and the model with its card to `folder`.

    Args:
        run: Folder of the run.
        folder: Model folder to write.
        settings: Settings of the evaluation.
        suite: The suite; by default that of the model's world.

    Raises:
        ModelError: the run is not finished.
    """
    if not (run / "model").is_dir():
        raise ModelError(f"{run} has no finished model; run `worldmodel train` again to resume it.")
    model = WorldModel.from_pretrained(run / "model")
    training = training_record(run)
    suite = suite or suite_of(model.config)
    results = evaluate(model, settings, suite, progress=True)
    name = folder.name if folder.parent.name == "pretrained" else str(folder)
    results["model"] = name
    write_report(results, run / "report", suite)
    model.save_pretrained(
        folder, training=training, card=model_card(results, name, suite, training, model.config)
    )


def training_record(run: Path) -> dict[str, Any]:
    """Return how a run was made: its stages with steps and wall time, the commit of the code, the command."""
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    seconds = {stage: stage_seconds(records) for stage, records in read_metrics(run).items()}
    stages = {
        name: {
            "objective": stage["objective"],
            "steps": stage["steps"],
            "minutes": round(seconds.get(name, 0) / 60, 1),
        }
        for name, stage in config["stages"].items()
    }
    origin = config.pop("origin")
    count = origin["num_processes"]
    return {
        "command": origin["command"],
        "commit": origin["commit"],
        "hardware": f"{count} {'process' if count == 1 else 'processes'}, {machine()['processor']}",
        "minutes": round(sum(seconds.values()) / 60, 1),
        "stages": stages,
        "config": config,
    }


def stage_seconds(records: Mapping[int, Mapping[str, Any]]) -> float:
    """Return the time of the steps of a stage: of each record, its steps times their mean time.

    Records of former versions have no `step_s`; long gaps between those are interruptions of the run.
    """
    timed = {step: record["step_s"] for step, record in records.items() if "step_s" in record}
    if timed:
        return sum((step - last) * timed[step] for last, step in pairwise((0, *timed)))
    times = [record["time"] for record in records.values()]
    return sum(gap for last, now in pairwise(times) if 0 < (gap := now - last) < LONGEST_STEP_S)
