"""Recorded episodes played on a model's own frames, measured round by round."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from worldmodel.eval.charts import Chart
from worldmodel.eval.codec import ceiling
from worldmodel.eval.data.episodes import EpisodeReader, Recorded
from worldmodel.eval.data.subjects import TITLES, play_all, subject_row
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.figures import Figure, bootstrap_figure, rate_figure
from worldmodel.eval.frechet import FrameFeatures, frechet_figure
from worldmodel.eval.judge import Judge
from worldmodel.eval.metrics import Metric, Played
from worldmodel.eval.runner import Clips, Subject
from worldmodel.eval.table import Table

TRENDS = ("psnr", "sharpness", "right")
"""Metrics whose change over the rounds is reported."""
CHARTS = ("psnr", "right", "action")
"""Metrics that the report draws."""
DETAILS_ROUND = 5
"""Round, or the last of shorter episodes, in whose last frame small things are looked for."""
MAX_ROWS = 8
"""Rounds in a table."""
MAX_SHOWN = 10
"""Rounds in the picture of an example."""

Values = dict[tuple[str, str], list[list[float | bool]]]
"""The values of every episode by round, by metric and row."""


def horizon(
    subject: Subject,
    reader: EpisodeReader,
    count: int,
    metrics: Sequence[Metric],
    forecasts: bool,
    album: Album,
    features: FrameFeatures | None = None,
    judge: Judge | None = None,
) -> dict[str, Any]:
    """Play episodes and measure every round.

    Args:
        subject: The model.
        reader: Reads the episodes.
        count: Number of episodes.
        metrics: What is measured.
        forecasts: Whether the model has a forecast that 0 denoising steps show.
        album: Where examples are kept.
        features: Features of frames; adds `frechet`, the Fréchet distance between the last frames of all
            predicted rounds and the recorded ones, by row.
        judge: Compares frames with recorded ones, for the metrics that need a judge.

    Returns:
        Figures by metric and row, one for each round; the first entry is round 1. `trend` has the change per
        round by metric and row, the mean slope of the episodes. Episodes that end early count in the rounds
        that they have. `details` has by row the share of small things that are as in the recorded frames
        after `DETAILS_ROUND` rounds (`worldmodel.eval.codec.ceiling`).
    """
    values: Values = {}
    seen: dict[str, list[np.ndarray]] = {}
    found: dict[str, list[np.ndarray]] = {}
    played = 0
    for batch in reader.batches(count):
        seeds = [reader.seed + played + row for row in range(len(batch))]
        rows = play_all(subject, batch, seeds, forecasts)
        for name, clips in rows.items():
            _measure(values, name, batch, clips, rows["truth"], metrics, judge)
            seen.setdefault(name, []).append(clips[min(DETAILS_ROUND, len(clips)) - 1][:, -1])
            if features is not None:
                found.setdefault(name, []).extend(np.stack([features(clip) for clip in clips], axis=1))
        for index, episode in enumerate(batch):
            rights = values.get(("right", "model"), [])[played:]
            made = [clip[index] for clip in rows["model"]]
            album.add(_example(episode, made, rights[index] if rights else None))
        played += len(batch)
    by_name = {metric.name: metric for metric in metrics}
    results: dict[str, Any] = {}
    for (measure, name), episodes in values.items():
        results.setdefault(measure, {})[name] = by_round(episodes, by_name[measure])
    for (measure, name), episodes in values.items():
        if measure in TRENDS and (slope := trend(episodes)):
            results.setdefault("trend", {}).setdefault(measure, {})[name] = slope
    shown = np.concatenate(seen.pop("truth"))
    for name, frames in seen.items():
        kept = ceiling(shown, np.concatenate(frames))
        if kept.num_details:
            results.setdefault("details", {})[name] = rate_figure(kept.num_kept, kept.num_details)
    if found:
        truth = found.pop("truth")
        distances = {name: frechet_figure(each, truth) for name, each in found.items()}
        results["frechet"] = {"frechet": distances}
    return results


def horizon_tables(results: Mapping[str, Any], metrics: Sequence[Metric]) -> list[Table]:
    """Return a table for every metric, round by round, and those of the trends and the Fréchet distance."""
    by_name = {metric.name: metric for metric in metrics}
    tables: list[Table] = []
    for name, rows in results.items():
        if name not in by_name:
            continue
        metric, length = by_name[name], max(map(len, rows.values()))
        numbers = sorted({round(1 + i * (length - 1) / (MAX_ROWS - 1)) for i in range(MAX_ROWS)})
        found = [
            subject_row(f"round {number}", {row: each[number - 1] for row, each in rows.items()}, metric.unit)
            for number in numbers
        ]
        title = f"{metric.title[:1].upper()}{metric.title[1:]}, by round"
        tables.append(Table(title, [row for row in found if row is not None]))
    trends = [
        subject_row(by_name[name].title, rows, by_name[name].unit)
        for name, rows in results.get("trend", {}).items()
    ]
    about = "Mean slope of the episodes over their rounds."
    tables.append(Table("Change per round", [row for row in trends if row is not None], about))
    if "frechet" in results:
        row = subject_row("Fréchet distance", results["frechet"]["frechet"], "")
        about = "Between the features of the last frames of all predicted and all recorded rounds."
        tables.append(Table("Fréchet distance over the given network", [row] if row else [], about))
    return [table for table in tables if table.rows]


def horizon_charts(results: Mapping[str, Any], metrics: Sequence[Metric]) -> list[Chart]:
    """Return the charts of the metrics in `CHARTS`, round by round."""
    charts: list[Chart] = []
    for metric in metrics:
        rows = results.get(metric.name)
        if metric.name not in CHARTS or rows is None:
            continue
        length = max(map(len, rows.values()))
        labels = [str(number + 1) for number in range(length)]
        series = {title: rows[name] for name, title in TITLES.items() if name in rows}
        title = f"{metric.title[:1].upper()}{metric.title[1:]}, round by round"
        about = "Each round starts from the model's own frames, so errors accumulate. Shaded: 95 % intervals."
        charts.append(Chart(f"horizon-{metric.name}", title, labels, series, about=about, unit=metric.unit))
    return charts


def _measure(
    values: Values,
    name: str,
    batch: Sequence[Recorded],
    clips: Sequence[Clips],
    truth: Sequence[Clips],
    metrics: Iterable[Metric],
    judge: Judge | None,
) -> None:
    """Add the values of every metric on a batch that one row has played."""
    starts = [np.stack([each.start for each in batch]), *(clip[:, -1] for clip in clips)]
    rounds = [
        Played(before, clip, true, [each.actions[number] for each in batch], judge=judge)
        for number, (before, clip, true) in enumerate(zip(starts, clips, truth, strict=False))
    ]
    for metric in metrics:
        if name == "truth" and not metric.of_truth:
            continue
        columns = [metric(played) for played in rounds]
        values.setdefault((metric.name, name), []).extend(list(row) for row in zip(*columns, strict=True))


def by_round(episodes: Sequence[Sequence[float | bool]], metric: Metric) -> list[Figure]:
    """Return the figure of every round, over the episodes that have it."""
    figures: list[Figure] = []
    for number in range(max(map(len, episodes))):
        figures.append(metric.figure([values[number] for values in episodes if len(values) > number]))
    return figures


def trend(episodes: Sequence[Sequence[float | bool]]) -> Figure | None:
    """Return the mean slope over the rounds of the episodes that have three or more; None without any."""
    slopes = [
        float(np.polyfit(range(len(values)), np.asarray(values, np.float64), 1)[0])
        for values in episodes
        if len(values) > 2
    ]
    return bootstrap_figure(slopes) if slopes else None


def _example(episode: Recorded, made: Sequence[np.ndarray], rights: Sequence[Any] | None) -> Example:
    """Show the last frame of every round, or of some rounds of a long episode."""
    rounds = len(made)
    shown = np.unique(np.linspace(0, rounds - 1, min(rounds, MAX_SHOWN)).astype(int)).tolist()
    truth = np.stack([episode.start, *(episode.clips[number][-1] for number in shown)])
    frames = np.stack([episode.start, *(made[number][-1] for number in shown)])
    note = "" if len(shown) == rounds else f"rounds {', '.join(str(number + 1) for number in shown)}"
    right = None if rights is None else all(rights)
    if right is False and rights is not None:
        note = f"first wrong in round {list(rights).index(False) + 1}"
    caption = " / ".join(str(episode.actions[number]) for number in shown)
    return Example("held-out episodes", caption, right, truth, frames, note)
