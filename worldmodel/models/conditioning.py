"""Condition adapters: each translates the predicted state for one kind of video generator."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.batch import map_tensors
from worldmodel.config import ConditionAdapterConfig, WorldModelConfig
from worldmodel.models.layers.norm import RMSNorm
from worldmodel.models.layers.resampler import Resampler
from worldmodel.models.layers.spatial import resample_rows
from worldmodel.models.state import State, StateHead, last_frame

CELL_CHANNELS = 8
"""Channels per latent cell and frame for the features of a state's cells, in generators of diffusers."""


@dataclass(frozen=True)
class Condition:
    """The inputs of the video generator besides noisy latents; an adapter fills the fields that it makes.

    Without a generator there is the forecast alone.
    """

    tokens: Float[Tensor, "b n d"] | None = None
    """Tokens for cross-attention."""
    pooled: Float[Tensor, "b d"] | None = None
    """Modulates every layer."""
    cells: Float[Tensor, "b m f"] | None = None
    """Features of the latent cells, in row-major order."""
    forecast: Float[Tensor, "b t c h w"] | None = None
    """The next observation's latents, regressed by the state head; zeros where there is no state, for
    generators of diffusers."""
    text: Float[Tensor, "b l e"] | None = None
    """The action's text, embedded by the generator's own text encoder."""


@dataclass(frozen=True)
class Codes:
    """Codes of the rounds of a batch of episodes, in training."""

    code: Float[Tensor, "b r v k"]
    before: Float[Tensor, "b v k"] | None = None
    """Code of the round before the first one; None if that was an observation without one."""

    def following(self) -> Float[Tensor, "b r v k"]:
        """Return the code that led to what each round observes; zeros, which say nothing, where none did."""
        first = torch.zeros_like(self.code[:, 0]) if self.before is None else self.before
        return torch.cat([first[:, None], self.code[:, :-1]], dim=1)

    def rounds(self, first: int, end: int) -> "Codes":
        """Return the codes of some rounds."""
        return Codes(self.code[:, first:end], self.code[:, first - 1] if first else self.before)


@dataclass(frozen=True)
class Prediction:
    """Teacher-forced prediction of every round of a batch of episodes."""

    hidden: Float[Tensor, "b r n d"]
    context: Float[Tensor, "b r s c h w"]
    state: State
    """Batch axis is `b * r`, rounds fastest."""
    condition: Condition
    """Batch axis is `b * r`, rounds fastest."""


class ConditionAdapter(nn.Module, ABC):
    """Maps predicted states to the generator's condition."""

    reads_text: ClassVar[bool] = False
    """Whether it reads the hidden states of the action's text, in place of a predicted state."""
    """The tokens of no state; they begin as zeros."""

    @abstractmethod
    def forward(self, state: State, context: Float[Tensor, "b k c h w"]) -> Condition:
        """Map a state, and the context frames of the chunk, to a condition."""

    @abstractmethod
    def null(self, context: Float[Tensor, "b k c h w"]) -> Condition:
        """Return the unconditional condition, for guidance and condition dropout."""

    def resize(self, config: WorldModelConfig) -> None:
        """Make conditions for frames of the size of a config."""


class NoAdapter(ConditionAdapter):
    """Takes the place of the adapter in a model without a generator: the forecast is shown as it is."""

    def __init__(self, chunk_latents: int) -> None:
        super().__init__()
        self.chunk_latents = chunk_latents

    def forward(self, state: State, context: Float[Tensor, "b k c h w"]) -> Condition:
        """Return the forecast."""
        return Condition(forecast=state.forecast)

    def null(self, context: Float[Tensor, "b k c h w"]) -> Condition:
        """Return a forecast that nothing changes."""
        return Condition(forecast=unchanged(context, self.chunk_latents))


class GridAdapter(ConditionAdapter):
    """Linear layers, for our own generator: a token per query, a feature per latent cell, and a vector."""

    def __init__(self, hidden_width: int, width: int, num_tokens: int, head: StateHead) -> None:
        super().__init__()
        self.grid, self.merge, self.num_tokens = head.grid, head.merge, num_tokens
        self.chunk_latents = head.chunk_latents
        self.norm = RMSNorm(hidden_width)
        self.to_tokens = nn.Linear(hidden_width, width)
        self.to_cells = nn.Linear(head.width, width)
        self.to_pooled = nn.Linear(hidden_width, width)
        self.null_token = nn.Parameter(torch.randn(1, width) * 0.02)

    def resize(self, config: WorldModelConfig) -> None:
        rows, columns = config.codec.grid
        self.grid, self.num_tokens = (rows // self.merge, columns // self.merge), config.num_queries

    def forward(self, state: State, context: Float[Tensor, "b k c h w"]) -> Condition:
        """Map a state to a condition."""
        assert state.cells is not None, "checked by the config"
        hidden = self.norm(state.hidden)
        cells = rearrange(self.to_cells(state.cells), "b (h w) d -> b h w d", h=self.grid[0])
        return Condition(
            tokens=self.to_tokens(hidden),
            pooled=self.to_pooled(hidden.mean(dim=1)),
            cells=repeat(cells, "b h w d -> b (h p w q) d", p=self.merge, q=self.merge),
            forecast=state.forecast,
        )

    def null(self, context: Float[Tensor, "b k c h w"]) -> Condition:
        """Return the unconditional condition, whose forecast repeats the last context frame."""
        tokens = self.null_token.expand(len(context), self.num_tokens, -1)
        # Zeros add nothing to features and modulation; the tokens alone are learned, since attention needs
        # some.
        zeros = torch.zeros_like(tokens[:, 0])
        cells = math.prod(self.grid) * self.merge**2
        return Condition(
            tokens=tokens,
            pooled=zeros,
            cells=repeat(zeros, "b d -> b n d", n=cells),
            forecast=unchanged(context, self.chunk_latents),
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

    def resize(self, config: WorldModelConfig) -> None:
        self.cells = config.codec.cells

    def forward(self, state: State, context: Float[Tensor, "b k c h w"]) -> Condition:
        """Map hidden states of `num_tokens` positions, zeros after the end of a text, to a condition."""
        states = self.norm(state.hidden)
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


class PlacedAdapter(ConditionAdapter):
    """What the adapters for generators of diffusers share: a state also enters on its own cells.

    The generator reads the forecast, and a linear function of the cells' features, as channels of the latent
    cells that they are about (`generator.diffusers.state_channels`). Without a state head there are tokens
    alone.
    """

    null_tokens: nn.Parameter
    """The tokens of no state; they begin as zeros."""

    def __init__(self, head: StateHead | None) -> None:
        super().__init__()
        self.merge, self.shape = 1, (0, 0, 0)
        if head is not None:
            self.merge, self.shape = head.merge, (head.chunk_latents, *head.grid)
            self.to_cells = nn.Linear(head.width, head.chunk_latents * CELL_CHANNELS)

    def resize(self, config: WorldModelConfig) -> None:
        if self.shape[0]:
            rows, columns = config.codec.grid
            self.shape = self.shape[0], rows // self.merge, columns // self.merge

    def no_state(self) -> Float[Tensor, "n d"]:
        """Return the learned tokens of no state."""
        return self.null_tokens

    def placed(self, tokens: Float[Tensor, "b n d"], state: State) -> Condition:
        """Return the condition of tokens and a state."""
        if state.cells is None:
            return Condition(tokens=tokens)
        cells = rearrange(self.to_cells(state.cells), "b (h w) d -> b h w d", h=self.shape[1])
        cells = repeat(cells, "b h w d -> b (h p w q) d", p=self.merge, q=self.merge)
        return Condition(tokens=tokens, cells=cells, forecast=state.forecast)

    def null(self, context: Float[Tensor, "b k c h w"]) -> Condition:
        """Return learned tokens, and zeros on the cells: no forecast, and not one of no change."""
        tokens = self.no_state().expand(len(context), -1, -1)
        frames, rows, columns = self.shape
        if not frames:
            return Condition(tokens=tokens)
        count = rows * columns * self.merge**2
        return Condition(
            tokens=tokens,
            cells=tokens.new_zeros(len(context), count, frames * CELL_CHANNELS),
            forecast=context.new_zeros(len(context), frames, *context.shape[2:]),
        )


class PromptAdapter(PlacedAdapter):
    """A Q-Former maps states to the generator's text embedding space, in place of a prompt.

    Source: Pandora (arXiv:2406.09455), whose adapter ends in the 77 text tokens of its generator; the
    Q-Former is BLIP-2's (arXiv:2301.12597).
    """

    def __init__(
        self, config: ConditionAdapterConfig, hidden_width: int, token_width: int, head: StateHead | None
    ) -> None:
        super().__init__(head)
        self.norm = RMSNorm(hidden_width)
        self.resampler = Resampler(
            in_width=hidden_width,
            width=config.width,
            out_width=token_width,
            num_queries=config.num_tokens,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
        )
        self.null_tokens = nn.Parameter(torch.zeros(config.num_tokens, token_width))

    def forward(self, state: State, context: Float[Tensor, "b k c h w"]) -> Condition:
        """Return tokens `[b, num_tokens, token_width]`, and the state on its cells."""
        return self.placed(self.resampler(self.norm(state.hidden)), state)


class StreamAdapter(PlacedAdapter):
    """A linear layer; states enter the generator beside its prompt, through an added cross-attention.

    Source: PAN (arXiv:2511.09057), sec. 3: a linear layer, then an added cross-attention whose output starts
    at zero (`generator.diffusers.state_cross_attention`).
    """

    def __init__(
        self, hidden_width: int, token_width: int, config: WorldModelConfig, head: StateHead | None
    ) -> None:
        super().__init__(head)
        self.norm = RMSNorm(hidden_width)
        self.project = nn.Linear(hidden_width, token_width)
        self.null_tokens = nn.Parameter(torch.zeros(config.num_queries, token_width))
        self.grids = (config.query_grid, config.query_grid)
        """Rows and columns of queries for which the learned tokens are stored, and of those of a round."""

    def resize(self, config: WorldModelConfig) -> None:
        super().resize(config)
        if not config.queries:  # else there are equally many for frames of any size
            self.grids = self.grids[0], config.query_grid

    def no_state(self) -> Float[Tensor, "n d"]:
        return resample_rows(self.null_tokens, *self.grids)

    def forward(self, state: State, context: Float[Tensor, "b k c h w"]) -> Condition:
        """Return tokens `[b, n, token_width]`, and the state on its cells."""
        return self.placed(self.project(self.norm(state.hidden)), state)


def unchanged(context: Float[Tensor, "b k c h w"], chunk_latents: int) -> Float[Tensor, "b t c h w"]:
    """Return the forecast that nothing happens: the last context frame, repeated."""
    return repeat(last_frame(context), "b c h w -> b t c h w", t=chunk_latents)


def choose(keep: Tensor, first: Condition, second: Condition) -> Condition:
    """Take each sample's condition from `first` where `keep` is True, else from `second`."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(keep.view(-1, *[1] * (a.dim() - 1)), a, b.to(a.dtype))

    return map_tensors(pick, first, second)
