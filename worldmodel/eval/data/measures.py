"""Measures of played rounds against the recorded ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from worldmodel.eval.judge import Judge
from worldmodel.eval.metrics import psnr, ssim
from worldmodel.eval.perceptual import PerceptualDistance
from worldmodel.eval.runner import Clips, Images
from worldmodel.media import Frames
from worldmodel.media.tensors import to_tensor
from worldmodel.types import Action

GRADIENT_FLOOR = 1.0
"""Grey levels that are added to gradients, so that flat pictures have a ratio."""


@dataclass(frozen=True, slots=True)
class Played:
    """One round of a batch of worlds.

    Attributes:
        starts: The frame before the round of every world, as it was played.
        clips: The frames of the round.
        truth: The recorded frames of the round.
        actions: The action of every world.
    """

    starts: Images
    clips: Clips
    truth: Clips
    actions: Sequence[Action]


class Measure(Protocol):
    """A measure of a round, a number or a verdict for every world."""

    @property
    def name(self) -> str:
        """Name in the results."""
        ...

    @property
    def of_truth(self) -> bool:
        """Whether it also says something about the recorded frames themselves."""
        ...

    def __call__(self, played: Played) -> Sequence[float | bool]:
        """Return the value of every world."""
        ...


class Psnr:
    """Peak signal-to-noise ratio of a round in dB; that of equal frames is 100."""

    name, of_truth = "psnr", False

    def __call__(self, played: Played) -> list[float]:
        return [psnr(made, true) for made, true in zip(played.clips, played.truth, strict=True)]


class Ssim:
    """Structural similarity of a round."""

    name, of_truth = "ssim", False

    def __call__(self, played: Played) -> list[float]:
        return [ssim(made, true) for made, true in zip(played.clips, played.truth, strict=True)]


class Sharpness:
    """Gradients of the frames relative to those of the recorded ones: below 1 is blurred, above 1 rough."""

    name, of_truth = "sharpness", False

    def __call__(self, played: Played) -> list[float]:
        pairs = zip(played.clips, played.truth, strict=True)
        return [(gradient(made) + GRADIENT_FLOOR) / (gradient(true) + GRADIENT_FLOOR) for made, true in pairs]


class Perceptual:
    """Learned perceptual distance of a round, the mean of its frames: 0 for equal ones."""

    name, of_truth = "perceptual", False

    def __init__(self, distance: PerceptualDistance) -> None:
        self.distance = distance

    def __call__(self, played: Played) -> list[float]:
        pairs = zip(to_tensor(list(played.clips)), to_tensor(list(played.truth)), strict=True)
        return [float(self.distance(made, true).mean()) for made, true in pairs]


class Judged:
    """Verdict of a judge, given the recorded frame as the truth, on the last frame of a round."""

    name, of_truth = "right", False

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def __call__(self, played: Played) -> list[bool]:
        pairs = zip(played.clips[:, -1], played.truth[:, -1], strict=True)
        return [bool(self.judge(made, true).strict) for made, true in pairs]


def gradient(frames: Frames) -> float:
    """Return the root of the mean squared difference between neighbouring pixels, in grey levels."""
    pixels = frames.astype(np.float32)
    rows, columns = np.diff(pixels, axis=-3), np.diff(pixels, axis=-2)
    return math.sqrt((float(np.square(rows).mean()) + float(np.square(columns).mean())) / 2)
