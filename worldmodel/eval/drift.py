"""How long a rollout stays true: every round judged against the simulator's own continuation."""

from collections.abc import Sequence

import numpy as np

from worldmodel.eval.action_following import BATCH
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.metrics import Figure, Tally, psnr
from worldmodel.eval.runner import Subject
from worldmodel.types import Action
from worldmodel.worlds import shapes
from worldmodel.worlds.shapes import Sample, judge


def rollouts(
    subject: Subject, num_rollouts: int, rounds: int, seed: int = 1234, album: Album | None = None
) -> dict[str, list[Figure]]:
    """Roll worlds out on their own frames, one act a round, and judge each round's last frame.

    Errors add up: what a round left wrong stays wrong for all that follow.

    Returns strict, named, others and PSNR by round; the first entry is round 1.
    """
    tallies = [Tally() for _ in range(rounds)]
    for start in range(0, num_rollouts, BATCH):
        indices = range(start, min(start + BATCH, num_rollouts))
        truths = [shapes.sample_rollout("single", seed, index, rounds) for index in indices]
        pictures = np.stack([truth[0].clip.first_frame for truth in truths])
        worlds = subject.open(pictures, [seed + index for index in indices])
        lasts: list[list[np.ndarray]] = [[] for _ in indices]
        for number, tally in enumerate(tallies):
            now = [truth[number] for truth in truths]
            clips = worlds.step([Action(sample.text) for sample in now])
            for row, (sample, frames) in enumerate(zip(now, clips, strict=True)):
                _count(tally, sample, frames)
                lasts[row].append(frames[-1])
        if album is not None:
            for truth, made in zip(truths, lasts, strict=True):
                album.add(_example(truth, made))
    rows = [tally.figures() for tally in tallies]
    return {name: [row[name] for row in rows] for name in rows[0]}


def _count(tally: Tally, sample: Sample, frames: np.ndarray) -> None:
    verdict, plan = judge(frames[-1], sample.clip.after), sample.clip.plan
    tally.count(strict=verdict.strict, named=verdict.named_right(plan), others=verdict.others_right(plan))
    tally.measure(psnr=psnr(frames, sample.clip.frames))


def _example(truth: Sequence[Sample], made: Sequence[np.ndarray]) -> Example:
    """Show the last frame of every round."""
    right = [judge(frame, sample.clip.after).strict for frame, sample in zip(made, truth, strict=True)]
    first_wrong = "" if all(right) else f"first wrong in round {right.index(False) + 1}"
    ends = np.stack([sample.clip.frames[-1] for sample in truth])
    caption = " / ".join(sample.text for sample in truth)
    return Example("rollouts", caption, all(right), ends, np.stack(made), first_wrong)
