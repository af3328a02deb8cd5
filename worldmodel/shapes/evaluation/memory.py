"""Memory: hidden objects reappear unchanged after some rounds of other acts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from worldmodel.eval.action_following import BATCH
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.figures import Tally
from worldmodel.eval.judge import Judge
from worldmodel.eval.runner import Subject
from worldmodel.shapes.evaluation.cases import case_of
from worldmodel.shapes.memory import sample_memory_rollout

HIDDEN_ROUNDS = (1, 4, 8)


def hidden_objects(
    subject: Subject,
    judge: Judge,
    count: int,
    seed: int,
    album: Album | None = None,
    hidden_rounds: Sequence[int] = HIDDEN_ROUNDS,
) -> dict[str, Any]:
    """Hide an object, play rounds with other acts, show it again, and judge the last frame.

    Returns:
        By number of rounds: the rates `hidden` (the object is not there before the act that shows), `named`
        (it was hidden, and has its place, size and shape again), `strict` (it was hidden, and the whole
        frame is right) and `forgotten_named`, which is `named` for the same model when it starts anew from
        its own last frame before the act that shows, so that it remembers nothing. A model that ignores both
        acts is never right.
    """
    figures: dict[str, Any] = {}
    for hidden in hidden_rounds:
        tally = Tally()
        for start in range(0, count, BATCH):
            indices = range(start, min(start + BATCH, count))
            truths = [
                [case_of(each) for each in sample_memory_rollout(seed, index, hidden + 1, hidden)]
                for index in indices
            ]
            seeds = [seed + index for index in indices]
            images = np.stack([truth[0].start for truth in truths])
            worlds = subject.open(images, seeds)
            for number in range(hidden):
                images = worlds.step([truth[number].action for truth in truths])[:, -1]
            lasts, actions = [truth[-1] for truth in truths], [truth[-1].action for truth in truths]
            forgotten = subject.open(images, seeds).step(actions)
            rows = zip(lasts, images, worlds.step(actions), forgotten, strict=True)
            for case, before, made, without in rows:
                truth = case.truths[-1]
                gone, verdict = not judge(before, truth).named, judge(made[-1], truth)
                tally.count(
                    hidden=gone,
                    named=gone and verdict.named,
                    strict=gone and verdict.strict,
                    forgotten_named=gone and judge(without[-1], truth).named,
                )
                if album is not None:
                    note = verdict.note if gone else "was not hidden"
                    caption = f"{case.caption} (rounds hidden: {hidden})"
                    album.add(Example("memory", caption, gone and verdict.strict, case.frames, made, note))
        figures[f"rounds hidden: {hidden}"] = tally.figures()
    return figures
