"""The generator adapter: predicted states become what the generator is conditioned on."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor, nn

from worldmodel.config import ConditionConfig
from worldmodel.models.layers.norm import RMSNorm, upcast
from worldmodel.models.layers.resampler import Resampler
from worldmodel.models.layers.spatial import LocalFeedForward, SelfAttention, rope_table


@dataclass(frozen=True)
class Condition:
    """What the generator knows about the clip it makes; which parts there are depends on the adapter."""

    tokens: Float[Tensor, "b n d"]
    """Attended to."""
    pooled: Float[Tensor, "b d"] | None = None
    """Modulates every layer."""
    cells: Float[Tensor, "b m d"] | None = None
    """Added to the latent cell of the same place."""
    forecast: Float[Tensor, "b t c h w"] | None = None
    """The next observation's latents as regressed from the states: where denoising starts from."""
    text: Float[Tensor, "b l e"] | None = None
    """The action's words, read by the generator's own text encoder."""


class Layer(nn.Module):
    """A transformer layer over the cells of one frame, every cell seeing all."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(width), SelfAttention(width, num_heads)
        self.feed_forward_norm, self.feed_forward = RMSNorm(width), LocalFeedForward(width)

    def forward(
        self, x: Float[Tensor, "b n d"], rope: Float[Tensor, "2 n e"], grid: tuple[int, int]
    ) -> Float[Tensor, "b n d"]:
        x = x + self.attention(self.attention_norm(x), rope)[0]
        return x + self.feed_forward(self.feed_forward_norm(x), grid)


class GeneratorAdapter(nn.Module, ABC):
    """Turns states into what the generator is conditioned on."""

    @abstractmethod
    def forward(self, states: Float[Tensor, "b n s"], context: Float[Tensor, "b k c h w"]) -> Condition:
        """Turn states, and the latent frames that the chunk goes on from, into a condition."""

    @abstractmethod
    def null(self, context: Float[Tensor, "b k c h w"]) -> Condition:
        """Return the condition that says nothing."""


class ForecastAdapter(GeneratorAdapter):
    """Reads the states on their grid: a small transformer forecasts latents, a projection makes tokens.

    The backbone is causal and knows places only as a sequence does; here every cell sees all others, at
    their distance in rows and columns, so that things can move. The forecast is a residual to the last seen
    frame. It is trained first, with no generator in the loop ("state alignment"); the generator then only
    adds what a regression cannot say.
    """

    def __init__(
        self,
        config: ConditionConfig,
        state_width: int,
        latent_channels: int,
        chunk_latents: int,
        grid: tuple[int, int],
        width: int,
    ) -> None:
        super().__init__()
        self.grid, self.chunk_latents, self.head_width = grid, chunk_latents, config.width // config.num_heads
        self.norm = RMSNorm(state_width)
        self.from_state = nn.Linear(state_width, config.width)
        self.from_context = nn.Conv2d(latent_channels, config.width, 3, padding=1)
        self.layers = nn.ModuleList(Layer(config.width, config.num_heads) for _ in range(config.num_layers))
        self.last_norm = RMSNorm(config.width)
        self.to_latents = nn.Linear(config.width, chunk_latents * latent_channels)
        self.to_tokens = nn.Linear(state_width, width)
        self.to_cells = nn.Linear(config.width, width)
        self.to_pooled = nn.Linear(state_width, width)
        self.null_token = nn.Parameter(torch.randn(1, width) * 0.02)
        nn.init.zeros_(self.to_latents.weight)

    def forward(self, states: Float[Tensor, "b n s"], context: Float[Tensor, "b k c h w"]) -> Condition:
        """Turn states (one per latent cell) and the last seen latent frame into a condition."""
        states, last = self.norm(states), context[:, -1]
        x = self.from_state(states) + rearrange(self.from_context(last), "b d h w -> b (h w) d")
        rope = rope_table(torch.zeros(1, dtype=torch.long, device=x.device), self.grid, self.head_width)
        for layer in self.layers:
            x = layer(x, rope, self.grid)
        x = self.last_norm(x)
        change = rearrange(
            self.to_latents(x), "b (h w) (t c) -> b t c h w", h=self.grid[0], t=self.chunk_latents
        )
        return Condition(
            tokens=self.to_tokens(states),
            pooled=self.to_pooled(states.mean(dim=1)),
            cells=self.to_cells(x),
            forecast=last[:, None] + upcast(change),
        )

    def null(self, context: Float[Tensor, "b k c h w"]) -> Condition:
        """Return the condition that says nothing: the forecast repeats the last seen frame."""
        tokens = self.null_token.expand(len(context), math.prod(self.grid), -1)
        return Condition(
            tokens=tokens,
            pooled=torch.zeros_like(tokens[:, 0]),
            cells=torch.zeros_like(tokens),
            forecast=repeat(context[:, -1], "b c h w -> b t c h w", t=self.chunk_latents),
        )


class PromptAdapter(GeneratorAdapter):
    """States take the place of a prompt: a Q-Former reads them into the generator's text embedding space.

    Source: Pandora (arXiv:2406.09455), whose adapter ends in the 77 text tokens of its generator; the
    Q-Former is that of BLIP-2 (arXiv:2301.12597).
    """

    def __init__(self, config: ConditionConfig, state_width: int, token_width: int) -> None:
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

    def null(self, context: Float[Tensor, "b k c h w"]) -> Condition:
        """Return the learned tokens of no state; they begin as zeros."""
        return Condition(tokens=self.null_tokens.expand(len(context), -1, -1))


class StreamAdapter(GeneratorAdapter):
    """States keep their number and enter the generator beside its prompt, through attention of their own.

    Source: PAN (arXiv:2511.09057), sec. 3: a linear layer, then an added cross-attention whose output starts
    at zero (in `worldmodel.models.generator.diffusers.state_cross_attention`).
    """

    def __init__(self, state_width: int, token_width: int, num_tokens: int) -> None:
        super().__init__()
        self.norm = RMSNorm(state_width)
        self.project = nn.Linear(state_width, token_width)
        self.null_tokens = nn.Parameter(torch.zeros(num_tokens, token_width))

    def forward(self, states: Float[Tensor, "b n s"], context: Float[Tensor, "b k c h w"]) -> Condition:
        """Return tokens `[b, n, token_width]`."""
        return Condition(tokens=self.project(self.norm(states)))

    def null(self, context: Float[Tensor, "b k c h w"]) -> Condition:
        """Return the learned tokens of no state; they begin as zeros."""
        return Condition(tokens=self.null_tokens.expand(len(context), -1, -1))


def choose(keep: Tensor, first: Condition, second: Condition) -> Condition:
    """Take each sample's condition from `first` where `keep` is True, else from `second`."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(keep.view(-1, *[1] * (a.dim() - 1)), a, b.to(a.dtype))

    return _each(pick, first, second)


def take(condition: Condition, rows: Int[Tensor, " n"]) -> Condition:
    """Take the conditions of some samples."""
    return _each(lambda part: part[rows], condition)


def stack(conditions: Sequence[Condition]) -> Condition:
    """Put conditions into one batch."""
    return _each(lambda *parts: torch.cat(parts), *conditions)


def unstack(batch: Condition) -> list[Condition]:
    """Take a batch apart into conditions of one sample each."""
    return [_each(lambda part, row=row: part[row : row + 1], batch) for row in range(len(batch.tokens))]


def _each(make: Callable[..., Tensor], *conditions: Condition) -> Condition:
    """Make every field of a condition from that field of the given ones; all have the same fields."""
    made = {}
    for field in fields(Condition):
        parts = [getattr(given, field.name) for given in conditions]
        made[field.name] = None if parts[0] is None else make(*parts)
    return Condition(**made)
