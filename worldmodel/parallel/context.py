"""Context parallelism: every rank keeps its queries and gathers the keys and values of all ranks.

It works with any number of heads, but its cost grows with the number of ranks: use it between a few machines,
with Ulysses inside each.

Source: the all-gather form of Llama 3 (arXiv:2407.21783, section 3.3.2).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from worldmodel.parallel import collectives

NAME = "context"
"""Name of the collective in `collectives.sent`."""


def all_gather_kv(
    key: Float[Tensor, "b g n d"],
    value: Float[Tensor, "b g n d"],
    sizes: Sequence[int],
    group: ProcessGroup,
) -> tuple[Float[Tensor, "b g m d"], Float[Tensor, "b g m d"]]:
    """Gather the keys and values of all ranks, with `sizes` tokens each, in one collective.

    The adjoint is a reduce-scatter: each rank receives the summed gradients of its tokens.
    """
    # Stacked, they are one message instead of two: `[2, b, g, n, d]`, gathered along tokens (axis 3).
    key, value = collectives.all_gather(torch.stack([key, value]), sizes, 3, group, NAME).unbind()
    return key, value
