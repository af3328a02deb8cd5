"""The resampler: learned queries that compress any number of tokens into a fixed number.

Source: Jaegle et al. 2021 (Perceiver, arXiv:2103.03206); Li et al. 2023 (the Q-Former of BLIP-2,
arXiv:2301.12597). Every layer attends to the inputs, as in the Perceiver; in the Q-Former every second does.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.errors import ConfigError
from worldmodel.models.layers.attention import attend
from worldmodel.models.layers.norm import RMSNorm
from worldmodel.models.layers.spatial import resample_rows

Grids = tuple[tuple[int, int], tuple[int, int]]
"""Rows and columns of two grids of cells."""


class Attention(nn.Module):
    """Unmasked cross-attention with normalised queries and keys."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.query_norm = RMSNorm(width // num_heads)
        self.key_norm = RMSNorm(width // num_heads)

    def forward(self, x: Float[Tensor, "b n d"], tokens: Float[Tensor, "b m d"]) -> Float[Tensor, "b n d"]:
        q = rearrange(self.query(x), "b n (k d) -> b k n d", k=self.num_heads)
        k, v = rearrange(self.key_value(tokens), "b n (p k d) -> p b k n d", p=2, k=self.num_heads)
        mixed = attend(self.query_norm(q).to(v.dtype), self.key_norm(k).to(v.dtype), v)
        return self.out(rearrange(mixed, "b k n d -> b n (k d)"))


class Layer(nn.Module):
    """Cross-attention to the inputs, self-attention of the queries, and a feed-forward."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.read_norm, self.read = RMSNorm(width), Attention(width, num_heads)
        self.attention_norm, self.attention = RMSNorm(width), Attention(width, num_heads)
        self.feed_forward_norm = RMSNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Float[Tensor, "b n d"], inputs: Float[Tensor, "b m d"]) -> Float[Tensor, "b n d"]:
        x = x + self.read(self.read_norm(x), inputs)
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed)
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


class Resampler(nn.Module):
    """Compresses `m` tokens of one width into `num_queries` tokens of another.

    It has no position embeddings: inputs must contain their own.
    """

    def __init__(
        self,
        in_width: int,
        width: int,
        out_width: int,
        num_queries: int,
        num_layers: int,
        num_heads: int,
    ) -> None:
        """Build with random weights.

        Raises:
            ConfigError: the heads do not divide the width.
        """
        super().__init__()
        if width % num_heads:
            raise ConfigError(
                f"A resampler of width {width} cannot have {num_heads} heads; use a divisor of its width."
            )
        self.queries = nn.Parameter(torch.randn(num_queries, width) * width**-0.5)
        self.from_input, self.input_norm = nn.Linear(in_width, width), RMSNorm(width)
        self.layers = nn.ModuleList(Layer(width, num_heads) for _ in range(num_layers))
        self.last_norm, self.to_output = RMSNorm(width), nn.Linear(width, out_width)

    def forward(self, inputs: Float[Tensor, "b m e"], grids: Grids | None = None) -> Float[Tensor, "b n d"]:
        """Return `num_queries` tokens; with grids, whose first they are of, one per cell of the second."""
        keys = self.input_norm(self.from_input(inputs))
        queries = self.queries if grids is None else resample_rows(self.queries, *grids)
        x = queries.to(keys.dtype).expand(inputs.shape[0], -1, -1)
        for layer in self.layers:
            x = layer(x, keys)
        return self.to_output(self.last_norm(x))
