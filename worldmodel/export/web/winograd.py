"""3x3 convolutions as products of matrices, with a quarter of the multiplications.

ONNX Runtime in WebAssembly multiplies matrices faster than it convolves, and has no fast algorithm for that.

Source: Winograd's minimal filtering, Lavin and Gray 2016 (arXiv:1509.09308).
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

TAPS = 3
LEAST_CHANNELS = 32
"""Channels of the input from which on it saves time."""
POINTS = (0, 1, -1, 2, -2)
"""Where polynomials are evaluated, beside infinity; larger numbers would cost precision."""


def replace_convolutions(model: nn.Module) -> None:
    """Replace the 3x3 convolutions of many channels that keep the size of their input, in place."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Conv2d) and _fits(child):
                setattr(module, name, WinogradConvolution(child))


def _fits(layer: nn.Conv2d) -> bool:
    plain = layer.stride == layer.padding == layer.dilation == (1, 1) and layer.groups == 1
    return plain and layer.kernel_size == (TAPS, TAPS) and layer.in_channels >= LEAST_CHANNELS


class WinogradConvolution(nn.Module):
    """What a 3x3 convolution computes, tile by tile of its output."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d h w"]:
        height, width = x.shape[-2:]
        side = tile_side(height, width)
        read, filtered, write = (
            torch.tensor(each.tolist(), dtype=x.dtype, device=x.device) for each in minimal_filter(side)
        )
        rows, columns = (-(-size // side) for size in (height, width))
        # Windows of neighbouring tiles overlap by two pixels. Channels come last: whole vectors are copied.
        x = rearrange(x, "b c h w -> b h w c")
        x = F.pad(x, (0, 0, 1, columns * side - width + 1, 1, rows * side - height + 1))
        x = x.index_select(1, _windows(rows, side)).index_select(2, _windows(columns, side))
        x = rearrange(x, "b (m i) (n j) c -> i j (b m n) c", m=rows, n=columns)
        x = _along_both(read, x) @ _along_both(filtered, rearrange(self.weight, "d c i j -> i j c d"))
        x = rearrange(_along_both(write, x), "i j (b m n) d -> b d (m i) (n j)", m=rows, n=columns)
        x = x[..., :height, :width]
        return x if self.bias is None else x + self.bias[:, None, None]


def _windows(count: int, side: int) -> Tensor:
    """Return the pixels along one axis that the windows of `count` tiles read."""
    return torch.tensor([tile * side + each for tile in range(count) for each in range(side + TAPS - 1)])


def _along_both(matrix: Float[Tensor, "p i"], x: Float[Tensor, "i j n c"]) -> Float[Tensor, "p q n c"]:
    """Apply a matrix to both axes of tiles."""
    _, columns, *shape = x.shape
    x = (matrix @ x.flatten(1)).unflatten(1, (columns, -1))
    return (matrix @ x).unflatten(2, shape)


def tile_side(height: int, width: int) -> int:
    """Return the side of the output's tiles with the fewest multiplications."""
    sides = range(2, len(POINTS))
    return min(sides, key=lambda side: -(-height // side) * -(-width // side) * (side + TAPS - 1) ** 2)


def minimal_filter(side: int) -> tuple[Any, Any, Any]:
    """Return the matrices B, G and A of `A (B x * G w)`: `side` outputs of a filter of three taps.

    It is the transpose of a product of polynomials, which is found from its values at some points.
    """
    points = np.array(POINTS[: side + TAPS - 2])[:, None]

    def values(degree: int) -> Any:
        """Return what takes the coefficients of a polynomial to its values, the last one at infinity."""
        return np.vstack([points ** np.arange(degree), np.eye(degree)[-1:]])

    return np.linalg.inv(values(side + TAPS - 1)).T, values(TAPS), values(side).T
