"""Layers over latent cells: self-attention with rotary positions, and a feed-forward with local mixing.

The generator and the condition adapter use both. Without them objects dissolve instead of moving, because a
linear layer cannot copy the content of a cell two columns away.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from worldmodel.models.layers.attention import KeyValue, attend_cached
from worldmodel.models.layers.norm import RMSNorm
from worldmodel.parallel.layout import Layout
from worldmodel.parallel.tensor_parallel import Part, keep_inputs, keep_outputs


def rope_table(frames: Int[Tensor, " t"], grid: tuple[int, int], head_width: int) -> Float[Tensor, "2 n d"]:
    """Return cosines and sines of the rotary angles of every (frame, row, column).

    `grid` is rows and columns. A quarter of the head encodes time, the rest the two axes of space.
    """
    share = head_width // 16
    sizes = (4 * share, 6 * share, head_width - 10 * share)
    rows, columns = (torch.arange(count, device=frames.device) for count in grid)
    positions = torch.cartesian_prod(frames, rows, columns).float()
    angles = []
    for position, size in zip(positions.unbind(dim=1), sizes, strict=True):
        frequencies = 100.0 ** (-torch.arange(0, size, 2, device=frames.device) / size)
        angles.append(position[:, None] * frequencies)
    angle = torch.cat(angles, dim=1).repeat(1, 2)
    return torch.stack([angle.cos(), angle.sin()])


def resample(positions: Float[Tensor, "d h w"], grid: tuple[int, int]) -> Float[Tensor, "d h2 w2"]:
    """Return learned positions of the cells of one grid on another, interpolated linearly."""
    before = positions.shape[1], positions.shape[2]
    if grid == before:
        return positions
    rows, columns = (
        F.interpolate(torch.eye(old, device=positions.device)[None], size=new, mode="linear")[0]
        for old, new in zip(before, grid, strict=True)
    )
    # Matrix products: on GPUs the gradient of torch's own interpolation of images is not deterministic.
    return torch.einsum("dhw,hi,wj->dij", positions, rows.to(positions), columns.to(positions))


def resample_rows(
    positions: Float[Tensor, "n d"], before: tuple[int, int], grid: tuple[int, int]
) -> Float[Tensor, "m d"]:
    """As `resample`, for a row per cell of the grid `before`."""
    if grid == before:
        return positions
    placed = rearrange(positions, "(h w) d -> d h w", h=before[0])
    return rearrange(resample(placed, grid), "d h w -> (h w) d")


def rotate(x: Float[Tensor, "b k n d"], table: Float[Tensor, "2 n d"]) -> Float[Tensor, "b k n d"]:
    """Apply rotary position embeddings (Su et al. 2021, arXiv:2104.09864)."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = table.to(x.dtype)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class SelfAttention(nn.Module):
    """Self-attention over cells and optional past keys and values; also returns the new keys and values."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.query_norm = RMSNorm(width // num_heads)
        self.key_norm = RMSNorm(width // num_heads)

    def forward(
        self,
        x: Float[Tensor, "b n d"],
        rope: Float[Tensor, "2 n e"],
        layout: Layout | None = None,
        past: KeyValue | None = None,
    ) -> tuple[Float[Tensor, "b n d"], KeyValue]:
        q, k, v = rearrange(self.qkv(x), "b n (p k d) -> p b k n d", p=3, k=self.num_heads)
        q = rotate(self.query_norm(q), rope).to(v.dtype)
        k = rotate(self.key_norm(k), rope).to(v.dtype)
        out, present = attend_cached(q, k, v, layout, past)
        return self.out(rearrange(out, "b k n d -> b n (k d)")), present

    def divide(self, part: Part) -> None:
        """Keep the heads of a part, in place."""
        self.num_heads = part.share(self.num_heads, "attention heads")
        keep_outputs(self.qkv, part, groups=3)
        keep_inputs(self.out, part)


class LocalFeedForward(nn.Module):
    """A feed-forward with a 3x3 depthwise convolution over each frame."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.local = nn.Conv2d(3 * width, 3 * width, 3, padding=1, groups=3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(
        self, x: Float[Tensor, "b n d"], grid: tuple[int, int], layout: Layout | None = None
    ) -> Float[Tensor, "b n d"]:
        """Mix the cells of frames with `grid` rows and columns; `layout` divides them over processes."""
        y = self.up(x)
        if layout is not None and layout.shards is not None:
            return self.down(F.silu(layout.halo(grid, x.device).convolve(self.local, y)))
        rows, columns = grid
        y = rearrange(y, "b (t h w) d -> (b t) d h w", h=rows, w=columns)
        return self.down(rearrange(F.silu(self.local(y)), "(b t) d h w -> b (t h w) d", b=x.shape[0]))

    def divide(self, part: Part) -> None:
        """Keep the hidden channels of a part, in place."""
        keep_outputs(self.up, part)
        keep_outputs(self.local, part)
        keep_inputs(self.down, part)
