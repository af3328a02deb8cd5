"""Tone mapping of frames with a high dynamic range (PQ, HLG) to what a usual screen shows.

Reference white (203 cd/m², ITU-R BT.2408) stays below the white of the result, so that highlights up to 1000
cd/m² can be told from it.
"""

import numpy as np

PQ, HLG = 16, 18
HDR_TRANSFERS = (PQ, HLG)
"""Transfer functions of a high dynamic range, by their numbers in ITU-T H.273."""
BT2020 = 9
"""Primaries of ITU-R BT.2020, by the same standard."""
WHITE, PEAK = 203.0, 1000.0
"""Reference white and the brightest highlight that is told apart, in cd/m²."""
KNEE = 0.5
"""Share of the white of the result up to which light is not compressed."""
TO_BT709 = np.array(
    [[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]], np.float32
)
"""From primaries of BT.2020 to those of BT.709 (ITU-R BT.2087)."""
LEVELS = 4096


def _light(transfer: int) -> np.ndarray:
    """Return the light of each level of a channel: of PQ that of the screen, of HLG that of the scene.

    Source: ITU-R BT.2100.
    """
    level = np.linspace(0, 1, LEVELS)
    if transfer == PQ:
        root = level ** (1 / 78.84375)
        share = np.maximum(root - 0.8359375, 0) / (18.8515625 - 18.6875 * root)
        light = share ** (1 / 0.1593017578125) * 10_000 / WHITE
    else:
        a, b, c = 0.17883277, 0.28466892, 0.55991073
        light = np.where(level <= 0.5, level**2 / 3, (np.exp((level - c) / a) + b) / 12)
    return light.astype(np.float32)


_LIGHT = {transfer: _light(transfer) for transfer in HDR_TRANSFERS}
_SHARES = np.linspace(0, 1, LEVELS)
_SRGB = np.where(_SHARES <= 0.0031308, 12.92 * _SHARES, 1.055 * _SHARES ** (1 / 2.4) - 0.055)
_SRGB = np.round(255 * _SRGB).astype(np.uint8)


def tone_mapped(pixels: np.ndarray, transfer: int, primaries: int) -> np.ndarray:
    """Return pixels of PQ or HLG, uint16 `[h, w, 3]`, as sRGB, uint8 `[h, w, 3]`."""
    light = _LIGHT[transfer][pixels >> 4]
    if transfer == HLG:  # a screen of 1000 cd/m² has a gamma of 1.2
        luminance = light @ np.array([0.2627, 0.6780, 0.0593], np.float32)
        light = light * (np.maximum(luminance, 1e-6) ** 0.2 * (PEAK / WHITE))[..., None]
    if primaries == BT2020:
        light = np.maximum(light @ TO_BT709.T, 0)
    brightest = light.max(axis=-1, keepdims=True)
    above, most = np.maximum(brightest - KNEE, 0) / (1 - KNEE), (PEAK / WHITE - KNEE) / (1 - KNEE)
    # Reinhard et al. 2002, equation 4, above the knee: slope 1 there, and 1 for the brightest highlight.
    shown = np.minimum(brightest, KNEE) + (1 - KNEE) * above * (1 + above / most**2) / (1 + above)
    light = np.minimum(light * (shown / np.maximum(brightest, 1e-6)), 1)
    return _SRGB[np.round(light * (LEVELS - 1)).astype(np.int32)]
