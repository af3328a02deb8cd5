"""Recorded episodes played on a model's own frames, measured round by round."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from worldmodel.eval.data.episodes import EpisodeReader, Recorded
from worldmodel.eval.data.measures import Measure, Played
from worldmodel.eval.data.subjects import play_all
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.frechet import FrameFeatures, frechet_figure
from worldmodel.eval.metrics import Figure, bootstrap_figure, rate_figure
from worldmodel.eval.runner import Clips, Subject

TRENDS = ("psnr", "sharpness", "right")
"""Measures whose change over the rounds is reported."""
MAX_SHOWN = 10
"""Rounds in the picture of an example."""

Values = dict[tuple[str, str], list[list[float | bool]]]
"""Of every measure and row, the values of every episode by round."""


def horizon(
    subject: Subject,
    reader: EpisodeReader,
    count: int,
    measures: Sequence[Measure],
    forecasts: bool,
    album: Album,
    features: FrameFeatures | None = None,
) -> dict[str, Any]:
    """Play episodes and measure every round.

    Args:
        subject: The model.
        reader: Reads the episodes.
        count: Number of episodes.
        measures: What is measured.
        forecasts: Whether the model makes a forecast that 0 denoising steps show.
        album: Where examples are kept.
        features: Features of frames; adds `frechet`, the Fréchet distance between the last frames of all
            predicted rounds and the recorded ones, by row.

    Returns:
        Figures by measure and row, one a round; the first is that of round 1. `trend` has the change per
        round by measure and row, the mean of the slopes of the episodes. Episodes that end early count in
        the rounds that they have.
    """
    values: Values = {}
    found: dict[str, list[np.ndarray]] = {}
    played = 0
    for batch in reader.batches(count):
        seeds = [reader.seed + played + row for row in range(len(batch))]
        rows = play_all(subject, batch, seeds, forecasts)
        for name, clips in rows.items():
            _measure(values, name, batch, clips, rows["truth"], measures)
            if features is not None:
                found.setdefault(name, []).extend(np.stack([features(clip) for clip in clips], axis=1))
        for index, episode in enumerate(batch):
            rights = values.get(("right", "model"), [])[played:]
            made = [clip[index] for clip in rows["model"]]
            album.add(_example(episode, made, rights[index] if rights else None))
        played += len(batch)
    results: dict[str, Any] = {}
    for (measure, name), episodes in values.items():
        results.setdefault(measure, {})[name] = by_round(episodes)
    for (measure, name), episodes in values.items():
        if measure in TRENDS and (slope := trend(episodes)):
            results.setdefault("trend", {}).setdefault(measure, {})[name] = slope
    if found:
        truth = found.pop("truth")
        distances = {name: frechet_figure(each, truth) for name, each in found.items()}
        results["frechet"] = {"frechet": distances}
    return results


def _measure(
    values: Values,
    name: str,
    batch: Sequence[Recorded],
    clips: Sequence[Clips],
    truth: Sequence[Clips],
    measures: Iterable[Measure],
) -> None:
    """Add the values of every measure on a batch that one row has played."""
    chosen = [each for each in measures if name != "truth" or each.of_truth]
    starts = [np.stack([each.start for each in batch]), *(clip[:, -1] for clip in clips)]
    for measure in chosen:
        columns = [
            measure(Played(before, clip, true, [each.actions[number] for each in batch]))
            for number, (before, clip, true) in enumerate(zip(starts, clips, truth, strict=False))
        ]
        values.setdefault((measure.name, name), []).extend(list(row) for row in zip(*columns, strict=True))


def by_round(episodes: Sequence[Sequence[float | bool]]) -> list[Figure]:
    """Return the figure of every round: a rate of verdicts, or a mean of numbers."""
    figures: list[Figure] = []
    for number in range(max(map(len, episodes))):
        found = [values[number] for values in episodes if len(values) > number]
        verdicts = isinstance(found[0], bool)
        figures.append(rate_figure(int(sum(found)), len(found)) if verdicts else bootstrap_figure(found))
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
