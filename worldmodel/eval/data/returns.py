"""Return to the start: an action and then its inverse."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from worldmodel.actions import Action
from worldmodel.config import ActionConfig
from worldmodel.errors import InputError
from worldmodel.eval.data.counterfactuals import differ
from worldmodel.eval.data.episodes import EpisodeReader
from worldmodel.eval.data.subjects import play, subject_tables, subjects
from worldmodel.eval.figures import Tally
from worldmodel.eval.metrics.psnr import psnr
from worldmodel.eval.runner import Subject
from worldmodel.eval.table import Table, Unit
from worldmodel.rollout.action_list import parse_action

Inverse = tuple[Action, Action]
TITLES: dict[str, tuple[str, Unit]] = {
    "moved": ("the action changes the picture", "%"),
    "returned": ("back at the start", "%"),
    "psnr": ("PSNR", "dB"),
}
"""Titles and units of the figures."""


def return_tables(results: Mapping[str, Any]) -> list[Table]:
    """Return the table of the figures."""
    about = (
        "PSNR and return count the worlds whose picture the action changes, against the start. A copy "
        "never leaves the start, so its figures count all worlds."
    )
    return subject_tables(results, "Action and inverse", TITLES, about)


def parse_inverse(text: str, takes: ActionConfig) -> Inverse:
    """Parse `left=right`: two actions, each keys joined by `+`, or in a form that `parse_action` reads.

    Raises:
        InputError: There is no `=`, or the model does not take one of the actions.
    """
    first, equals, second = text.partition("=")
    if not equals or not first.strip() or not second.strip():
        raise InputError(f"The pair of inverse actions is {text!r}; write it like left=right.")
    return _action(first.strip(), takes), _action(second.strip(), takes)


def _action(text: str, takes: ActionConfig) -> Action:
    keys = tuple(key.strip() for key in text.split("+"))
    action = Action(keys=keys) if set(keys) <= set(takes.keys) else parse_action(text)
    action.check(takes)
    return action


def returns(
    subject: Subject, reader: EpisodeReader, count: int, inverses: Sequence[Inverse], forecasts: bool
) -> dict[str, Any]:
    """Play each pair of inverse actions from recorded frames.

    `moved`: share of the worlds whose picture the first action changes; `returned`: share of these whose
    last picture is the start again; `psnr`: of the last picture of these against the start. The row `codec`
    is the start encoded and decoded. The row `copy` repeats the start and counts all worlds: it always
    returns and never moves, so a model's return means little without its `moved`.

    Args:
        subject: The model.
        reader: Reads the episodes.
        count: Number of starts.
        inverses: Pairs of actions, each played in both orders.
        forecasts: Whether the model makes a forecast that 0 denoising steps show.

    Returns:
        Figures by name and row.
    """
    tallies: dict[str, Tally] = {}
    orders = [order for first, second in inverses for order in ((first, second), (second, first))]
    played = 0
    for batch in reader.batches(count):
        starts = [each.start for each in batch]
        seeds = range(reader.seed + played, reader.seed + played + len(batch))
        for name, each in subjects(subject, forecasts).items():
            for order in orders:
                there, back = play(each, starts, [order] * len(batch), seeds)
                tally = tallies.setdefault(name, Tally())
                for start, away, last in zip(starts, there[:, -1], back[:, -1], strict=True):
                    moved = differ(start, away)
                    tally.count(moved=moved)
                    if moved:
                        tally.count(returned=not differ(start, last))
                        tally.measure(psnr=psnr(last, start))
        codec, copy = (tallies.setdefault(name, Tally()) for name in ("codec", "copy"))
        for start, coded in zip(starts, subject.reconstruct(np.stack(starts)[:, None]), strict=True):
            codec.measure(psnr=psnr(coded[-1], start))
            copy.measure(psnr=psnr(start, start))
            copy.count(moved=False, returned=True)
        played += len(batch)
    results: dict[str, Any] = {}
    for name, tally in tallies.items():
        for measure, figure in tally.figures().items():
            results.setdefault(measure, {})[name] = figure
    return results
