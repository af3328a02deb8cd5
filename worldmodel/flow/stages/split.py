"""The stage `split`: shots of a video, without the cuts between them."""

import math
from contextlib import suppress

import pyarrow as pa

from worldmodel import media
from worldmodel.actions import ActionKind, action_kinds
from worldmodel.data.columns import ASKED, QUESTION, track_of
from worldmodel.errors import ConfigError, InputError
from worldmodel.flow.catalog.clips import COLUMNS, clip_row
from worldmodel.flow.stages.base import CLIP, DROP, PARENT, Resources, stage
from worldmodel.flow.stages.rows import Row, interval
from worldmodel.flow.stages.shots import Detector, DetectorName, make_detector

OUTPUTS = pa.schema({PARENT: pa.string(), "start_s": pa.float64(), "end_s": pa.float64(), DROP: pa.string()})


@stage(
    version="3",
    inputs=["video", "fps", *COLUMNS],
    outputs=[],  # parts are clips of their own, whose start_s and end_s are their own, too
    resources=Resources(cpu=1.0, memory_gb=1.0),
    batch_size=4,
    timeout_s=600.0,
    expands=True,
    uncounted=["device"],
)
class Split:
    """Divides videos at their cuts; images are dropped.

    Parts have the columns of the whole clip, in which intervals of time count from the start of the part. A
    clip whose texts or actions are one per action is dropped if a part would begin later than it, since the
    length of an action is that of the model which trains; so is one with targets of a camera, which are
    relative to its pose at the start.

    Args:
        detector: content (PySceneDetect's content detector), or transnetv2, a network, which also finds
            dissolves and leaves them out.
        threshold: of content the difference of neighbouring frames in hue, saturation and brightness (0 to
            255) that is a cut, by default 27; of transnetv2 the probability of a transition, by default 0.5.
        min_s: shorter shots are left out.
        max_s: longer shots are divided into equal parts.
        max_side: pixels along the longer side to which frames are shrunk.
        device: where the network runs.

    Raises:
        ConfigError: a length or the detector is wrong, or its package is not installed.
    """

    def __init__(
        self,
        *,
        detector: DetectorName = "content",
        threshold: float | None = None,
        min_s: float = 2.0,
        max_s: float = 20.0,
        max_side: int = 256,
        device: str = "cpu",
    ) -> None:
        if not 0 <= min_s <= max_s or max_s <= 0:
            raise ConfigError(
                f"split has min_s {min_s:g} and max_s {max_s:g}; use 0 or more, and the larger as max_s."
            )
        self.detector = make_detector(detector, threshold, device)
        self.min_s, self.max_s, self.max_side = min_s, max_s, max_side

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = [row for clip in batch.to_pylist() for row in self._rows(clip)]
        return pa.RecordBatch.from_pylist(rows, OUTPUTS)

    def _rows(self, clip: Row) -> list[Row]:
        try:
            shots = find_shots(clip, self.detector, self.max_side)
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


def find_shots(clip: Row, detector: Detector, max_side: int) -> list[tuple[float, float]]:
    """Return start and end in seconds of the shots of a clip.

    Raises:
        InputError: it cannot be decoded.
    """
    start, end = interval(clip)
    frames = media.sample_frames(clip["video"], None, max_side, start, end)
    shots = detector.shots(frames, clip["fps"] or 25.0)
    if not shots:
        raise InputError(f"The clip has no frame after {start:g} s, or is one long transition.")
    first = max(shots[0][0], start)
    return [(max(begin, first), last) for begin, last in shots]


def _undivided(clip: Row) -> str:
    """Return the name of a field of a clip that cannot be divided (see the class), or an empty string."""
    fields: dict[str, ActionKind] = {kind.name: kind for kind in action_kinds()}
    for field, kind in (fields | dict.fromkeys(ASKED, QUESTION)).items():
        with suppress(InputError):  # a column of another meaning, or one that training refuses
            row = clip_row({name: clip.get(name) for name in COLUMNS})
            if not kind.is_divisible(track_of(row.get(field), kind, field)):
                return field
    return ""
