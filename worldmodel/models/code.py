"""The code of a predicted state: categorical variables that choose between possible futures.

In training a posterior that sees the next observation says which future it was; the prior, which has the
predicted state alone, learns to foresee that choice. In a rollout the prior is sampled. Where one future is
certain, the code says nothing and costs nothing.

Source: discrete latents of world models with straight-through gradients (Hafner et al. 2021, DreamerV2,
arXiv:2010.02193); the prior is autoregressive over the variables, as a language model is over its tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from worldmodel.config import StateConfig
from worldmodel.models.layers.norm import upcast
from worldmodel.models.layers.spatial import resample

WIDTH, HIDDEN = 128, 256
"""Channels over cells, and width of a block's summary."""
NUM_POOLS = 4
"""Weighted means over the cells of a block; what decides can be a single object in it."""
UNIFORM = 0.01
"""Share of the uniform distribution in the posterior, so that no value of the code is ever unreachable."""


@dataclass(frozen=True)
class CodeSampling:
    """How codes are drawn from the prior, as language models draw tokens."""

    temperature: float = 1.0
    """0 takes the most likely value of every variable."""
    top_k: int = 0
    """Only so many of the most likely values are drawn; 0 is all."""


class Drawn(NamedTuple):
    """Codes and their log-probabilities under the prior."""

    code: Float[Tensor, "b n c"]
    log_prior: Float[Tensor, "b n c"]


class BlockPool(nn.Module):
    """Summarises a grid of cells, one vector per block: convolutions, then attention pooling."""

    def __init__(self, channels: int, grid: tuple[int, int], side: int) -> None:
        """Build with random weights, for square blocks of a side in cells; 0 makes one block of all cells."""
        super().__init__()
        self.side = side
        self.stem = nn.Conv2d(channels, WIDTH, 3, padding=1)
        # Where something lies decides, too, and the pooling below forgets it.
        self.position = nn.Parameter(torch.randn(WIDTH, *grid) * 0.02)
        self.first = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.second = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.scores, self.values = nn.Linear(WIDTH, NUM_POOLS), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear((NUM_POOLS + 1) * WIDTH, HIDDEN)

    def forward(self, cells: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n e"]:
        """Return a vector per block, blocks in row-major order."""
        grid = cells.shape[2], cells.shape[3]
        x = self.stem(cells) + resample(self.position, grid)
        x = x + self.second(F.silu(self.first(F.silu(x))))
        rows, columns = (self.side, self.side) if self.side else grid
        x = rearrange(F.silu(x), "b d (h p) (w q) -> b (h w) (p q) d", p=rows, q=columns)
        weights = upcast(self.scores(x)).softmax(dim=2)
        pooled = torch.einsum("bnmk,bnmd->bnkd", weights.to(x), self.values(x))
        return F.silu(self.out(torch.cat([pooled.flatten(2), x.amax(dim=2)], dim=2)))


class StateCode(nn.Module):
    """Posterior, prior and embedding of a code.

    A code is one-hot, `[b, n, classes]`: the variables of the first block in order, then those of the next
    block. Each is drawn given those before it.
    """

    def __init__(
        self,
        config: StateConfig,
        latent_channels: int,
        chunk_latents: int,
        grid: tuple[int, int],
        hidden_width: int,
    ) -> None:
        """Build with random weights; `grid` is rows and columns of cells of the state."""
        super().__init__()
        self.groups, self.classes = config.code_groups, config.code_classes
        side = config.code_block
        self.block_grid = (grid[0] // side, grid[1] // side) if side else (1, 1)
        self.length = self.groups * self.block_grid[0] * self.block_grid[1]
        # The posterior sees the last context frame, and what changes in each frame after it.
        seen = (1 + chunk_latents) * latent_channels
        self.posterior_pool = BlockPool(seen, grid, side)
        self.posterior_out = nn.Linear(HIDDEN, self.groups * self.classes)
        self.prior_pool = BlockPool(config.width, grid, side)
        self.prior_embedding = nn.Parameter(torch.randn(self.length, self.classes, HIDDEN) * 0.3)
        self.prior_place = nn.Parameter(torch.randn(self.length, HIDDEN) * 0.1)
        self.prior_hidden = nn.Linear(HIDDEN, HIDDEN)
        self.prior_out = nn.Parameter(torch.zeros(self.length, HIDDEN, self.classes))
        self.prior_bias = nn.Parameter(torch.zeros(self.length, self.classes))
        scale = self.length**-0.5
        self.embedding = nn.Parameter(torch.randn(self.length, self.classes, config.width) * scale)
        # Added to the vision tokens of the next round; at first it adds nothing.
        self.to_history = nn.Linear(config.width, hidden_width, bias=False)
        nn.init.zeros_(self.to_history.weight)

    def posterior(
        self, context: Float[Tensor, "b c h w"], target: Float[Tensor, "b t c h w"]
    ) -> Float[Tensor, "b n k"]:
        """Return log-probabilities of the code, given the last context frame and the next observation."""
        change = (target - context[:, None]).flatten(1, 2)
        logits = self.posterior_out(self.posterior_pool(torch.cat([context, change], dim=1)))
        probabilities = upcast(rearrange(logits, "b n (g k) -> b (n g) k", g=self.groups)).softmax(dim=-1)
        if self.training:
            probabilities = (1 - UNIFORM) * probabilities + UNIFORM / self.classes
        return probabilities.clamp(min=1e-12).log()

    def pooled(self, cells: Float[Tensor, "b d h w"]) -> Float[Tensor, "b n e"]:
        """Return what the prior reads of a state's cells, for each variable of the code."""
        return self.prior_pool(cells).repeat_interleave(self.groups, dim=1) + self.prior_place

    def prior(self, pooled: Float[Tensor, "b n e"], code: Float[Tensor, "b n k"]) -> Float[Tensor, "b n k"]:
        """Return log-probabilities of every variable, given those of `code` before it."""
        embedded = torch.einsum("bnk,nke->bne", code.detach().to(pooled), self.prior_embedding)
        before = embedded.cumsum(dim=1) - embedded
        return self._logits(pooled + before, slice(None)).log_softmax(dim=-1)

    def sample(
        self,
        pooled: Float[Tensor, "b n e"],
        draws: Float[Tensor, "b n"] | None,
        sampling: CodeSampling,
    ) -> Drawn:
        """Draw codes, one variable after the other.

        Args:
            pooled: What `pooled` returned.
            draws: A uniform number in [0, 1) for every variable; None takes the most likely values.
            sampling: Temperature and number of values.
        """
        before = torch.zeros_like(pooled[:, 0])
        chosen, log_priors = [], []
        for place in range(self.length):
            logits = self._logits((pooled[:, place] + before)[:, None], slice(place, place + 1))[:, 0]
            taken = draw(logits, None if draws is None else draws[:, place], sampling)
            one_hot = F.one_hot(taken, self.classes).to(pooled)
            before = before + one_hot @ self.prior_embedding[place].to(pooled)
            chosen.append(one_hot)
            log_priors.append(logits.log_softmax(dim=-1))
        return Drawn(torch.stack(chosen, dim=1), torch.stack(log_priors, dim=1))

    def vectors(self, code: Float[Tensor, "b n k"]) -> Float[Tensor, "b h w d"]:
        """Return what a code adds to the cells of each block."""
        vectors = torch.einsum("bnk,nkd->bnd", code.to(self.embedding), self.embedding)
        rows, columns = self.block_grid
        return rearrange(vectors, "b (h w g) d -> b h w g d", h=rows, w=columns).sum(dim=3)

    def history(self, code: Float[Tensor, "b n k"]) -> Float[Tensor, "b d"]:
        """Return what the next round's vision tokens get of a code."""
        return self.to_history(self.vectors(code).sum(dim=(1, 2)))

    def _logits(self, pooled: Float[Tensor, "b n e"], places: slice) -> Float[Tensor, "b n k"]:
        x = F.silu(self.prior_hidden(pooled))
        x = torch.einsum("bne,nek->bnk", x, self.prior_out[places].to(x))
        return upcast(x) + self.prior_bias[places]


def draw(
    logits: Float[Tensor, "b k"], draws: Float[Tensor, " b"] | None, sampling: CodeSampling
) -> Int[Tensor, " b"]:
    """Draw a value per row by inversion of its cumulative distribution, so that a draw decides it alone."""
    if draws is None or sampling.temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    cumulative = logits.softmax(dim=-1).cumsum(dim=-1)
    # The last sum may be below 1 by rounding, and values without probability are never drawn.
    total = cumulative[:, -1:]
    return (cumulative <= draws[:, None].to(cumulative) * total).sum(dim=-1).clamp(max=logits.shape[-1] - 1)


def straight_through(
    log_posterior: Float[Tensor, "b n k"], draws: Float[Tensor, "b n"]
) -> Float[Tensor, "b n k"]:
    """Sample codes whose gradient is that of their probabilities."""
    probabilities = log_posterior.exp()
    taken = draw(log_posterior.flatten(0, 1), draws.flatten(), CodeSampling()).view(draws.shape)
    one_hot = F.one_hot(taken, probabilities.shape[-1]).to(probabilities)
    return one_hot + probabilities - probabilities.detach()


def divergence(
    log_posterior: Float[Tensor, "b n k"], log_prior: Float[Tensor, "b n k"]
) -> Float[Tensor, " b"]:
    """Return the Kullback-Leibler divergence of the prior from the posterior, in nats per code.

    The prior of a variable is given the sampled ones before it, so this is an estimate by one sample.
    """
    return (log_posterior.exp() * (log_posterior - log_prior)).sum(dim=(-2, -1))
