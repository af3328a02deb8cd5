"""The reward of a round and the end of an episode, read from the predicted state."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from worldmodel.episodes import Outcome
from worldmodel.models.layers.norm import RMSNorm, upcast

NUM_BINS, LARGEST = 65, 8.0
"""Bins of the reward, and the largest magnitude of its symlog, which stands for rewards of 3,000."""
NUM_POOLS = 4
"""Weighted means over the positions; an event can show in a single one of them."""


class OutcomeHead(nn.Module):
    """Attention pooling over the positions of a state, then the reward and the end as distributions.

    The reward is a distribution over bins of its symlog, so that rare rewards are not averaged away, and
    those of different sizes are learned alike (Hafner et al., 2023, arXiv:2301.04104).
    """

    bins: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = width // 2
        self.norm = RMSNorm(width)
        self.scores, self.values = nn.Linear(width, NUM_POOLS), nn.Linear(width, hidden)
        self.out = nn.Linear(NUM_POOLS * hidden, NUM_BINS + 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.register_buffer("bins", torch.linspace(-LARGEST, LARGEST, NUM_BINS), persistent=False)

    def forward(self, states: Float[Tensor, "b n d"]) -> tuple[Float[Tensor, "b k"], Float[Tensor, " b"]]:
        """Return the logits of the reward's bins and the logit of the end, in fp32."""
        x = self.norm(states)
        weights = upcast(self.scores(x)).softmax(dim=1)
        pooled = torch.einsum("bnk,bnh->bkh", weights.to(x), F.silu(self.values(x)))
        logits = upcast(self.out(pooled.flatten(1)))
        return logits[:, :-1], logits[:, -1]

    def target(self, rewards: Float[Tensor, " b"]) -> Float[Tensor, "b k"]:
        """Return the distributions of rewards: the two bins around their symlog, with it as their mean."""
        place = (symlog(rewards).clamp(-LARGEST, LARGEST) + LARGEST) / (2 * LARGEST) * (NUM_BINS - 1)
        return (1 - (place[:, None] - torch.arange(NUM_BINS, device=place.device)).abs()).clamp(min=0)

    @torch.no_grad()
    def read(self, states: Float[Tensor, "b n d"]) -> list[Outcome]:
        """Return the outcomes of rounds: the mean reward, and whether an end is more likely than none."""
        bins, ends = self(states)
        rewards = symexp(bins.softmax(dim=1) @ self.bins.to(bins))
        pairs = zip(rewards.tolist(), (ends > 0).tolist(), strict=True)
        return [Outcome(reward, end) for reward, end in pairs]


def symlog(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return sign(x) log(1 + |x|)."""
    return x.sign() * x.abs().log1p()


def symexp(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return the inverse of `symlog`."""
    return x.sign() * x.abs().expm1()
