"""The stage `split`: shots of a video, without the cuts between them."""

import math
from contextlib import suppress
from itertools import pairwise

import cv2
import pyarrow as pa
from scenedetect import FrameTimecode
from scenedetect.detectors import ContentDetector

from worldmodel import media
from worldmodel.actions import ActionKind, action_kinds
from worldmodel.data.columns import ASKED, QUESTION, track_of
from worldmodel.errors import ConfigError, InputError
from worldmodel.flow.catalog.clips import COLUMNS, clip_row
from worldmodel.flow.stages.base import CLIP, DROP, PARENT, Resources, stage
from worldmodel.flow.stages.rows import Row, interval

OUTPUTS = pa.schema({PARENT: pa.string(), "start_s": pa.float64(), "end_s": pa.float64(), DROP: pa.string()})
MIN_SHOT_S = 0.5
"""Cuts that follow each other faster are flashes."""


@stage(
    version="3",
    inputs=["video", "fps", *COLUMNS],
    outputs=[],  # parts are clips of their own, whose start_s and end_s are their own, too
    resources=Resources(cpu=1.0, memory_gb=1.0),
    batch_size=4,
    timeout_s=600.0,
    expands=True,
)
class Split:
    """Divides videos at their cuts, which PySceneDetect's content detector finds; images are dropped.

    Parts have the columns of the whole clip, in which intervals of time count from the start of the part. A
    clip whose texts or actions are one per action is dropped if a part would begin later than it, since the
    length of an action is that of the model which trains; so is one with targets of a camera, which are
    relative to its pose at the start.

    Args:
        threshold: difference of neighbouring frames in hue, saturation and brightness (0 to 255) that is a
            cut.
        min_s: shorter shots are left out.
        max_s: longer shots are divided into equal parts.
        max_side: pixels along the longer side to which frames are shrunk.

    Raises:
        ConfigError: a length is wrong.
    """

    def __init__(
        self, *, threshold: float = 27.0, min_s: float = 2.0, max_s: float = 20.0, max_side: int = 256
    ) -> None:
        if not 0 <= min_s <= max_s or max_s <= 0:
            raise ConfigError(
                f"split has min_s {min_s:g} and max_s {max_s:g}; use 0 or more, and the larger as max_s."
            )
        self.threshold, self.min_s, self.max_s, self.max_side = threshold, min_s, max_s, max_side

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the parts of the clips of a batch."""
        rows = [row for clip in batch.to_pylist() for row in self._rows(clip)]
        return pa.RecordBatch.from_pylist(rows, OUTPUTS)

    def _rows(self, clip: Row) -> list[Row]:
        try:
            shots = find_shots(clip, self.threshold, self.max_side)
        except InputError as error:
            return [{PARENT: clip[CLIP], DROP: str(error)}]
        parts = [
            (start, end)
            for shot in shots
            for start, end in self._parts(*shot)
            if end - start >= self.min_s - 1e-6
        ]
        begins = interval(clip)[0] + 1 / (clip["fps"] or 25.0)
        if any(start > begins for start, _ in parts) and (name := _undivided(clip)):
            remedy = "give them times, put split before the stage that makes them, or leave it out"
            reason = f"its {name}, per action or relative to its start, cannot be divided; {remedy}"
            return [{PARENT: clip[CLIP], DROP: reason}]
        return [{PARENT: clip[CLIP], "start_s": start, "end_s": end} for start, end in parts]

    def _parts(self, start: float, end: float) -> list[tuple[float, float]]:
        """Divide a shot into equal parts, none longer than `max_s`."""
        count = max(1, math.ceil((end - start) / self.max_s - 1e-6))
        step = (end - start) / count
        return [(start + number * step, start + (number + 1) * step) for number in range(count)]


def find_shots(clip: Row, threshold: float, max_side: int) -> list[tuple[float, float]]:
    """Return start and end in seconds of the shots of a clip.

    Raises:
        InputError: it cannot be decoded.
    """
    fps = clip["fps"] or 25.0
    detector = ContentDetector(threshold, min_scene_len=max(1, round(MIN_SHOT_S * fps)))
    start, end = interval(clip)
    times: list[float] = []
    cuts: list[FrameTimecode] = []
    for time, frame in media.sample_frames(clip["video"], None, max_side, start, end):
        place = FrameTimecode(len(times), fps)  # by number: the times of frames need not be even
        cuts += detector.process_frame(place, cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
        times.append(time)
    if not times:
        raise InputError(f"The clip has no frame after {start:g} s.")
    cuts += detector.post_process(FrameTimecode(len(times) - 1, fps))
    last = times[-1] + 1 / fps if len(times) > 1 else times[-1]
    edges = [max(times[0], start), *sorted({times[cut.frame_num] for cut in cuts if cut.frame_num}), last]
    return list(pairwise(edges))


def _undivided(clip: Row) -> str:
    """Return the name of a field of a clip that cannot be divided (see the class), or an empty string."""
    fields: dict[str, ActionKind] = {kind.name: kind for kind in action_kinds()}
    for field, kind in (fields | dict.fromkeys(ASKED, QUESTION)).items():
        with suppress(InputError):  # a column of another meaning, or one that training refuses
            row = clip_row({name: clip.get(name) for name in COLUMNS})
            if not kind.is_divisible(track_of(row.get(field), kind, field)):
                return field
    return ""
