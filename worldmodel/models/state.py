"""The state head: hidden states at the query positions become the predicted state.

     hidden states at the queries     context frames
                 │                          │
                 └────────► cells ◄─────────┘      the language model's output, laid out on a grid
                              │ prior ─► code      which of several futures: drawn once, at the input
                     layers over the cells
                              │
        features · forecast of the next latents · reward and end

What happens is decided here; a generator, if there is one, renders it.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.config import StateConfig, WorldModelConfig
from worldmodel.models.code import CodeSampling, StateCode
from worldmodel.models.codec.autoencoder import newest
from worldmodel.models.layers.norm import RMSNorm, upcast
from worldmodel.models.layers.resampler import Resampler
from worldmodel.models.layers.spatial import LocalFeedForward, SelfAttention, rope_table
from worldmodel.models.outcome import OutcomeHead

CHANGED = 0.01
"""Mean squared difference of a latent cell (whose variance is 1) from which it counts as changed.

It is little: what moves by a tenth of a pixel changes a cell no more, and in slow worlds nothing is faster.
"""


@dataclass(frozen=True)
class State:
    """A predicted state. Without a state head it is the hidden states alone."""

    hidden: Float[Tensor, "b n d"]
    """Hidden states of the backbone at the query positions."""
    cells: Float[Tensor, "b m e"] | None = None
    """A feature per cell of the state, in row-major order."""
    forecast: Float[Tensor, "b t c h w"] | None = None
    """Regressed latents of the next observation; with `state.merge`, equal within each cell of the state."""
    code: Float[Tensor, "b v k"] | None = None
    """Which of the possible futures this is, one-hot."""
    log_prior: Float[Tensor, "b v k"] | None = None
    """Log-probability of every value of the code's variables, given the variables before."""

    @property
    def log_probability(self) -> Float[Tensor, " b"] | None:
        """Log-probability of the code, in nats; None without one."""
        if self.code is None or self.log_prior is None:
            return None
        return (self.code * self.log_prior).sum(dim=(1, 2))


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


class QueryGrid(nn.Module):
    """Lays the hidden states of a grid of queries out on the cells of the state.

    A query of several cells has a projection for each of them; of several queries in one cell, the mean of
    their projections counts.
    """

    def __init__(self, hidden_width: int, width: int, split: int, joined: int) -> None:
        """Build with random weights.

        Args:
            hidden_width: Width of the hidden states.
            width: Width of the cells.
            split: Side of the square of cells that share a query.
            joined: Side of the square of queries that share a cell.
        """
        super().__init__()
        self.split, self.joined = split, joined
        self.project = nn.Linear(hidden_width, split**2 * width)

    def forward(self, hidden: Float[Tensor, "b n d"], columns: int) -> Float[Tensor, "b m e"]:
        """Return a feature of every cell, in rows of `columns`."""
        x = rearrange(
            self.project(hidden),
            "b (h w) (p q d) -> b (h p) (w q) d",
            w=columns * self.joined // self.split,
            p=self.split,
            q=self.split,
        )
        side = self.joined
        return rearrange(x, "b (h p) (w q) d -> b (h w) (p q) d", p=side, q=side).mean(dim=2)


class StateHead(nn.Module):
    """A small transformer over the cells of the state.

    The backbone is causal and has positions in a sequence only; here every cell attends to all others with
    rotary positions in rows and columns, so that objects can move. The forecast is a residual to the last
    context frame. It is trained first, before any generator ("state alignment"), for every codec.
    """

    def __init__(
        self,
        config: StateConfig,
        hidden_width: int,
        latent_channels: int,
        chunk_latents: int,
        latent_grid: tuple[int, int],
        query_side: int,
        outcomes: bool,
        context_latents: int,
    ) -> None:
        """Build with random weights.

        Args:
            config: Settings.
            hidden_width: Width of the backbone.
            latent_channels: Channels of a latent cell.
            chunk_latents: Latent frames of a round.
            latent_grid: Rows and columns of latent cells.
            query_side: Side of the square of latent cells that share a query; 0 if queries have no place.
            outcomes: Whether rewards and ends are predicted.
            context_latents: Context frames that are read, the newest ones.
        """
        super().__init__()
        self.merge, self.chunk_latents = config.merge, chunk_latents
        self.stored_grid = self.grid = (latent_grid[0] // config.merge, latent_grid[1] // config.merge)
        self.width, self.head_width = config.width, config.width // config.num_heads
        self.norm = RMSNorm(hidden_width)
        if query_side:
            self.from_state: QueryGrid | Resampler = QueryGrid(
                hidden_width,
                config.width,
                split=max(1, query_side // config.merge),
                joined=max(1, config.merge // query_side),
            )
        else:
            self.from_state = Resampler(
                in_width=hidden_width,
                width=config.width,
                out_width=config.width,
                num_queries=math.prod(self.grid),
                num_layers=1,
                num_heads=config.num_heads,
            )
        self.context_latents = context_latents
        self.from_context = nn.Conv2d(context_latents * latent_channels, config.width, 3, padding=1)
        self.layers = nn.ModuleList(Layer(config.width, config.num_heads) for _ in range(config.num_layers))
        self.last_norm = RMSNorm(config.width)
        self.to_latents = nn.Linear(config.width, chunk_latents * latent_channels)
        # The forecast begins as the last context frame plus a small bias: nearly right wherever nothing
        # moves.
        nn.init.zeros_(self.to_latents.weight)
        self.code: StateCode | None = None
        if config.has_code:
            self.code = StateCode(config, latent_channels, chunk_latents, self.grid, hidden_width)
            self.from_code = nn.ModuleList(nn.Linear(config.width, config.width) for _ in self.layers)
            for layer in self.from_code:
                assert isinstance(layer, nn.Linear)
                nn.init.normal_(layer.weight, std=0.3 * config.width**-0.5)
                nn.init.zeros_(layer.bias)
        self.outcome = OutcomeHead(hidden_width) if outcomes else None

    @classmethod
    def from_config(cls, config: WorldModelConfig, hidden_width: int) -> "StateHead | None":
        """Build the state head of a model; None if it has none."""
        if config.state is None or not config.has_state:
            return None
        return cls(
            config.state,
            hidden_width,
            config.codec.latent_channels,
            config.chunk_latents,
            config.codec.grid,
            0 if config.queries and not config.vision.sees_latents else config.query_merge,
            config.outcomes,
            config.context_latents,
        )

    def resize(self, config: WorldModelConfig) -> None:
        """Predict states of frames of the size of a config."""
        rows, columns = config.codec.grid
        self.grid = rows // self.merge, columns // self.merge

    def forward(
        self,
        hidden: Float[Tensor, "b n d"],
        context: Float[Tensor, "b s c h w"],
        code: Float[Tensor, "b v k"] | None = None,
        draws: Float[Tensor, "b v"] | None = None,
        sampling: CodeSampling | None = None,
    ) -> State:
        """Predict states.

        Args:
            hidden: Hidden states at the queries.
            context: Context frames of the round; a forecast is a change of the last one.
            code: Which future it is; None lets the prior choose.
            draws: Random numbers in [0, 1) with which the prior chooses; None takes the most likely code.
            sampling: Temperature of that choice.
        """
        last = self._coarse(last_frame(context))
        x = self._cells(hidden, context)
        log_prior = vectors = None
        if self.code is not None:
            pooled = self.code.pooled(rearrange(x, "b (h w) d -> b d h w", h=self.grid[0]))
            if code is None:
                code, log_prior = self.code.sample(pooled, draws, sampling or CodeSampling())
            else:
                log_prior = self.code.prior(pooled, code)
            vectors = self._on_cells(self.code.vectors(code))
        # All cells are of one frame, index 0; only rows and columns rotate.
        rope = rope_table(torch.zeros(1, dtype=torch.long, device=x.device), self.grid, self.head_width)
        for index, layer in enumerate(self.layers):
            if vectors is not None:
                x = x + self.from_code[index](vectors)
            x = layer(x, rope, self.grid)
        x = self.last_norm(x)
        change = rearrange(
            self.to_latents(x), "b (h w) (t c) -> b t c h w", h=self.grid[0], t=self.chunk_latents
        )
        # In fp32 or better: small changes added to large latents would be lost in bf16.
        forecast = self._fine(last[:, None] + upcast(change))
        return State(hidden, x, forecast, code if self.code is not None else None, log_prior)

    def draw(
        self,
        hidden: Float[Tensor, "b n d"],
        context: Float[Tensor, "b s c h w"],
        draws: Float[Tensor, "b m v"],
        sampling: CodeSampling,
    ) -> Float[Tensor, "b m v k"]:
        """Draw `m` codes of every state from the prior, without what follows from them."""
        assert self.code is not None, "only a state with a code has a prior"
        x = self._cells(hidden, context)
        pooled = self.code.pooled(rearrange(x, "b (h w) d -> b d h w", h=self.grid[0]))
        pooled = repeat(pooled, "b v e -> (b m) v e", m=draws.shape[1])
        return self.code.sample(pooled, draws.flatten(0, 1), sampling).code.unflatten(0, draws.shape[:2])

    def posterior(
        self, context: Float[Tensor, "b s c h w"], target: Float[Tensor, "b t c h w"]
    ) -> Float[Tensor, "b v k"]:
        """Return log-probabilities of the code, given the next observation."""
        assert self.code is not None, "only a state with a code has a posterior"
        coarse = self._coarse(target.flatten(0, 1)).unflatten(0, target.shape[:2])
        return self.code.posterior(self._coarse(last_frame(context)), coarse)

    def history(self, code: Float[Tensor, "b v k"]) -> Float[Tensor, "b d"]:
        """Return what the vision tokens of the next round get of a code."""
        assert self.code is not None, "only a state with a code has one to remember"
        return self.code.history(code)

    def target(self, latents: Float[Tensor, "b t c h w"]) -> Float[Tensor, "b t c h w"]:
        """Return latents as coarse as a forecast is: their mean within each cell of the state."""
        return self._fine(self._coarse(latents.flatten(0, 1)).unflatten(0, latents.shape[:2]))

    def _cells(
        self, hidden: Float[Tensor, "b n d"], context: Float[Tensor, "b s c h w"]
    ) -> Float[Tensor, "b m e"]:
        """Lay the hidden states out on cells, and add what is there now and how it got there.

        How frames differ is what moves: a layer that saw the frames themselves would have to learn the
        difference first, and actions often change no more than that.
        """
        if not context.shape[1]:
            context = last_frame(context)[:, None]
        frames = newest(context, self.context_latents)
        seen = torch.cat([frames[:, -1:], frames.diff(dim=1)], dim=1)
        seen = self.from_context(self._coarse(rearrange(seen, "b s c h w -> b (s c) h w")))
        hidden = self.norm(hidden)
        if isinstance(self.from_state, QueryGrid):
            cells = self.from_state(hidden, self.grid[1])
        else:
            cells = self.from_state(hidden, (self.stored_grid, self.grid))
        return cells + rearrange(seen, "b d h w -> b (h w) d")

    def _coarse(self, latents: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h2 w2"]:
        return latents if self.merge == 1 else F.avg_pool2d(latents, self.merge)

    def _fine(self, latents: Float[Tensor, "b t c h w"]) -> Float[Tensor, "b t c h2 w2"]:
        if self.merge == 1:
            return latents
        return repeat(latents, "b t c h w -> b t c (h p) (w q)", p=self.merge, q=self.merge)

    def _on_cells(self, vectors: Float[Tensor, "b h w d"]) -> Float[Tensor, "b m d"]:
        """Give every cell the vector of its block."""
        rows, columns = (cells // blocks for cells, blocks in zip(self.grid, vectors.shape[1:3], strict=True))
        return repeat(vectors, "b h w d -> b (h p w q) d", p=rows, q=columns)


def last_frame(context: Float[Tensor, "b s c h w"]) -> Float[Tensor, "b c h w"]:
    """Return the last context frame; zeros where nothing was observed before (a causal codec)."""
    return context[:, -1] if context.shape[1] else context.new_zeros(len(context), *context.shape[2:])
