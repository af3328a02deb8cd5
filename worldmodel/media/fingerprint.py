"""Fingerprints of what a clip shows."""

from itertools import pairwise

import numpy as np
from PIL import Image

from worldmodel.media.image import Frame

NUM_HASHED = 4
"""Averages of frames that are hashed."""
SIDE = 32
"""Pixels along the sides of an image that is hashed."""
COSINES = np.cos(np.pi * np.outer(np.arange(8), np.arange(SIDE) + 0.5) / SIDE)
"""The 8 lowest frequencies of the cosine transform, `[8, 32]`."""


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


def shrunk(frame: Frame) -> np.ndarray:
    """Return the brightness of a frame `[32, 32]`, each pixel the mean of those it covers."""
    grey = Image.fromarray(frame).convert("L")
    return np.asarray(grey.resize((SIDE, SIDE), Image.Resampling.BOX), dtype=np.float64)
