"""Predicted rewards and ends of episodes against the recorded ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from worldmodel.episodes import Outcome
from worldmodel.eval.data.episodes import EpisodeReader
from worldmodel.eval.data.subjects import subject_tables
from worldmodel.eval.figures import BOOTSTRAPS, Figure, mean_figure, rate_figure
from worldmodel.eval.runner import Subject
from worldmodel.eval.table import Table, Unit

TITLES: dict[str, tuple[str, Unit]] = {
    "reward_f1": ("rewards, F1", ""),
    "reward_recall": ("rewards found", "%"),
    "reward_precision": ("rewards right", "%"),
    "end_f1": ("ends, F1", ""),
    "end_recall": ("ends found", "%"),
    "end_precision": ("ends right", "%"),
    "reward_error": ("error of the reward", ""),
}
"""Titles and units of the figures."""


def outcome_tables(results: Mapping[str, Any]) -> list[Table]:
    """Return the table of the figures."""
    about = (
        "Predicted on the model's own frames. A reward counts from half the mean size of the recorded "
        "rewards other than 0. Copy: nothing happens, no reward and no end."
    )
    return subject_tables(results, "Rewards and ends", TITLES, about)


def outcomes(subject: Subject, reader: EpisodeReader, count: int) -> dict[str, Any]:
    """Play recorded episodes on the model's own frames, and compare what it predicts for every round.

    A reward counts as an event if its magnitude is at least half the mean magnitude of the recorded rewards
    that are not 0. Ends and events are few, so their precision, recall and F1 are given, not their accuracy.

    Args:
        subject: The model; nothing is measured if it predicts no outcomes.
        reader: Reads the episodes; those without outcomes are left out.
        count: Number of episodes.

    Returns:
        Figures by name and row. The row `copy` is of a world in which nothing happens: no reward and no end.
    """
    true: list[Sequence[Outcome]] = []
    made: list[Sequence[Outcome]] = []
    played = 0
    for batch in reader.batches(count):
        worlds = subject.open(
            np.stack([each.start for each in batch]),
            range(reader.seed + played, reader.seed + played + len(batch)),
        )
        rounds = []
        for actions in zip(*(each.actions for each in batch), strict=True):
            worlds.step(actions)
            rounds.append(getattr(worlds, "outcomes", ()))
        played += len(batch)
        if rounds and all(rounds):
            known = [row for row, each in enumerate(batch) if each.outcomes]
            true += [batch[row].outcomes for row in known]
            made += [[outcomes[row] for outcomes in rounds] for row in known]
    if not true:
        return {}
    sizes = [abs(outcome.reward) for episode in true for outcome in episode if outcome.reward]
    least = 0.5 * float(np.mean(sizes)) if sizes else np.inf
    results: dict[str, Any] = {}
    for name, happened in (
        ("reward", lambda outcome: abs(outcome.reward) >= least),
        ("end", lambda outcome: outcome.ended),
    ):
        pairs = [
            [(happened(wanted), happened(found)) for wanted, found in zip(*episode, strict=True)]
            for episode in zip(true, made, strict=True)
        ]
        hits = np.array([sum(a and b for a, b in each) for each in pairs])
        wanted = np.array([sum(a for a, _ in each) for each in pairs])
        found = np.array([sum(b for _, b in each) for each in pairs])
        if not wanted.sum():
            continue
        none = np.zeros_like(hits)
        results[f"{name}_f1"] = {"model": _f1(hits, wanted, found), "copy": _f1(none, wanted, none)}
        results[f"{name}_recall"] = {
            "model": rate_figure(int(hits.sum()), int(wanted.sum())),
            "copy": rate_figure(0, int(wanted.sum())),
        }
        if found.sum():
            results[f"{name}_precision"] = {"model": rate_figure(int(hits.sum()), int(found.sum()))}
    errors = [
        float(np.mean([abs(a.reward - b.reward) for a, b in zip(*episode, strict=True)]))
        for episode in zip(true, made, strict=True)
    ]
    zeros = [float(np.mean([abs(outcome.reward) for outcome in episode])) for episode in true]
    results["reward_error"] = {"model": mean_figure(errors), "copy": mean_figure(zeros)}
    return results


def _f1(hits: np.ndarray, wanted: np.ndarray, found: np.ndarray) -> Figure:
    """Return F1 with a bootstrap interval over episodes; n is the number of recorded events."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(hits), size=(BOOTSTRAPS, len(hits)))
    events = wanted[drawn].sum(1) + found[drawn].sum(1)
    values = 2 * hits[drawn].sum(1)[events > 0] / events[events > 0]  # F1 is undefined without events
    low, high = np.percentile(values, (2.5, 97.5))
    value = 2 * hits.sum() / (wanted.sum() + found.sum())
    return {"value": float(value), "low": float(low), "high": float(high), "n": int(wanted.sum())}
