"""The generator adapter: predicted states become what the generator is conditioned on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.config import ConditionConfig
from worldmodel.models.norm import RMSNorm, widened
from worldmodel.models.spatial import LocalFeedForward, SelfAttention, rope_table


@dataclass(frozen=True)
class Condition:
    """What the generator knows about the clip it makes."""

    tokens: Float[Tensor, "b n d"]
    """Attended to."""
    pooled: Float[Tensor, "b d"]
    """Modulates every layer."""
    cells: Float[Tensor, "b n d"]
    """Added to the latent cell of the same place."""
    forecast: Float[Tensor, "b t c h w"]
    """The next observation's latents as regressed from the states: where denoising starts from."""


class Layer(nn.Module):
    """A transformer layer over the cells of one frame, every cell seeing all."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(width), SelfAttention(width, num_heads)
        self.feed_forward_norm, self.feed_forward = RMSNorm(width), LocalFeedForward(width)

    def forward(
        self, x: Float[Tensor, "b n d"], rope: Float[Tensor, "2 n e"], grid: int
    ) -> Float[Tensor, "b n d"]:
        x = x + self.attention(self.attention_norm(x), rope)[0]
        return x + self.feed_forward(self.feed_forward_norm(x), grid)


class GeneratorAdapter(nn.Module):
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
        grid: int,
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

    def forward(self, states: Float[Tensor, "b n s"], context: Float[Tensor, "b c h w"]) -> Condition:
        """Turn states (one per latent cell) and the last seen latent frame into a condition."""
        states = self.norm(states)
        x = self.from_state(states) + rearrange(self.from_context(context), "b d h w -> b (h w) d")
        rope = rope_table(torch.zeros(1, dtype=torch.long, device=x.device), self.grid, self.head_width)
        for layer in self.layers:
            x = layer(x, rope, self.grid)
        x = self.last_norm(x)
        change = rearrange(
            self.to_latents(x), "b (h w) (t c) -> b t c h w", h=self.grid, t=self.chunk_latents
        )
        return Condition(
            tokens=self.to_tokens(states),
            pooled=self.to_pooled(states.mean(dim=1)),
            cells=self.to_cells(x),
            forecast=context[:, None] + widened(change),
        )

    def null(self, context: Float[Tensor, "b c h w"]) -> Condition:
        """Return the condition that says nothing: the forecast repeats the last seen frame."""
        batch = context.shape[0]
        tokens = self.null_token.expand(batch, self.grid**2, -1)
        return Condition(
            tokens=tokens,
            pooled=torch.zeros_like(tokens[:, 0]),
            cells=torch.zeros_like(tokens),
            forecast=repeat(context, "b c h w -> b t c h w", t=self.chunk_latents),
        )


def choose(keep: Tensor, first: Condition, second: Condition) -> Condition:
    """Take each sample's condition from `first` where `keep` is True, else from `second`."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(keep.view(-1, *[1] * (a.dim() - 1)), a, b.to(a.dtype))

    return _each(pick, first, second)


def stack(conditions: Sequence[Condition]) -> Condition:
    """Put conditions into one batch."""
    return _each(lambda *parts: torch.cat(parts), *conditions)


def unstack(batch: Condition) -> list[Condition]:
    """Take a batch apart into conditions of one sample each."""
    return [_each(lambda part, row=row: part[row : row + 1], batch) for row in range(len(batch.pooled))]


def _each(make: Callable[..., Tensor], *conditions: Condition) -> Condition:
    """Make every field of a condition from that field of the given ones."""
    names = [each.name for each in fields(Condition)]
    return Condition(**{name: make(*(getattr(given, name) for given in conditions)) for name in names})
