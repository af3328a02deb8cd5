"""Counterfactuals: rounds from the same recorded frame with another action."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from worldmodel.actions import Action
from worldmodel.eval.action_following import BATCH
from worldmodel.eval.data.episodes import EpisodeReader
from worldmodel.eval.data.subjects import play, subject_tables, subjects
from worldmodel.eval.figures import Tally
from worldmodel.eval.metrics import Metric, Played
from worldmodel.eval.runner import Clips, Subject
from worldmodel.eval.table import Table, Unit
from worldmodel.media import Frame, Frames

PATCH = 8
"""Side of the patches by which pictures are compared, in pixels."""
DIFFERENT = 16.0
"""Mean absolute difference of one patch, in grey levels, from which two pictures differ."""
MAX_ROUNDS = 2000
"""Most recorded rounds from which those that are played are chosen."""
TITLES: dict[str, tuple[str, Unit]] = {
    "differ": ("another action, another picture", "%"),
    "own_nearer": ("own action nearer to the truth", "%"),
    "recognised": ("other action recognised", "%"),
}
"""Titles and units of the figures."""


def counterfactual_tables(results: Mapping[str, Any]) -> list[Table]:
    """Return the table of the figures."""
    about = "Recorded rounds, played with their own and with another action."
    return subject_tables(results, "Counterfactuals", TITLES, about)


@dataclass(frozen=True, slots=True)
class RecordedRound:
    """A recorded round: the frame before it, its action and its true frames."""

    before: Frame
    action: Action
    clip: Frames


def difference(one: Frames, other: Frames) -> float:
    """Return the largest mean absolute difference of a patch of two pictures or clips, in grey levels.

    Small things that move or appear count as much as large ones.
    """
    apart = np.abs(one.astype(np.float32) - other.astype(np.float32)).mean(axis=-1)
    height, width = (side - side % PATCH for side in apart.shape[-2:])
    cut = apart[..., :height, :width]
    patches = cut.reshape(*cut.shape[:-2], height // PATCH, PATCH, width // PATCH, PATCH)
    return float(patches.mean(axis=(-3, -1)).max())


def differ(one: Frames, other: Frames) -> bool:
    """Return whether two pictures or clips differ visibly."""
    return difference(one, other) > DIFFERENT


def recorded_rounds(reader: EpisodeReader, count: int) -> list[RecordedRound]:
    """Return the rounds of up to `count` episodes, at most `MAX_ROUNDS`."""
    rounds: list[RecordedRound] = []
    for episode in reader.read(count):
        rounds += map(RecordedRound, episode.starts, episode.actions, episode.clips)
        if len(rounds) >= MAX_ROUNDS:
            break
    return rounds[:MAX_ROUNDS]


def counterfactuals(
    subject: Subject,
    reader: EpisodeReader,
    count: int,
    forecasts: bool,
    recogniser: Metric | None = None,
) -> dict[str, Any]:
    """Play recorded rounds with their own and with another action.

    `differ`: share of rounds in which the two predictions differ, and `own_nearer`, share in which the
    prediction for the own action is nearer to the recorded frames; both over rounds in which the recorded
    picture changes, with the action of another such round as the other action. A figure is absent where the
    data have no such rounds.

    Args:
        subject: The model.
        reader: Reads the episodes.
        count: Most rounds that are played.
        forecasts: Whether the model makes a forecast that 0 denoising steps show.
        recogniser: Recognises actions in frames; adds `recognised`, the share of rounds with another action
            in which that action is recognised.

    Returns:
        Figures by name and row.
    """
    swapped = _swapped(recorded_rounds(reader, count), count, reader.seed)
    results: dict[str, Any] = {}
    for name, each in {**subjects(subject, forecasts), "copy": None}.items():
        tally = Tally()
        for start in range(0, len(swapped), BATCH):
            batch = swapped[start : start + BATCH]
            rounds = [true for true, _ in batch]
            own = _play(each, rounds, [true.action for true in rounds], reader.seed)
            others = _play(each, rounds, [other for _, other in batch], reader.seed)
            for (true, _), made, other in zip(batch, own, others, strict=True):
                nearer = _distance(made, true.clip) < _distance(other, true.clip)
                tally.count(differ=differ(made, other), own_nearer=nearer)
            if recogniser is not None:
                starts = np.stack([true.before for true in rounds])
                played = Played(starts, others, others, [other for _, other in batch])
                for recognised in recogniser(played):
                    tally.count(recognised=bool(recognised))
        for measure, figure in tally.figures().items():
            results.setdefault(measure, {})[name] = figure
    return results


def _swapped(rounds: Sequence[RecordedRound], count: int, seed: int) -> list[tuple[RecordedRound, Action]]:
    """Return rounds that change the picture, each with the action of another of them."""
    changing = [each for each in rounds if differ(each.before, each.clip[-1])]
    order = np.random.default_rng(seed).permutation(len(changing)).tolist()
    chosen: list[tuple[RecordedRound, Action]] = []
    for place, index in enumerate(order):
        ring = (changing[each].action for each in order[place + 1 :] + order[:place])
        other = next((action for action in ring if action != changing[index].action), None)
        if other is not None:
            chosen.append((changing[index], other))
        if len(chosen) == count:
            break
    return chosen


def _play(
    subject: Subject | None, rounds: Sequence[RecordedRound], actions: Sequence[Action], seed: int
) -> Clips:
    """Play the start of every round with an action; without a subject, repeat the start."""
    starts = [each.before for each in rounds]
    if subject is None:
        return np.repeat(np.stack(starts)[:, None], len(rounds[0].clip), axis=1)
    return play(subject, starts, [[action] for action in actions], range(seed, seed + len(rounds)))[0]


def _distance(made: Frames, true: Frames) -> float:
    return float(np.square(made.astype(np.float32) - true).mean())
