"""The condition adapter: predicted states become the condition of the video generator."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.batch import map_tensors
from worldmodel.config import ConditionAdapterConfig
from worldmodel.models.layers.norm import RMSNorm, upcast
from worldmodel.models.layers.resampler import Resampler
from worldmodel.models.layers.spatial import LocalFeedForward, SelfAttention, rope_table


@dataclass(frozen=True)
class Condition:
    """The inputs of the video generator besides noisy latents; an adapter fills the fields that it makes.

    Without a generator there is the forecast alone.
    """

    tokens: Float[Tensor, "b n d"] | None = None
    """Tokens for cross-attention."""
    pooled: Float[Tensor, "b d"] | None = None
    """Modulates every layer."""
    cells: Float[Tensor, "b m d"] | None = None
    """Added to the features of the latent cells, in row-major order."""
    forecast: Float[Tensor, "b t c h w"] | None = None
    """The next observation's latents, regressed from the states."""
    text: Float[Tensor, "b l e"] | None = None
    """The action's text, embedded by the generator's own text encoder."""


@dataclass(frozen=True)
class Prediction:
    """Teacher-forced prediction of every round of a batch of episodes."""

    states: Float[Tensor, "b r n d"]
    context: Float[Tensor, "b r s c h w"]
    condition: Condition
    """Batch axis is `b * r`, rounds fastest."""


class Layer(nn.Module):
    """A transformer layer with full attention over the cells of one frame."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(width), SelfAttention(width, num_heads)
        self.feed_forward_norm, self.feed_forward = RMSNorm(width), LocalFeedForward(width)

    def forward(
        self, x: Float[Tensor, "b n d"], rope: Float[Tensor, "2 n e"], grid: tuple[int, int]
    ) -> Float[Tensor, "b n d"]:
        x = x + self.attention(self.attention_norm(x), rope)[0]
        return x + self.feed_forward(self.feed_forward_norm(x), grid)


class ConditionAdapter(nn.Module, ABC):
    """Maps states to the generator's condition."""

    reads_text: ClassVar[bool] = False
    """Whether the states are those of the action's text alone."""
    null_tokens: nn.Parameter
    """The tokens of no state; they begin as zeros."""

    @abstractmethod
    def forward(self, states: Float[Tensor, "b n s"], context: Float[Tensor, "b k c h w"]) -> Condition:
        """Map states, and the context frames of the chunk, to a condition."""

    def null(self, context: Float[Tensor, "b k c h w"]) -> Condition:
        """Return the unconditional condition, for guidance and condition dropout: here, learned tokens."""
        return Condition(tokens=self.null_tokens.expand(len(context), -1, -1))


class GridAdapter(ConditionAdapter):
    """A small transformer over the grid of states makes a feature per cell and forecasts latents.

    The backbone is causal and has positions in a sequence only; here every cell attends to all others with
    rotary positions in rows and columns, so that objects can move. The forecast is a residual to the last
    context frame. It is trained first, without the generator ("state alignment"); the generator then
    predicts a correction to it, or (`forecast: none`) is not given it. A state is of one cell, or of a square
    of `query_merge` x `query_merge` cells, each of which gets a projection of its own.
    """

    heads = ("to_tokens", "to_cells", "to_pooled", "null_token")
    """Parts that only a generator reads; without one there are none of them."""

    def __init__(
        self,
        config: ConditionAdapterConfig,
        state_width: int,
        latent_channels: int,
        chunk_latents: int,
        grid: tuple[int, int],
        width: int,
        query_merge: int = 1,
    ) -> None:
        super().__init__()
        self.grid, self.chunk_latents, self.head_width = grid, chunk_latents, config.width // config.num_heads
        self.query_merge = query_merge
        self.norm = RMSNorm(state_width)
        self.from_state = nn.Linear(state_width, query_merge**2 * config.width)
        self.from_context = nn.Conv2d(latent_channels, config.width, 3, padding=1)
        self.layers = nn.ModuleList(Layer(config.width, config.num_heads) for _ in range(config.num_layers))
        self.last_norm = RMSNorm(config.width)
        self.to_latents = nn.Linear(config.width, chunk_latents * latent_channels)
        nn.init.zeros_(self.to_latents.weight)
        self.has_heads = width > 0
        if self.has_heads:
            self.to_tokens = nn.Linear(state_width, width)
            self.to_cells = nn.Linear(config.width, width)
            self.to_pooled = nn.Linear(state_width, width)
            self.null_token = nn.Parameter(torch.randn(1, width) * 0.02)

    def forward(self, states: Float[Tensor, "b n s"], context: Float[Tensor, "b k c h w"]) -> Condition:
        """Map states and the last context frame to a condition."""
        states, last = self.norm(states), context[:, -1]
        side, columns = self.query_merge, self.grid[1] // self.query_merge
        divided = rearrange(
            self.from_state(states), "b (h w) (p q d) -> b (h p w q) d", w=columns, p=side, q=side
        )
        x = divided + rearrange(self.from_context(last), "b d h w -> b (h w) d")
        rope = rope_table(torch.zeros(1, dtype=torch.long, device=x.device), self.grid, self.head_width)
        for layer in self.layers:
            x = layer(x, rope, self.grid)
        x = self.last_norm(x)
        change = rearrange(
            self.to_latents(x), "b (h w) (t c) -> b t c h w", h=self.grid[0], t=self.chunk_latents
        )
        forecast = last[:, None] + upcast(change)
        if not self.has_heads:
            return Condition(forecast=forecast)
        return Condition(
            tokens=self.to_tokens(states),
            pooled=self.to_pooled(states.mean(dim=1)),
            cells=self.to_cells(x),
            forecast=forecast,
        )

    def null(self, context: Float[Tensor, "b k c h w"]) -> Condition:
        """Return the unconditional condition, whose forecast repeats the last context frame."""
        forecast = repeat(context[:, -1], "b c h w -> b t c h w", t=self.chunk_latents)
        if not self.has_heads:
            return Condition(forecast=forecast)
        cells = math.prod(self.grid)
        tokens = self.null_token.expand(len(context), cells // self.query_merge**2, -1)
        zeros = torch.zeros_like(tokens[:, 0])
        return Condition(
            tokens=tokens, pooled=zeros, cells=repeat(zeros, "b d -> b n d", n=cells), forecast=forecast
        )


class TextAdapter(ConditionAdapter):
    """Maps the hidden states of a text to the generator's condition: text to image, text to video.

    No predicted states take part. So a generator is trained before it meets them, and a description that the
    language model wrote of what happens next can be rendered (text states).
    """

    reads_text = True

    def __init__(self, text_width: int, width: int, num_tokens: int, cells: int) -> None:
        super().__init__()
        self.num_tokens, self.cells = num_tokens, cells
        self.norm = RMSNorm(text_width)
        self.to_tokens = nn.Linear(text_width, width)
        self.to_pooled = nn.Linear(text_width, width)
        self.null_tokens = nn.Parameter(torch.randn(1, width) * 0.02)

    def forward(self, states: Float[Tensor, "b n s"], context: Float[Tensor, "b k c h w"]) -> Condition:
        """Map the states of `num_tokens` positions, zeros after the end of a text, to a condition."""
        states = self.norm(states)
        written = (states != 0).any(dim=2, keepdim=True)
        mean = states.sum(dim=1) / written.sum(dim=1).clamp(min=1)
        tokens = torch.where(written, self.to_tokens(states), self.null_tokens)
        return self._condition(tokens, self.to_pooled(mean))

    def null(self, context: Float[Tensor, "b k c h w"]) -> Condition:
        """Return the unconditional condition."""
        tokens = self.null_tokens.expand(len(context), self.num_tokens, -1)
        return self._condition(tokens, torch.zeros_like(tokens[:, 0]))

    def _condition(self, tokens: Float[Tensor, "b n d"], pooled: Float[Tensor, "b d"]) -> Condition:
        cells = repeat(torch.zeros_like(pooled), "b d -> b m d", m=self.cells)
        return Condition(tokens=tokens, pooled=pooled, cells=cells)


class PromptAdapter(ConditionAdapter):
    """A Q-Former maps states to the generator's text embedding space, in place of a prompt.

    Source: Pandora (arXiv:2406.09455), whose adapter ends in the 77 text tokens of its generator; the
    Q-Former is that of BLIP-2 (arXiv:2301.12597).
    """

    def __init__(self, config: ConditionAdapterConfig, state_width: int, token_width: int) -> None:
        super().__init__()
        self.norm = RMSNorm(state_width)
        self.resampler = Resampler(
            in_width=state_width,
            width=config.width,
            out_width=token_width,
            num_queries=config.num_tokens,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
        )
        self.null_tokens = nn.Parameter(torch.zeros(config.num_tokens, token_width))

    def forward(self, states: Float[Tensor, "b n s"], context: Float[Tensor, "b k c h w"]) -> Condition:
        """Return tokens `[b, num_tokens, token_width]`."""
        return Condition(tokens=self.resampler(self.norm(states)))


class StreamAdapter(ConditionAdapter):
    """A linear layer; states enter the generator beside its prompt, through an added cross-attention.

    Source: PAN (arXiv:2511.09057), sec. 3: a linear layer, then an added cross-attention whose output starts
    at zero (`generator.diffusers.state_cross_attention`).
    """

    def __init__(self, state_width: int, token_width: int, num_tokens: int) -> None:
        super().__init__()
        self.norm = RMSNorm(state_width)
        self.project = nn.Linear(state_width, token_width)
        self.null_tokens = nn.Parameter(torch.zeros(num_tokens, token_width))

    def forward(self, states: Float[Tensor, "b n s"], context: Float[Tensor, "b k c h w"]) -> Condition:
        """Return tokens `[b, n, token_width]`."""
        return Condition(tokens=self.project(self.norm(states)))


def choose(keep: Tensor, first: Condition, second: Condition) -> Condition:
    """Take each sample's condition from `first` where `keep` is True, else from `second`."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(keep.view(-1, *[1] * (a.dim() - 1)), a, b.to(a.dtype))

    return map_tensors(pick, first, second)
