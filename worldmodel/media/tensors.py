"""Conversion between uint8 frames and the float tensors of models."""

from collections.abc import Sequence

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, UInt8
from torch import Tensor

from worldmodel.batch import to_device


def to_tensor(clips: Sequence[np.ndarray], device: torch.device | str = "cpu") -> Float[Tensor, "b t 3 h w"]:
    """Stack uint8 clips `[t, h, w, 3]` of equal length and scale them to [-1, 1].

    They are moved to the device as uint8, a quarter of the bytes, and scaled there.
    """
    return to_pixels(to_device(torch.from_numpy(np.stack(clips)), torch.device(device)))


def to_pixels(frames: UInt8[Tensor, "b t h w 3"]) -> Float[Tensor, "b t 3 h w"]:
    """Scale uint8 frames to [-1, 1]."""
    return rearrange(frames, "b t h w c -> b t c h w").float() / 127.5 - 1


def to_frames(pixels: Float[Tensor, "t 3 h w"]) -> np.ndarray:
    """Convert pixels in [-1, 1] to a uint8 clip `[t, h, w, 3]`."""
    frames = ((pixels.detach().float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return rearrange(frames, "t c h w -> t h w c").cpu().numpy()
