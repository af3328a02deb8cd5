"""The stage `deduplicate`: a fingerprint of what a clip shows.

Copies are found when clips are packed (see `worldmodel.flow.duplicates`), because which of two copies is kept
must not depend on the worker that was faster.
"""

from itertools import islice, pairwise

import numpy as np
import pyarrow as pa
from PIL import Image

from worldmodel import media
from worldmodel.errors import ConfigError, InputError
from worldmodel.flow.duplicates import FINGERPRINT, MAX_DISTANCE, NEAR
from worldmodel.flow.stage import Resources, stage
from worldmodel.flow.stages.rows import Row, each_clip, interval
from worldmodel.media import Frames

OUTPUTS = pa.schema({FINGERPRINT: pa.string()})
NUM_FRAMES, NUM_HASHED = 16, 4
"""Frames that are looked at, and averages of them that are hashed."""
SIDE = 32
"""Pixels along the sides of an image that is hashed."""
COSINES = np.cos(np.pi * np.outer(np.arange(8), np.arange(SIDE) + 0.5) / SIDE)
"""The 8 lowest frequencies of the cosine transform, `[8, 32]`."""


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
        """Return the fingerprints of a batch."""
        return each_clip(batch, OUTPUTS, _row)


def _row(clip: Row) -> Row:
    start, end = interval(clip)
    whole = clip["duration_s"] or media.probe(clip["video"], decode=False).duration_s
    length = max((whole if end is None else min(end, whole)) - start, 1e-3)
    sampled = media.sample_frames(clip["video"], NUM_FRAMES / length, 8 * SIDE, start, end)
    # A file may be much longer than it says; the last time step may give a frame more than are asked for.
    frames = [_shrunk(frame) for _, frame in islice(sampled, 2 * NUM_FRAMES)]
    if not frames:
        raise InputError(f"The clip has no frame after {start:g} s.")
    return {FINGERPRINT: fingerprint(np.stack(frames))}


def fingerprint(frames: np.ndarray) -> str:
    """Return 256 bits as 64 hexadecimal digits; most stay the same when a clip is encoded or scaled again.

    Args:
        frames: brightness `[t, 32, 32]` of a clip's frames.
    """
    edges = np.linspace(0, len(frames), NUM_HASHED + 1)
    # Averages over several frames: copies at other rates have other frames.
    means = [
        frames[int(first) : max(int(first) + 1, int(end))].mean(axis=0) for first, end in pairwise(edges)
    ]
    bits = np.concatenate([_bits(mean) for mean in means])
    return np.packbits(bits).tobytes().hex()


def _bits(image: np.ndarray) -> np.ndarray:
    """Return which of the 64 lowest frequencies of an image are above their median."""
    low = (COSINES @ image @ COSINES.T).ravel()[1:]  # without the mean
    return np.append(low > np.median(low) + 1e-3, False)


def _shrunk(frame: Frames) -> np.ndarray:
    """Return the brightness of a frame `[32, 32]`, each pixel the mean of those it covers."""
    grey = Image.fromarray(frame).convert("L")
    return np.asarray(grey.resize((SIDE, SIDE), Image.Resampling.BOX), dtype=np.float64)
