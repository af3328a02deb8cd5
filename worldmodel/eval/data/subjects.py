"""The model and simpler predictions beside it, which every table compares.

model           the model, on its own frames
zero_steps      the forecast of its states, without the generator (0 denoising steps)
codec           the recorded frames, encoded and decoded: the ceiling of any model with this codec
copy            the frame before the first round, repeated
truth           the recorded frames, where a metric is defined on them
"""

from collections.abc import Mapping, Sequence

import numpy as np

from worldmodel.actions import Action
from worldmodel.eval.data.episodes import Recorded
from worldmodel.eval.figures import Figure
from worldmodel.eval.runner import Clips, Subject
from worldmodel.eval.table import Row, Table, Unit

TITLES = {
    "model": "model",
    "zero_steps": "0 steps",
    "codec": "codec alone",
    "copy": "copy",
    "truth": "recorded frames",
}
"""Names in tables, in their order."""


def subject_row(title: str, figures: Mapping[str, Figure], unit: Unit = "%") -> Row | None:
    """Return the figure of the model beside the simpler predictions; None where the model has none."""
    if "model" not in figures:
        return None
    beside = {TITLES[name]: figures[name] for name in TITLES if name in figures and name != "model"}
    return Row(title, figures["model"], unit, baselines=beside)


def subject_tables(
    results: Mapping[str, Mapping[str, Figure]], title: str, names: Mapping[str, tuple[str, Unit]], about: str
) -> list[Table]:
    """Return a table with a row for every figure, of the title and unit in `names`; none without figures."""
    found = [subject_row(names[name][0], each, names[name][1]) for name, each in results.items()]
    rows = [row for row in found if row is not None]
    return [Table(title, rows, about)] if rows else []


def subjects(subject: Subject, forecasts: bool) -> dict[str, Subject]:
    """Return the model, and its forecast if it makes one, by their names in tables."""
    return {"model": subject, **({"zero_steps": subject.with_steps(0)} if forecasts else {})}


def play(
    subject: Subject,
    starts: Sequence[np.ndarray],
    actions: Sequence[Sequence[Action]],
    seeds: Sequence[int],
    done: Sequence[Sequence[Action]] = (),
) -> list[Clips]:
    """Play worlds from their starts, on the subject's own frames, and return the clips of every round.

    Args:
        subject: The model.
        starts: What was seen before the first round of every world, a frame or a video.
        actions: The actions of every world, one for each round; all worlds have the same number.
        seeds: The seed of every world's noise.
        done: The actions of the last rounds of every video.
    """
    worlds = subject.open(np.stack(list(starts)), seeds, done)
    return [worlds.step(taken) for taken in zip(*actions, strict=True)]


def play_all(
    subject: Subject, episodes: Sequence[Recorded], seeds: Sequence[int], forecasts: bool
) -> dict[str, list[Clips]]:
    """Return the clips of every round of a batch of episodes by every row of the tables."""
    starts, actions = [each.start for each in episodes], [each.actions for each in episodes]
    truth = [np.stack(clips) for clips in zip(*(each.clips for each in episodes), strict=True)]
    still = np.repeat(np.stack(starts)[:, None], truth[0].shape[1], axis=1)
    return {
        **{name: play(each, starts, actions, seeds) for name, each in subjects(subject, forecasts).items()},
        "codec": [subject.reconstruct(clips) for clips in truth],
        "copy": [still] * len(truth),
        "truth": truth,
    }
