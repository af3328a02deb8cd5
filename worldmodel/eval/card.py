"""The model card of an evaluated model, README.md of its folder: one table, and links for the rest."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from worldmodel.config import WorldModelConfig
from worldmodel.eval.published import Run, published_table
from worldmodel.eval.suite import CardText
from worldmodel.models.loading.model_card import action_section, card_text

_METRICS = {"%": "accuracy", "dB": "psnr", "fps": "fps", "s": "latency_s", "x": "ratio", "": "score"}
"""Types of metric on the Hub, by unit; shares are from 0 to 1 there."""
_TABLE = re.compile(r"^\| Figure \|.*\n(?:\|.*\n)*", re.MULTILINE)


def model_card(
    runs: Sequence[Run],
    name: str,
    text: CardText,
    training: Mapping[str, Any] | None = None,
    config: WorldModelConfig | None = None,
) -> str:
    """Return a model card in markdown, with the figures also as metadata for the Hub.

    Args:
        runs: Published figures.
        name: Shipped name or folder of the model, for the commands.
        text: Sections that depend on the world.
        training: Record of the training; its `command`, `commit`, `minutes`, `hardware` and `stages` (each
            with `objective`, `steps`, `minutes`) are included if present.
        config: Configuration of the model, for the tags of the metadata and the meaning of its actions.
    """
    parts = [
        text.about,
        f"## Use\n\n{text.usage.replace('{name}', name)}",
        *action_section(config.action.spec if config else ()),
        f"## Figures\n\n{published_table(runs).markdown()}\n\n{_conditions(runs)} {text.judging}\n",
        f"## Data\n\n{text.data}",
        _training(training or {}),
        _limits(runs, text),
        f"## Reproduce\n\n```sh\n{_commands(runs, name)}worldmodel verify {shlex.quote(name)}\n```\n",
    ]
    results = eval_results(runs, text.dataset)
    return card_text(name, "\n".join(parts), config, text.license_name, results)


def eval_results(runs: Sequence[Run], dataset: str) -> list[EvalResult]:
    """Return the published figures as entries of the metadata; shares are from 0 to 1."""
    shown = published_table(runs).rows
    results: list[EvalResult] = []
    for run in runs:
        settings = {key: run.settings[key] for key in ("seed", "num_inference_steps")}
        for row in run.rows:
            if row not in shown:
                continue
            results.append(
                EvalResult(
                    task_type="image-to-video",
                    dataset_type=dataset,
                    dataset_name=f"{dataset} world",
                    dataset_args=settings,
                    metric_type=_METRICS[row.unit],
                    metric_name=row.title,
                    metric_value=float(row.figure["value"]),
                )
            )
    return results


def with_figures(card: str, runs: Sequence[Run]) -> str:
    """Return a card whose table of figures and metadata are those of `runs`; other text stays as it is."""
    table = published_table(runs).markdown() + "\n"
    if _TABLE.search(card):
        text = _TABLE.sub(lambda _: table, card, count=1)
    else:
        text = f"{card.rstrip()}\n\n## Figures\n\n{table}"
    loaded: Any = ModelCard(text)
    known = loaded.data.eval_results
    dataset = known[0].dataset_type if known else "recorded episodes"
    loaded.data.model_name = loaded.data.model_name or loaded.data.get("name") or "model"
    loaded.data.eval_results = eval_results(runs, dataset)
    return str(loaded)


def _conditions(runs: Sequence[Run]) -> str:
    seeds = ", ".join(sorted({str(run.settings["seed"]) for run in runs}))
    steps = ", ".join(sorted({str(run.settings["num_inference_steps"]) for run in runs}))
    machine = next((run.conditions for run in runs if run.conditions), None)
    speed = ""
    if machine and any(row.path[:1] == ("speed",) for run in runs for row in run.rows):
        threads = f"{machine['threads']} thread{'s' if machine['threads'] != 1 else ''}"
        speed = f" Speed on {threads} of {machine['processor']}, PyTorch {machine['torch']}."
    return f"Measured with seed {seeds} and {steps} denoising steps.{speed}"


def _training(training: Mapping[str, Any]) -> str:
    lines = ["## Training", ""]
    for key, title in (("command", "Command"), ("commit", "Commit")):
        if training.get(key):
            lines.append(f"- {title}: `{training[key]}`")
    if training.get("hardware"):
        lines.append(f"- Hardware: {training['hardware']}")
    if training.get("minutes"):
        lines.append(f"- Time: {training['minutes']:.0f} minutes of wall clock")
    stages = []
    for name, stage in (training.get("stages") or {}).items():
        stages.append(f"{name} ({stage.get('steps', '–')} steps)")
    if stages:
        lines.append(f"- Stages: {', '.join(stages)}")
    return "\n".join(lines) + "\n" if len(lines) > 2 else "## Training\n\nNot recorded.\n"


def _limits(runs: Sequence[Run], text: CardText) -> str:
    lines = [f"- {limit}" for limit in text.limits]
    missed = sum(row.met is False for run in runs for row in run.rows)
    if missed:
        lines.append(f"- It misses {missed} of its goals, marked in the table.")
    lines.append("- Trained with one seed; differences smaller than the intervals above are not significant.")
    return "## Limits\n\n" + "\n".join(lines) + "\n"


def _commands(runs: Sequence[Run], name: str) -> str:
    lines: list[str] = []
    for run in runs:
        settings = run.settings
        options = [f"--split {settings['split']}"] if settings.get("split") else []
        for option in ("data", "train_data", "inverse", "judge", "perceptual", "features"):
            value = settings.get(option) or ()
            for each in (value,) if isinstance(value, str) else value:
                options.append(f"--{option.replace('_', '-')} {shlex.quote(each)}")
        for option in ("inverse_dynamics_steps", "num_samples", "rounds", "seed"):
            if option in settings:
                options.append(f"--{option.replace('_', '-')} {settings[option]}")
        lines.append(f"worldmodel eval {shlex.quote(name)} {' '.join(options)}\n")
    return "".join(lines)
