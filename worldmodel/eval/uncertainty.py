"""Uncertain futures: rounds with several possible outcomes of known probability."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from worldmodel.actions import Action
from worldmodel.eval.action_following import BATCH, Figures
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.figures import Tally
from worldmodel.eval.judge import Judge
from worldmodel.eval.runner import Subject
from worldmodel.media import Frame, Frames

STEPS = (0, 1, 2, 4, 8, 16)
"""Numbers of denoising steps to compare; 0 decodes the regressed forecast, an average of the outcomes."""
SEEDS = 64
"""Samples of one case from which the distribution of its outcomes is estimated."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One possible outcome of a round.

    Attributes:
        probability: Its probability.
        frames: True frames, uint8 `[t, h, w, 3]`.
        truths: Truth of every frame, for the judge.
    """

    probability: float
    frames: Frames
    truths: Sequence[Any]


@dataclass(frozen=True, slots=True)
class UncertainCase:
    """One round whose outcome is drawn by chance.

    Attributes:
        caption: The action in words, for the report.
        action: The action of the round.
        start: Frame before the round.
        outcomes: All possible outcomes; their probabilities sum to 1.
        kind: Kind of the action; rates are also reported by kind.
    """

    caption: str
    action: Action
    start: Frame
    outcomes: Sequence[Outcome]
    kind: str


def uncertain_futures(
    subject: Subject,
    cases: Sequence[UncertainCase],
    coverage: Sequence[UncertainCase],
    judge: Judge,
    seed: int = 1234,
    album: Album | None = None,
    steps: Sequence[int] = STEPS,
) -> dict[str, Any]:
    """Judge samples of uncertain futures, for several numbers of denoising steps.

    `valid`: every frame is strictly right for one and the same outcome, so a ghost or an average of outcomes
    fails. `valid_end`: the last frame is. `total_variation`: distance between the outcomes of `SEEDS` samples
    and the true distribution, 0 to 1, averaged over the cases of `coverage`; a sample that is not valid at
    its end is an outcome of probability 0. `sampling_noise` is the same distance of as many exact draws, the
    floor for any model, and `copy_last_frame` the validity of a model that repeats the start.

    Args:
        subject: The model.
        cases: Rounds that are sampled once.
        coverage: Rounds that are sampled `SEEDS` times.
        judge: Judge of the world.
        seed: Seed of the noise.
        album: Where examples are kept.
        steps: Numbers of denoising steps.
    """
    rows: dict[str, Any] = {}
    for count in steps:
        chosen, by_kind, tally = subject.with_steps(count), {}, Tally()
        for start in range(0, len(cases), BATCH):
            batch = cases[start : start + BATCH]
            for case, frames in zip(batch, _play(chosen, batch, seed + start), strict=True):
                found, whole = matching_outcome(case, frames, judge)
                tally.count(valid=whole, valid_end=found is not None)
                by_kind.setdefault(case.kind, Tally()).count(valid=whole)
                if album is not None and count == max(steps):
                    truth = case.outcomes[found or 0].frames
                    album.add(Example("uncertain futures", case.caption, whole, truth, frames, ""))
        for case in coverage:
            tally.measure(total_variation=_distance(case, _sampled(chosen, case, judge, seed)))
        kinds = {kind: each.figures()["valid"] for kind, each in sorted(by_kind.items())}
        rows[f"{count} steps"] = {**tally.figures(), "by_kind": kinds}
    return rows | {"baselines": _baselines(cases, coverage, judge, seed)}


def matching_outcome(case: UncertainCase, frames: Frames, judge: Judge) -> tuple[int | None, bool]:
    """Return the outcome that the last frame shows, and whether all frames show that one.

    Frames whose truth the judge cannot read are skipped.
    """
    for index, outcome in enumerate(case.outcomes):
        if judge(frames[-1], outcome.truths[-1]).strict:
            triples = zip(frames, outcome.frames, outcome.truths, strict=True)
            whole = all(
                judge(made, truth).strict or not judge(true, truth).strict for made, true, truth in triples
            )
            return index, whole
    return None, False


def _play(subject: Subject, cases: Sequence[UncertainCase], seed: int) -> np.ndarray:
    worlds = subject.open(np.stack([case.start for case in cases]), range(seed, seed + len(cases)))
    return worlds.step([case.action for case in cases])


def _sampled(subject: Subject, case: UncertainCase, judge: Judge, seed: int) -> list[int | None]:
    """Return the outcome of each of `SEEDS` samples."""
    found: list[int | None] = []
    for start in range(0, SEEDS, BATCH):
        clips = _play(subject, [case] * min(BATCH, SEEDS - start), seed + start)
        found += [matching_outcome(case, clip, judge)[0] for clip in clips]
    return found


def _distance(case: UncertainCase, found: Sequence[int | None]) -> float:
    """Return the total variation between outcomes and their true probabilities."""
    counts, total = Counter(found), len(found)
    distances = [
        abs(counts[index] / total - outcome.probability) for index, outcome in enumerate(case.outcomes)
    ]
    return (sum(distances) + counts[None] / total) / 2


def _baselines(
    cases: Sequence[UncertainCase], coverage: Sequence[UncertainCase], judge: Judge, seed: int
) -> Figures:
    rng, tally = np.random.default_rng(seed), Tally()
    for case in cases:
        still = np.repeat(case.start[None], len(case.outcomes[0].frames), axis=0)
        tally.count(copy_last_frame=matching_outcome(case, still, judge)[1])
    for case in coverage:
        probabilities = [outcome.probability for outcome in case.outcomes]
        drawn = rng.choice(len(probabilities), size=SEEDS, p=probabilities)
        tally.measure(sampling_noise=_distance(case, drawn.tolist()))
    return tally.figures()
