"""Drift: rollouts on the model's own frames, judged against the true continuation round by round."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from worldmodel.eval.action_following import BATCH, Values, measure, played_cases
from worldmodel.eval.charts import Chart
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.figures import Figure
from worldmodel.eval.goals import Goal
from worldmodel.eval.judge import Case, Judge
from worldmodel.eval.metrics import Metrics, get_metrics
from worldmodel.eval.runner import Subject
from worldmodel.eval.table import Row, Table

METRICS = ("strict", "named", "others", "psnr")
_ABOUT = "Each round starts from the model's own frames, so errors accumulate."


def rollouts(
    subject: Subject,
    sample: Callable[[int], Sequence[Case]],
    judge: Judge,
    num_rollouts: int,
    rounds: int,
    seed: int = 1234,
    album: Album | None = None,
    metrics: Metrics | None = None,
    forecast: Subject | None = None,
) -> dict[str, list[Figure]]:
    """Play rollouts and measure every round; errors accumulate over the rounds.

    Args:
        subject: The model.
        sample: Returns the cases of a rollout, one a round, by its index.
        judge: Judge of the world.
        num_rollouts: Number of rollouts.
        rounds: Rounds of each.
        seed: Seed of the noise.
        album: Where examples are kept.
        metrics: What is measured; by default `METRICS`.
        forecast: The same model without its generator, for `forecast_NAME` of metrics with a baseline.

    Returns:
        Figures of every metric by round; the first entry is round 1.
    """
    chosen = get_metrics(METRICS) if metrics is None else metrics
    values = [Values(chosen) for _ in range(rounds)]
    for start in range(0, num_rollouts, BATCH):
        indices = range(start, min(start + BATCH, num_rollouts))
        truths = [sample(index) for index in indices]
        worlds = subject.open(np.stack([truth[0].start for truth in truths]), [seed + i for i in indices])
        rights: list[list[bool]] = [[] for _ in indices]
        lasts: list[list[np.ndarray]] = [[] for _ in indices]
        for number in range(rounds):
            cases = [truth[number] for truth in truths]
            played = played_cases(cases, worlds.step([case.action for case in cases]), judge)
            values[number].add(measure(chosen, played))
            for row, (frames, verdict) in enumerate(zip(played.clips, played.verdicts, strict=True)):
                lasts[row].append(frames[-1])
                rights[row].append(verdict.strict)
        if album is not None:
            for truth, made, right in zip(truths, lasts, rights, strict=True):
                album.add(_example(truth, made, right))
    by_round = [each.figures() for each in values]
    figures = {name: [each[name] for each in by_round] for name in by_round[0]}
    if forecast is not None:
        compared = [metric for metric in chosen if metric.baseline]
        without = rollouts(forecast, sample, judge, num_rollouts, rounds, seed, metrics=compared)
        figures |= {f"forecast_{name}": each for name, each in without.items()}
    return figures


def rollout_tables(figures: Mapping[str, Sequence[Figure]], metrics: Metrics | None = None) -> list[Table]:
    """Return the table of rollouts, round by round."""
    rows: list[Row] = []
    for metric in get_metrics(METRICS) if metrics is None else metrics:
        without = figures.get(f"forecast_{metric.name}")
        for number, figure in enumerate(figures[metric.name]):
            beside = {} if without is None else {"0 steps": without[number]}
            rows.append(Row(f"round {number + 1}: {metric.title}", figure, metric.unit, baselines=beside))
    return [Table("Rollouts, round by round", rows, _ABOUT, details=True)]


def rollout_charts(figures: Mapping[str, Sequence[Figure]], goals: Sequence[Goal]) -> list[Chart]:
    """Return the chart of rollouts, round by round."""
    names = {"named": "named object", "others": "other objects", "strict": "whole frame"}
    rounds = len(figures["strict"])
    targets: dict[int, float] = {}
    for goal in goals:
        if goal.path[:2] == ("rollouts", "strict") and goal.at_least is not None:
            position = int(goal.path[2])
            if position < rounds:
                targets[position] = goal.at_least
    labels = [str(number + 1) for number in range(rounds)]
    series = {title: figures[name] for name, title in names.items() if name in figures}
    about = f"{_ABOUT} Shaded: 95 % intervals."
    return [Chart("rounds", "Rollouts, round by round", labels, series, about=about, targets=targets)]


def _example(truth: Sequence[Case], made: Sequence[np.ndarray], right: Sequence[bool]) -> Example:
    """Show the last frame of every round."""
    note = "" if all(right) else f"first wrong in round {list(right).index(False) + 1}"
    ends = np.stack([case.frames[-1] for case in truth])
    return Example(
        "rollouts", " / ".join(case.caption for case in truth), all(right), ends, np.stack(made), note
    )
