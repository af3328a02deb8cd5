"""Publication of a finished run as a model folder with an evaluation report and a model card.

worldmodel publish runs/shapes-tiny runs/shapes-tiny/published
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from worldmodel.eval.card import model_card
from worldmodel.eval.published import FILE, run_of, runs_text
from worldmodel.eval.report import write_report
from worldmodel.eval.speed import machine
from worldmodel.eval.suite import EvalSettings, EvalSuite, evaluate
from worldmodel.models.world_model import WorldModel
from worldmodel.train.run.log import finished_model, read_metrics


def publish(run: Path, folder: Path, suite: EvalSuite, settings: EvalSettings) -> None:
    """Evaluate `run/model`, write the report into the run and the model with its card to `folder`.

    Args:
        run: Folder of the run.
        folder: Model folder to write; figures.json in it has what `worldmodel verify` repeats.
        suite: The suite.
        settings: Settings of the evaluation.

    Raises:
        ModelError: the run is not finished.
    """
    model = WorldModel.from_pretrained(finished_model(run))
    training = training_record(run)
    results = evaluate(model, settings, suite, progress=True)
    name = folder.name if folder.parent.name == "pretrained" else str(folder)
    results["model"] = name
    write_report(results, run / "report")
    runs = [run_of(results)]
    card = model_card(runs, name, suite.card, training, model.config)
    saved = model.save_pretrained(folder, training=training, card=card)
    (saved / FILE).write_text(runs_text(runs), encoding="utf-8")


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
    """Return the time of the steps of a stage: of each record, its steps times their mean time."""
    timed = {step: record["step_s"] for step, record in records.items() if "step_s" in record}
    return sum((step - last) * timed[step] for last, step in pairwise((0, *timed)))
