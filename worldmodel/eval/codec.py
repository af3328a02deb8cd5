"""Reconstruction by the codec alone, an upper bound for every generator."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from worldmodel.eval.action_following import BATCH, right_throughout
from worldmodel.eval.examples import Album, Example
from worldmodel.eval.judge import Case, Judge
from worldmodel.eval.metrics import Figure, Tally, psnr, ssim
from worldmodel.eval.runner import Subject
from worldmodel.media import Frames

SIDE = 4
"""Side of a detail in pixels."""
LEAST_DIFFERENCE = 20.0
"""Difference of a detail from the usual picture in grey levels, as a root mean square."""
LEVELS = 4
"""Levels of each channel by which looks are told apart."""


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


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What a codec alone returns of frames.

    Attributes:
        num_frames: Number of frames.
        psnr: Peak signal-to-noise ratio over all of them in dB.
        num_details: Number of different looks of their details.
        num_kept: Number of these that come back in at least half of the places.
    """

    num_frames: int
    psnr: float
    num_details: int
    num_kept: int

    @property
    def kept(self) -> float | None:
        """The share of looks that come back; None if no frame has a detail."""
        return self.num_kept / self.num_details if self.num_details else None


def ceiling(truth: Frames, coded: Frames) -> Ceiling:
    """Compare frames with what a codec returns of them.

    A detail is a square of `SIDE` pixels that differs from the median of all frames. It comes back if the
    error is less than half of that difference. Details that look alike count once, however often they occur:
    PSNR, and a share of all pixels, hide the loss of a rare object.
    """
    true = _squares(truth)
    usual = np.median(truth, axis=0).astype(np.float32)
    difference = _power(true - _squares(np.broadcast_to(usual, truth.shape)))
    detail = difference >= LEAST_DIFFERENCE**2
    returned = _power(true - _squares(coded))[detail] < difference[detail] / 4
    looks, counts = np.unique(_looks(true[detail]), return_inverse=True, return_counts=True)[1:]
    kept = np.bincount(looks, returned, len(counts)) / np.maximum(counts, 1)
    return Ceiling(len(truth), psnr(coded, truth), len(counts), int((kept >= 0.5).sum()))


def _squares(frames: np.ndarray) -> Float[np.ndarray, "n y x 3"]:
    """Cut frames into squares; what is left over at the right and at the bottom is dropped."""
    count, height, width = (size // SIDE for size in (len(frames) * SIDE, *frames.shape[1:3]))
    whole = frames[:, : height * SIDE, : width * SIDE].astype(np.float32)
    parts = whole.reshape(count, height, SIDE, width, SIDE, 3).swapaxes(2, 3)
    return parts.reshape(-1, SIDE, SIDE, 3)


def _power(squares: Float[np.ndarray, "n y x 3"]) -> Float[np.ndarray, " n"]:
    return np.square(squares).mean(axis=(1, 2, 3))


def _looks(squares: Float[np.ndarray, "n y x 3"]) -> np.ndarray:
    """Number the looks of squares: the mean colours of their quarters, in `LEVELS` levels."""
    half = SIDE // 2
    means = squares.reshape(-1, 2, half, 2, half, 3).mean(axis=(2, 4)).reshape(-1, 12)
    return (means * LEVELS / 256).astype(np.int64) @ LEVELS ** np.arange(12)
