"""Reconstruction by the codec alone, an upper bound for every generator."""

from collections.abc import Sequence

import numpy as np

from worldmodel.eval.action_following import BATCH, right_throughout
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.judge import Case, Judge
from worldmodel.eval.metrics import Figure, Tally, psnr, ssim
from worldmodel.eval.runner import Subject


def codec(
    subject: Subject, cases: Sequence[Case], judge: Judge, album: Album | None = None
) -> dict[str, Figure]:
    """Encode and decode true clips.

    `last_frame` is strict on the last frame of a clip, `every_frame` on all of them, `image` on the still
    image before it.
    """
    tally = Tally()
    for start in range(0, len(cases), BATCH):
        batch = cases[start : start + BATCH]
        coded = subject.reconstruct(np.stack([case.frames for case in batch]))
        stills = subject.reconstruct(np.stack([case.start[None] for case in batch]))
        for case, frames, still in zip(batch, coded, stills, strict=True):
            last = judge(frames[-1], case.truths[-1]).strict
            tally.count(
                last_frame=last,
                every_frame=right_throughout(frames, case, judge),
                image=judge(still[-1], case.before).strict,
            )
            tally.measure(psnr=psnr(frames, case.frames), ssim=ssim(frames, case.frames))
            if album is not None:
                album.add(Example("codec", "encoded and decoded", last, case.frames, frames))
    return tally.figures()
