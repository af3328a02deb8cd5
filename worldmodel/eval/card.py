"""The model card of an evaluated model, README.md of its folder."""

import shlex
from collections.abc import Mapping
from typing import Any

from huggingface_hub import EvalResult

from worldmodel.config import WorldModelConfig
from worldmodel.eval.goals import Goal, interval, measured, show
from worldmodel.eval.suite import EvalSuite
from worldmodel.eval.tables import data_tables, markdown, split_tables
from worldmodel.models.loading.model_card import action_section, card_text

_METRICS = {"%": "accuracy", "dB": "psnr", "fps": "fps", "s": "latency_s", "x": "ratio", "": "score"}
"""Types of metric on the Hub, by unit; shares are from 0 to 1 there."""


def model_card(
    results: Mapping[str, Any],
    name: str,
    suite: EvalSuite,
    training: Mapping[str, Any] | None = None,
    config: WorldModelConfig | None = None,
) -> str:
    """Return a model card in markdown, with the figures also as metadata for the Hub.

    Args:
        results: Results of `evaluate`.
        name: Shipped name or folder of the model, for the commands.
        suite: The suite that measured the results.
        training: Record of the training; its `command`, `commit`, `minutes`, `hardware` and `stages` (each
            with `objective`, `steps`, `minutes`) are included if present.
        config: Configuration of the model, for the tags of the metadata and the meaning of its actions.
    """
    text = suite.card
    parts = [
        text.about,
        f"## Use\n\n{text.usage.replace('{name}', name)}",
        *action_section(config.action.spec if config else ()),
        _figures(results, suite),
        f"## Data\n\n{text.data}",
        _training(training or {}),
        _limits(results, suite),
        _reproduce(results, name),
    ]
    return card_text(name, "\n".join(parts), config, text.license_name, eval_results(results, suite))


def eval_results(results: Mapping[str, Any], suite: EvalSuite) -> list[EvalResult]:
    """Return the published figures as entries of the metadata; shares are from 0 to 1."""
    settings = {key: results["settings"][key] for key in ("seed", "num_inference_steps")}
    return [
        EvalResult(
            task_type="image-to-video",
            dataset_type=suite.card.dataset,
            dataset_name=f"{suite.card.dataset} world",
            dataset_args=settings,
            metric_type=_METRICS[goal.unit],
            metric_name=goal.title,
            metric_value=float(figure["value"]),
        )
        for goal, figure in measured(suite.goals, results)
    ]


def _figures(results: Mapping[str, Any], suite: EvalSuite) -> str:
    lines = ["| Figure | Goal | Measured | 95 % interval | n |", "|---|---:|---:|---:|---:|"]
    for goal, figure in measured(suite.goals, results):
        missed = " (missed)" if goal.met(figure) is False else ""
        lines.append(
            f"| {goal.title} | {goal.text or '–'} | {show(figure['value'], goal.unit)}{missed} "
            f"| {interval(figure, goal.unit)} | {figure['n']} |"
        )
    settings, machine = results["settings"], results["machine"]
    threads = f"{machine['threads']} thread{'s' if machine['threads'] != 1 else ''}"
    steps = settings["num_inference_steps"]
    conditions = (
        f"Measured with seed {settings['seed']} and {steps} denoising step{'s' if steps != 1 else ''}; "
        f"speed on {threads} of {machine['processor']}, PyTorch {machine['torch']}. "
        f"{suite.card.judging}"
    )
    tables = [
        f"### {suite.splits[split]}, {table.title}\n\n{table.about}\n\n{markdown(table.rows)}\n"
        for split, figures in results["figures"].get("action_following", {}).items()
        for table in split_tables(figures)
    ]
    tables += [
        f"### {table.title}\n\n{table.about}\n\n{markdown(table.rows)}\n"
        for table in data_tables(results["figures"])
    ]
    return "\n".join(["## Figures\n", *lines, f"\n{conditions}\n", *tables])


def _training(training: Mapping[str, Any]) -> str:
    lines = ["## Training", ""]
    for key, title in (("command", "Command"), ("commit", "Commit")):
        if training.get(key):
            lines.append(f"- {title}: `{training[key]}`")
    if training.get("hardware"):
        lines.append(f"- Hardware: {training['hardware']}")
    if training.get("minutes"):
        lines.append(f"- Time: {training['minutes']:.0f} minutes of wall clock")
    stages = training.get("stages") or {}
    if stages:
        lines += ["", "| Stage | Objective | Steps | Minutes |", "|---|---|---:|---:|"]
        for name, stage in stages.items():
            cells = [str(stage.get(key, "–")) for key in ("objective", "steps", "minutes")]
            lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else "## Training\n\nNot recorded.\n"


def _limits(results: Mapping[str, Any], suite: EvalSuite) -> str:
    lines = [f"- {limit}" for limit in suite.card.limits]
    rows = measured(suite.goals, results)
    lines += [_missed(goal, figure) for goal, figure in rows if goal.met(figure) is False]
    lines += [*_weak_verbs(results["figures"]), *_drift(results["figures"])]
    lines.append("- Trained with one seed; differences smaller than the intervals above are not significant.")
    return "## Limits\n\n" + "\n".join(lines) + "\n"


def _missed(goal: Goal, figure: Mapping[str, Any]) -> str:
    return f"- Goal missed. {goal.title} ({show(figure['value'], goal.unit)}, goal {goal.text})."


def _weak_verbs(figures: Mapping[str, Any]) -> list[str]:
    by_verb = figures.get("action_following", {}).get("held-out", {}).get("by_verb", {})
    ranked = sorted(by_verb, key=lambda verb: by_verb[verb]["strict"]["value"])[:3]
    weak = [verb for verb in ranked if by_verb[verb]["strict"]["value"] < 1]
    listed = [f"{verb} ({show(by_verb[verb]['strict']['value'], '%')})" for verb in weak]
    return (
        [f"- Weakest verbs on held-out combinations, whole frame right: {', '.join(listed)}."]
        if listed
        else []
    )


def _drift(figures: Mapping[str, Any]) -> list[str]:
    strict = figures.get("rollouts", {}).get("strict", [])
    if len(strict) < 2:
        return []
    first, last = (show(figure["value"], "%") for figure in (strict[0], strict[-1]))
    return [
        f"- Errors add up: the whole frame is right in {first} of rollouts in round 1, "
        f"in {last} in round {len(strict)}."
    ]


def _reproduce(results: Mapping[str, Any], name: str) -> str:
    settings = results["settings"]
    return (
        "## Reproduce\n\n```sh\n"
        f"worldmodel eval {shlex.quote(name)} {_data_options(settings)}"
        f"--num-samples {settings['num_samples']} --rounds {settings['rounds']} --seed {settings['seed']}\n"
        "```\n"
    )


def _data_options(settings: Mapping[str, Any]) -> str:
    """Return the options of an evaluation on recorded episodes; none for a world's own suite."""
    options: list[str] = []
    for name in ("data", "train_data", "inverse", "judge", "perceptual", "features"):
        value = settings.get(name) or ()
        for each in (value,) if isinstance(value, str) else value:
            options.append(f"--{name.replace('_', '-')} {shlex.quote(each)} ")
    if "inverse_dynamics_steps" in settings:
        options.append(f"--inverse-dynamics-steps {settings['inverse_dynamics_steps']} ")
    return "".join(options)
