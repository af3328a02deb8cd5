"""Reconstruction by the codec alone, an upper bound for every generator."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from worldmodel.eval.action_following import BATCH, Values, measure, played_cases
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.figures import Figure, Tally
from worldmodel.eval.judge import Case, Judge
from worldmodel.eval.metrics import Metrics, get_metrics
from worldmodel.eval.metrics.psnr import psnr
from worldmodel.eval.runner import Subject
from worldmodel.media import Frames

SIDE = 4
"""Side of a detail in pixels."""
LEAST_DIFFERENCE = 20.0
"""Root mean square difference of a detail from the median frame, in grey levels."""
LEVELS = 4
"""Levels per channel that distinguish appearances."""


METRICS = ("every_frame", "psnr", "ssim")


def codec(
    subject: Subject,
    cases: Sequence[Case],
    judge: Judge,
    album: Album | None = None,
    metrics: Metrics | None = None,
) -> dict[str, Figure]:
    """Encode and decode true clips.

    `last_frame` is the strict verdict on the last frame of a clip, `image` the one on the still image before
    it; every metric has a figure of its name besides.
    """
    chosen = get_metrics(METRICS) if metrics is None else metrics
    tally, values = Tally(), Values(chosen)
    for start in range(0, len(cases), BATCH):
        batch = cases[start : start + BATCH]
        coded = subject.reconstruct(np.stack([case.frames for case in batch]))
        stills = subject.reconstruct(np.stack([case.start[None] for case in batch]))
        played = played_cases(batch, coded, judge)
        values.add(measure(chosen, played))
        for case, frames, still, verdict in zip(batch, coded, stills, played.verdicts, strict=True):
            tally.count(last_frame=verdict.strict, image=judge(still[-1], case.before).strict)
            if album is not None:
                album.add(Example("codec", "encoded and decoded", verdict.strict, case.frames, frames))
    return tally.figures() | values.figures()


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Reconstruction quality of the codec alone.

    Attributes:
        num_frames: Number of frames.
        psnr: Peak signal-to-noise ratio over all of them in dB.
        num_details: Number of distinct appearances of details.
        num_kept: Number of these that are reconstructed in at least half of their occurrences.
    """

    num_frames: int
    psnr: float
    num_details: int
    num_kept: int

    @property
    def kept(self) -> float | None:
        """Fraction of appearances reconstructed correctly; None if no frame has a detail."""
        return self.num_kept / self.num_details if self.num_details else None


def ceiling(truth: Frames, coded: Frames) -> Ceiling:
    """Compare frames with their reconstruction by a codec.

    A detail is a square of `SIDE` pixels that differs from the median of all frames. It is reconstructed if
    its error is less than half of that difference. Details of equal appearance count once, however often they
    occur: PSNR, or a fraction of all pixels, would hide the loss of a rare object.
    """
    true = _squares(truth)
    usual = np.median(truth, axis=0).astype(np.float32)
    difference = _power(true - _squares(np.broadcast_to(usual, truth.shape)))
    detail = difference >= LEAST_DIFFERENCE**2
    returned = _power(true - _squares(coded))[detail] < difference[detail] / 4
    seen, counts = np.unique(_appearances(true[detail]), return_inverse=True, return_counts=True)[1:]
    kept = np.bincount(seen, returned, len(counts)) / np.maximum(counts, 1)
    return Ceiling(len(truth), psnr(coded, truth), len(counts), int((kept >= 0.5).sum()))


def _squares(frames: np.ndarray) -> Float[np.ndarray, "n y x 3"]:
    """Cut frames into squares; a remainder at the right and bottom is dropped."""
    count, height, width = (size // SIDE for size in (len(frames) * SIDE, *frames.shape[1:3]))
    whole = frames[:, : height * SIDE, : width * SIDE].astype(np.float32)
    parts = whole.reshape(count, height, SIDE, width, SIDE, 3).swapaxes(2, 3)
    return parts.reshape(-1, SIDE, SIDE, 3)


def _power(squares: Float[np.ndarray, "n y x 3"]) -> Float[np.ndarray, " n"]:
    return np.square(squares).mean(axis=(1, 2, 3))


def _appearances(squares: Float[np.ndarray, "n y x 3"]) -> np.ndarray:
    """Return an index of the appearance of squares: the mean colours of their quarters in `LEVELS` levels."""
    half = SIDE // 2
    means = squares.reshape(-1, 2, half, 2, half, 3).mean(axis=(2, 4)).reshape(-1, 12)
    return (means * LEVELS / 256).astype(np.int64) @ LEVELS ** np.arange(12)
