"""The stage `deduplicate`: a fingerprint of what a clip shows.

Copies are found when clips are packed (see `worldmodel.flow.catalog.duplicates`), because which of two
copies is kept must not depend on the worker that was faster.
"""

from itertools import islice

import numpy as np
import pyarrow as pa

from worldmodel import media
from worldmodel.errors import ConfigError, InputError
from worldmodel.flow.catalog.duplicates import FINGERPRINT, MAX_DISTANCE, NEAR
from worldmodel.flow.stages.base import Resources, stage
from worldmodel.flow.stages.rows import Row, each_clip, interval
from worldmodel.media.fingerprint import SIDE, fingerprint, shrunk

OUTPUTS = pa.schema({FINGERPRINT: pa.string()})
NUM_FRAMES = 16
"""Frames that are looked at."""


@stage(
    version="3",
    inputs=["video", "duration_s", "start_s", "end_s"],
    outputs=OUTPUTS.names,
    resources=Resources(cpu=1.0, memory_gb=1.0),
    batch_size=8,
    timeout_s=600.0,
)
class Deduplicate:
    """Computes fingerprints of clips.

    Clips that show one plain colour have the same fingerprint, whatever the colour is. Copies of which a
    twentieth of each side or more is cut off have other fingerprints.

    Args:
        max_distance: bits of 256 in which the fingerprints of copies may differ; 0: none.

    Raises:
        ConfigError: the distance is out of range.
    """

    def __init__(self, *, max_distance: int = NEAR) -> None:
        if not 0 <= max_distance <= MAX_DISTANCE:
            raise ConfigError(f"deduplicate.max_distance is {max_distance}; use 0 to {MAX_DISTANCE}.")

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return each_clip(batch, OUTPUTS, _row)


def _row(clip: Row) -> Row:
    start, end = interval(clip)
    whole = clip["duration_s"] or media.probe(clip["video"], decode=False).duration_s
    length = max((whole if end is None else min(end, whole)) - start, 1e-3)
    sampled = media.sample_frames(clip["video"], NUM_FRAMES / length, 8 * SIDE, start, end)
    # A file may be much longer than it says; the last time step may give a frame more than are asked for.
    frames = [shrunk(frame) for _, frame in islice(sampled, 2 * NUM_FRAMES)]
    if not frames:
        raise InputError(f"The clip has no frame after {start:g} s.")
    return {FINGERPRINT: fingerprint(np.stack(frames))}
