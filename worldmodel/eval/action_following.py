"""Action following: rounds played from true frames and judged against the true outcome."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from worldmodel.actions import Action
from worldmodel.eval.charts import Chart
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.figures import Figure, Tally, rate_figure
from worldmodel.eval.judge import Case, Judge, Recogniser
from worldmodel.eval.metrics import Metric, Metrics, Played, get_metrics
from worldmodel.eval.runner import Subject
from worldmodel.eval.table import Row, Table

BATCH = 32
STEPS = (0, 1, 2, 4, 8)
"""Numbers of denoising steps to compare; 0 decodes the forecast."""
METRICS = ("named", "others", "strict", "every_frame", "psnr", "ssim")

Figures = dict[str, Figure]


def play_cases(
    subject: Subject, cases: Sequence[Case], judge: Judge, seed: int
) -> Iterator[tuple[list[Case], Played]]:
    """Play all cases in batches; texts of similar length share a batch.

    Case `i` uses the noise of seed `seed + i`.
    """
    order = sorted(range(len(cases)), key=lambda index: len(cases[index].action.text or ""))
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        batch = [cases[row] for row in rows]
        worlds = subject.open(np.stack([case.start for case in batch]), [seed + row for row in rows])
        yield batch, played_cases(batch, worlds.step([case.action for case in batch]), judge)


def played_cases(cases: Sequence[Case], clips: np.ndarray, judge: Judge) -> Played:
    """Return the frames of cases beside their truth."""
    return Played(
        np.stack([case.start for case in cases]),
        clips,
        np.stack([case.frames for case in cases]),
        [case.action for case in cases],
        [case.truths for case in cases],
        judge,
    )


@dataclass(slots=True)
class Values:
    """Values of metrics, kept until their figures are computed."""

    metrics: Metrics
    prefix: str = ""
    values: dict[str, list[float | bool]] = field(default_factory=dict)

    def add(self, found: Mapping[str, Sequence[float | bool]], row: int | None = None) -> None:
        """Add the values of a batch, or of one of its rows."""
        for name, values in found.items():
            self.values.setdefault(name, []).extend(values if row is None else [values[row]])

    def figures(self) -> Figures:
        """Return a figure for every metric."""
        by_name = {metric.name: metric for metric in self.metrics}
        return {self.prefix + name: by_name[name].figure(values) for name, values in self.values.items()}


def measure(metrics: Iterable[Metric], played: Played) -> dict[str, Sequence[float | bool]]:
    """Return the values of metrics on a batch."""
    return {metric.name: metric(played) for metric in metrics}


def action_following(
    subject: Subject,
    cases: Sequence[Case],
    judge: Judge,
    seed: int = 1234,
    title: str = "",
    album: Album | None = None,
    recognise: Recogniser | None = None,
    metrics: Metrics | None = None,
    forecast: Subject | None = None,
) -> dict[str, Any]:
    """Judge the outcome of actions.

    Every metric has a figure of its name. Metrics with a baseline also have `copy_NAME`, for a model that
    repeats the first frame, and `forecast_NAME`, for `forecast`; `by_verb` and `by_kind` repeat them for the
    cases of each verb and kind. `by_kind` is left out where no case has a kind. `confusion` holds numbers of
    cases by what was asked for and then by what the frames show.

    Args:
        subject: The model.
        cases: Rounds to play.
        judge: Judge of the world.
        seed: Seed of the noise.
        title: Title of the examples that are kept.
        album: Where examples are kept.
        recognise: Names what frames show, for `confusion`.
        metrics: What is measured; by default `METRICS`.
        forecast: The same model without its generator; None if it has no forecast of its own.
    """
    chosen = get_metrics(METRICS) if metrics is None else metrics
    compared = [metric for metric in chosen if metric.baseline]
    total, copies = Values(chosen), Values(compared, "copy_")
    by_verb: dict[str, Values] = {}
    by_kind: dict[str, tuple[Values, Values]] = {}
    confusion: dict[str, Counter[str]] = {}
    for batch, played in play_cases(subject, cases, judge, seed):
        found, copied = measure(chosen, played), measure(compared, played.copied())
        rates = {metric.name: found[metric.name] for metric in compared}
        total.add(found)
        copies.add(copied)
        for row, case in enumerate(batch):
            for verb in case.verbs:
                by_verb.setdefault(verb, Values(compared)).add(rates, row)
            for kind in case.kinds:
                own, still = by_kind.setdefault(kind, (Values(compared), Values(compared, "copy_")))
                own.add(rates, row)
                still.add(copied, row)
            if recognise is not None:
                asked, shown = recognise(case, played.clips[row])
                confusion.setdefault(asked, Counter())[shown] += 1
            if album is not None:
                verdict = played.verdicts[row]
                frames = played.clips[row]
                album.add(Example(title, case.caption, verdict.strict, case.frames, frames, verdict.note))
    results: dict[str, Any] = {**total.figures(), **copies.figures()}
    results["by_verb"] = {verb: by_verb[verb].figures() for verb in sorted(by_verb)}
    if by_kind:
        results["by_kind"] = {
            kind: by_kind[kind][0].figures() | by_kind[kind][1].figures() for kind in sorted(by_kind)
        }
    if recognise is not None:
        results["confusion"] = {asked: dict(sorted(confusion[asked].items())) for asked in sorted(confusion)}
    if forecast is not None:
        without = action_following(forecast, cases, judge, seed, metrics=compared)
        names = [metric.name for metric in compared]
        results |= {f"forecast_{name}": without[name] for name in names}
        for kind, rates in results.get("by_kind", {}).items():
            rates |= {f"forecast_{name}": without["by_kind"][kind][name] for name in names}
    return results


def following_tables(results: Mapping[str, Any], title: str, metrics: Metrics | None = None) -> list[Table]:
    """Return the tables of action following: all figures, its kinds of sentence and its confusions."""
    chosen = get_metrics(METRICS) if metrics is None else metrics
    rows = [_row(metric.title, metric, results) for metric in chosen]
    tables = [Table(title, rows, "Copy repeats the first frame; 0 steps decodes the forecast.", details=True)]
    compared = [metric for metric in chosen if metric.baseline]
    if "by_kind" in results:
        kinds = [
            _row(f"{kind}: {metric.title}", metric, rates)
            for kind, rates in results["by_kind"].items()
            for metric in compared
        ]
        about = "Copy repeats the first frame; 0 steps decodes the forecast."
        tables.append(Table(f"{title}, by kind", kinds, about))
    if "confusion" in results:
        confused = [_confusion_row(asked, shown) for asked, shown in results["confusion"].items()]
        about = (
            "Cases by what was asked for: the share in which the frames show it, and what they show instead."
        )
        tables.append(Table(f"{title}, confusions", confused, about))
    return tables


def following_charts(results: Mapping[str, Any], name: str, title: str) -> list[Chart]:
    """Return the chart of the rates by verb."""
    by_verb = results["by_verb"]
    if not by_verb:
        return []
    first = next(iter(by_verb.values()))
    labels = [f"{verb} ({next(iter(rates.values()))['n']})" for verb, rates in by_verb.items()]
    series = {key: [rates[key] for rates in by_verb.values()] for key in first}
    about = "A clip counts under each verb of its action; the number of clips is in brackets."
    return [Chart(f"verbs-{name}", f"{title}, by verb", labels, series, "bars", about)]


def _row(title: str, metric: Metric, figures: Mapping[str, Figure]) -> Row:
    beside = {"0 steps": f"forecast_{metric.name}", "copy": f"copy_{metric.name}"}
    baselines = {name: figures[key] for name, key in beside.items() if key in figures}
    return Row(title, figures[metric.name], metric.unit, baselines=baselines)


def _confusion_row(asked: str, shown: Mapping[str, int]) -> Row:
    others = sorted((name for name in shown if name != asked), key=lambda name: -shown[name])
    note = ", ".join(f"{name} {shown[name]}" for name in others)
    return Row(asked, rate_figure(shown.get(asked, 0), sum(shown.values())), note=note)


def control(
    subject: Subject, cases: Sequence[Case], others: Sequence[Action], judge: Judge, seed: int = 1234
) -> Figures:
    """Play each case with its own action and with another one; a model that ignores actions scores the same.

    Choose cases that are not right in their first frame, so that a model that does nothing scores 0.
    """
    swapped = [replace(case, action=action) for case, action in zip(cases, others, strict=True)]
    own = verdict_rates(subject, cases, judge, seed)
    return {f"own_{name}": rate for name, rate in own.items()} | verdict_rates(subject, swapped, judge, seed)


def null_action(
    subject: Subject,
    cases: Mapping[str, Sequence[Case]],
    judge: Judge,
    seed: int = 1234,
    album: Album | None = None,
) -> Figures:
    """Play rounds in which nothing may change, for each way of doing nothing; the rates are `strict`."""
    tally = Tally()
    for name, group in cases.items():
        for batch, played in play_cases(subject, group, judge, seed):
            for case, frames, verdict in zip(batch, played.clips, played.verdicts, strict=True):
                tally.count(**{name: verdict.strict})
                if album is not None:
                    note = verdict.note
                    album.add(Example("null action", case.caption, verdict.strict, case.frames, frames, note))
    return tally.figures()


def verdict_rates(
    subject: Subject,
    cases: Sequence[Case],
    judge: Judge,
    seed: int = 1234,
    title: str = "",
    album: Album | None = None,
) -> Figures:
    """Return the rates `named` and `strict` of last frames; an example is right where `named` is."""
    tally = Tally()
    for batch, played in play_cases(subject, cases, judge, seed):
        for case, frames, verdict in zip(batch, played.clips, played.verdicts, strict=True):
            tally.count(named=verdict.named, strict=verdict.strict)
            if album is not None:
                album.add(Example(title, case.caption, verdict.named, case.frames, frames, verdict.note))
    return tally.figures()


def steps_vs_quality(
    subject: Subject, cases: Sequence[Case], judge: Judge, seed: int = 1234, steps: Sequence[int] = STEPS
) -> list[dict[str, int | Figure]]:
    """Follow the same actions with different numbers of denoising steps."""
    metrics = get_metrics(("named", "strict", "psnr"))
    rows: list[dict[str, int | Figure]] = []
    for count in steps:
        values = Values(metrics)
        for _, played in play_cases(subject.with_steps(count), cases, judge, seed):
            values.add(measure(metrics, played))
        rows.append({"steps": count, **values.figures()})
    return rows


def steps_tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return the table of quality by number of denoising steps."""
    found = [
        Row(f"{row['steps']} steps: {metric.title}", row[metric.name], metric.unit)
        for row in rows
        for metric in get_metrics(("named", "strict", "psnr"))
    ]
    about = "With 0 steps the forecast from the states is decoded."
    return [Table("Denoising steps against quality", found, about, details=True)]


def steps_charts(rows: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Return the chart of quality by number of denoising steps."""
    labels = [str(row["steps"]) if row["steps"] else "forecast\nalone" for row in rows]
    series = {"named object": [row["named"] for row in rows], "whole frame": [row["strict"] for row in rows]}
    about = "With 0 steps the forecast from the states is decoded."
    return [
        Chart("steps", "Denoising steps against quality", labels, series, about=about, axis="denoising steps")
    ]
