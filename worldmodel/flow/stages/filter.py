"""The stage `filter`: scores of a clip, and the verdict by their thresholds."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from worldmodel import media
from worldmodel.errors import ConfigError, InputError
from worldmodel.flow.stages import load_attribute
from worldmodel.flow.stages.base import DROP, Resources, stage
from worldmodel.flow.stages.rows import Row, each_clip, interval
from worldmodel.media import Frames, scores

SCORES = ("motion", "sharpness", "black", "letterbox", "text_area", "aesthetic")
OUTPUTS = pa.schema({name: pa.float64() for name in SCORES})


@stage(
    version="3",
    inputs=["video", "duration_s", "start_s", "end_s"],
    outputs=OUTPUTS.names,
    resources=Resources(cpu=1.0, memory_gb=1.0),
    batch_size=8,
    timeout_s=600.0,
)
class Filter:
    """Scores clips, and drops those outside of the thresholds; a threshold of None judges nothing.

    Args:
        min_s: the shortest length of a clip, in seconds; images have none and are not judged by it.
        max_s: the longest.
        min_motion: see `scores.motion`; images are not judged by it.
        max_motion: content that moves faster is cut or shaken.
        min_sharpness: see `scores.sharpness`.
        max_black: share of black frames.
        max_letterbox: share of the frame that black bars may take.
        max_text_area: share of the frame that text overlays may take.
        scorer: `module:function` that returns a score of frames `[t, h, w, 3]` uint8 as a number, such as
            an aesthetic model; it becomes the column `aesthetic`.
        min_aesthetic: lowest score of the scorer.
        fps: frames per second that are looked at.
        max_frames: frames that are looked at; of longer clips, fewer per second.
        max_side: pixels along the longer side to which they are shrunk.

    Raises:
        ConfigError: a threshold or the scorer is wrong.
    """

    def __init__(
        self,
        *,
        min_s: float | None = None,
        max_s: float | None = None,
        min_motion: float | None = 0.002,
        max_motion: float | None = None,
        min_sharpness: float | None = 0.02,
        max_black: float | None = 0.5,
        max_letterbox: float | None = 0.3,
        max_text_area: float | None = 0.025,
        scorer: str = "",
        min_aesthetic: float | None = None,
        fps: float = 4.0,
        max_frames: int = 32,
        max_side: int = 256,
    ) -> None:
        if not 0 < fps <= 1000 or max_frames < 1 or max_side < 32:
            raise ConfigError(
                f"filter has fps {fps:g}, max_frames {max_frames} and max_side {max_side}; use above 0, 1 or "
                "more and 32 or more."
            )
        if min_aesthetic is not None and not scorer:
            raise ConfigError("filter.min_aesthetic needs a scorer; set filter.scorer to module:function.")
        self.scorer = _scorer(scorer) if scorer else None
        self.length = (min_s, max_s)
        self.bounds: dict[str, tuple[float | None, float | None]] = {
            "motion": (min_motion, max_motion),
            "sharpness": (min_sharpness, None),
            "black": (None, max_black),
            "letterbox": (None, max_letterbox),
            "text_area": (None, max_text_area),
            "aesthetic": (min_aesthetic, None),
        }
        self.fps, self.max_frames, self.max_side = fps, max_frames, max_side

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return each_clip(batch, OUTPUTS, self._row)

    def _row(self, clip: Row) -> Row:
        start, end = interval(clip)
        whole = clip["duration_s"] or 0.0
        if not whole and self.length != (None, None):  # without the stage `probe`, or it is an image
            whole = media.probe(clip["video"], decode=False).duration_s
        length = (whole if end is None else min(end, whole)) - start
        if length > 0 and (reason := _outside("length", length, *self.length)):
            return {DROP: reason}
        times, frames = self._frames(clip["video"], start, end, length)
        grey = scores.to_grey(frames)
        found: dict[str, float | None] = {
            "motion": scores.motion(grey, times),
            "sharpness": scores.sharpness(grey),
            "black": scores.black(grey),
            "letterbox": scores.letterbox(grey),
            "text_area": scores.text_area(grey),
            "aesthetic": None if self.scorer is None else float(self.scorer(frames)),
        }
        reasons = [_outside(name, value, *self.bounds[name]) for name, value in found.items()]
        return {**found, DROP: "; ".join(filter(None, reasons)) or None}

    def _frames(
        self, video: bytes, start: float, end: float | None, length: float
    ) -> tuple[list[float], Frames]:
        """Return times in seconds and frames of a clip, evenly spread."""
        fps = min(self.fps, self.max_frames / max(length, 1e-3))
        sampled = media.sample_frames(video, fps, self.max_side, start, end)
        times, frames = [], []
        for time, frame in islice(sampled, self.max_frames):
            times.append(time)
            frames.append(frame)
        if not frames:
            raise InputError(f"The clip has no frame after {start:g} s.")
        return times, np.stack(frames)


def _outside(name: str, value: float | None, least: float | None, most: float | None) -> str:
    """Return why a score is not accepted, or an empty string."""
    if value is None:
        return ""
    if least is not None and not value >= least:
        return f"{name} {value:.3g} is below {least:g}"
    if most is not None and not value <= most:
        return f"{name} {value:.3g} is above {most:g}"
    return ""


def _scorer(path: str) -> Callable[[Frames], Any]:
    found = load_attribute(path)
    if not callable(found):
        raise ConfigError(f"filter.scorer is {path!r}, which is not a function of frames.")
    return found
