"""Predicted rewards and ends of episodes against the recorded ones."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from worldmodel.episodes import Outcome
from worldmodel.eval.data.episodes import EpisodeReader
from worldmodel.eval.data.subjects import subject_tables
from worldmodel.eval.figures import Figure, bootstrap, mean_figure, rate_figure
from worldmodel.eval.runner import Subject
from worldmodel.eval.table import Table, Unit

LATE = 5
"""Rounds that are played after a recorded end, with its last action, to see an end that is late."""
TITLES: dict[str, tuple[str, Unit]] = {
    "reward_correlation": ("rewards, correlation", ""),
    "reward_f1": ("unusual rewards, F1", ""),
    "reward_recall": ("unusual rewards found", "%"),
    "reward_precision": ("unusual rewards right", "%"),
    "return_error": ("error of the sum of rewards", ""),
    "end_steps": ("error of the end, in steps", ""),
    "end_f1": ("ends, F1", ""),
    "end_recall": ("ends found", "%"),
    "end_precision": ("ends right", "%"),
    "reward_error": ("error of the reward", ""),
}
"""Titles and units of the figures."""


def outcome_tables(results: Mapping[str, Any]) -> list[Table]:
    """Return the table of the figures."""
    about = (
        "Predicted on the model's own frames. A reward is unusual from half the mean distance of recorded "
        f"rewards from the median, of those that are not it. An end that is not predicted within {LATE} "
        f"steps after the recorded one counts as {LATE + 1} late. Copy: the usual reward and no end."
    )
    return subject_tables(results, "Rewards and ends", TITLES, about)


def outcomes(subject: Subject, reader: EpisodeReader, count: int) -> dict[str, Any]:
    """Play recorded episodes on the model's own frames, and compare what it predicts for every round.

    The usual reward is the median of the recorded ones. A reward is an event if its distance from that is at
    least half the mean distance of the recorded rewards that are not the usual one. Ends and events are few,
    so their precision, recall and F1 are given, not their accuracy; `end_steps` is the mean distance in
    rounds between the first predicted end and the recorded one.

    Args:
        subject: The model; nothing is measured if it predicts no outcomes.
        reader: Reads the episodes; those without outcomes are left out.
        count: Number of episodes.

    Returns:
        Figures by name and row. The row `copy` is of a world in which nothing happens: always the usual
        reward and no end.
    """
    true: list[Sequence[Outcome]] = []
    made: list[Sequence[Outcome]] = []
    """Predicted outcomes, of episodes with an end also of the rounds after it."""
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
            if any(outcome.ended for row in known for outcome in batch[row].outcomes):
                for _ in range(LATE):
                    worlds.step([each.actions[-1] for each in batch])
                    rounds.append(getattr(worlds, "outcomes", ()))
            true += [batch[row].outcomes for row in known]
            made += [[outcomes[row] for outcomes in rounds] for row in known]
    return outcome_figures(true, made)


def outcome_figures(true: Sequence[Sequence[Outcome]], late: Sequence[Sequence[Outcome]]) -> dict[str, Any]:
    """Compare predicted outcomes with the recorded ones, as `outcomes` does.

    Args:
        true: The recorded outcomes of every episode.
        late: The predicted ones, of episodes with an end also of up to `LATE` rounds after it.
    """
    if not true:
        return {}
    made = [each[: len(wanted)] for wanted, each in zip(true, late, strict=True)]
    recorded = [np.array([outcome.reward for outcome in episode]) for episode in true]
    predicted = [np.array([outcome.reward for outcome in episode]) for episode in made]
    usual = float(np.median(np.concatenate(recorded)))
    sizes = np.abs(np.concatenate(recorded) - usual)
    least = 0.5 * float(sizes[sizes > 0].mean()) if sizes.any() else np.inf
    results: dict[str, Any] = {}
    if sizes.any():
        results["reward_correlation"] = {"model": _correlation(recorded, predicted)}
    for name, happened in (
        ("reward", lambda outcome: abs(outcome.reward - usual) >= least),
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
    for name, distance in (
        ("reward_error", lambda one, other: np.abs(one - other).mean()),
        ("return_error", lambda one, other: abs(one.sum() - other.sum())),
    ):
        pairs = zip(recorded, predicted, strict=True)
        results[name] = {
            "model": mean_figure(float(distance(*pair)) for pair in pairs),
            "copy": mean_figure(float(distance(each, np.full_like(each, usual))) for each in recorded),
        }
    ends = [
        (_end(wanted, len(wanted)), _end(found, len(wanted) + LATE))
        for wanted, found in zip(true, late, strict=True)
        if any(outcome.ended for outcome in wanted)
    ]
    if ends:
        results["end_steps"] = {
            "model": mean_figure(abs(found - wanted) for wanted, found in ends),
            "copy": mean_figure(LATE + 1 for _ in ends),
        }
    return results


def _end(outcomes: Sequence[Outcome], without: int) -> int:
    """Return the number of the first round that ends an episode, or another if none does."""
    return next((number for number, outcome in enumerate(outcomes) if outcome.ended), without)


def _correlation(recorded: Sequence[np.ndarray], predicted: Sequence[np.ndarray]) -> Figure:
    """Return the correlation of rewards with a bootstrap interval over episodes; n is the number of rounds.

    It is 0 if all predicted rewards are the same.
    """

    def correlation(chosen: np.ndarray) -> float:
        x, y = (np.concatenate([rewards[index] for index in chosen]) for rewards in (recorded, predicted))
        x, y = x - x.mean(), y - y.mean()
        size = float(np.sqrt((x**2).sum() * (y**2).sum()))
        return float((x * y).sum()) / size if size else 0.0

    return bootstrap(correlation, len(recorded), sum(map(len, recorded)))


def _f1(hits: np.ndarray, wanted: np.ndarray, found: np.ndarray) -> Figure:
    """Return F1 with a bootstrap interval over episodes; n is the number of recorded events."""

    def f1(chosen: np.ndarray) -> float:
        events = wanted[chosen].sum() + found[chosen].sum()
        return 2 * hits[chosen].sum() / events if events else math.nan

    return bootstrap(f1, len(hits), int(wanted.sum()))
