"""Drift: rollouts on the model's own frames, judged against the true continuation round by round."""

from collections.abc import Callable, Sequence

import numpy as np

from worldmodel.eval.action_following import BATCH
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.judge import Case, Judge
from worldmodel.eval.metrics import Figure, Tally, psnr
from worldmodel.eval.runner import Subject


def rollouts(
    subject: Subject,
    sample: Callable[[int], Sequence[Case]],
    judge: Judge,
    num_rollouts: int,
    rounds: int,
    seed: int = 1234,
    album: Album | None = None,
) -> dict[str, list[Figure]]:
    """Play rollouts and judge the last frame of every round; errors accumulate over the rounds.

    Args:
        subject: The model.
        sample: Returns the cases of a rollout, one a round, by its index.
        judge: Judge of the world.
        num_rollouts: Number of rollouts.
        rounds: Rounds of each.
        seed: Seed of the noise.
        album: Where examples are kept.

    Returns:
        The rates strict, named and others and the PSNR by round; the first entry is round 1.
    """
    tallies = [Tally() for _ in range(rounds)]
    for start in range(0, num_rollouts, BATCH):
        indices = range(start, min(start + BATCH, num_rollouts))
        truths = [sample(index) for index in indices]
        worlds = subject.open(np.stack([truth[0].start for truth in truths]), [seed + i for i in indices])
        lasts: list[list[np.ndarray]] = [[] for _ in indices]
        for number, tally in enumerate(tallies):
            cases = [truth[number] for truth in truths]
            clips = worlds.step([case.action for case in cases])
            for row, (case, frames) in enumerate(zip(cases, clips, strict=True)):
                verdict = judge(frames[-1], case.truths[-1])
                tally.count(strict=verdict.strict, named=verdict.named, others=verdict.others)
                tally.measure(psnr=psnr(frames, case.frames))
                lasts[row].append(frames[-1])
        if album is not None:
            for truth, made in zip(truths, lasts, strict=True):
                album.add(_example(truth, made, judge))
    rows = [tally.figures() for tally in tallies]
    return {name: [row[name] for row in rows] for name in rows[0]}


def _example(truth: Sequence[Case], made: Sequence[np.ndarray], judge: Judge) -> Example:
    """Show the last frame of every round."""
    right = [judge(frame, case.truths[-1]).strict for frame, case in zip(made, truth, strict=True)]
    note = "" if all(right) else f"first wrong in round {right.index(False) + 1}"
    ends = np.stack([case.frames[-1] for case in truth])
    return Example(
        "rollouts", " / ".join(case.caption for case in truth), all(right), ends, np.stack(made), note
    )
