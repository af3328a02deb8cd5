"""Context parallelism: every rank keeps its queries and gathers the keys and values of all.

It takes any number of heads, and its cost grows with the number of ranks: for a few ranks on different
machines, with Ulysses inside each.

Source: the all-gather form of Llama 3 (arXiv:2407.21783, section 3.3.2).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from worldmodel.parallel import collectives

NAME = "context"
"""Name of the messages in `collectives.sent`."""


def all_gather_kv(
    key: Float[Tensor, "b g n d"],
    value: Float[Tensor, "b g n d"],
    sizes: Sequence[int],
    group: ProcessGroup,
) -> tuple[Float[Tensor, "b g m d"], Float[Tensor, "b g m d"]]:
    """Return the keys and values of all ranks, which hold `sizes` tokens each, in one message.

    The adjoint adds the gradients of all ranks' queries and hands each rank its own tokens'. Bytes: `volume`.
    """
    key, value = collectives.all_gather(torch.stack([key, value]), sizes, 3, group, NAME).unbind()
    return key, value


def volume(key_heads: int, head_width: int, sizes: Sequence[int]) -> int:
    """Count the numbers that a rank sends forward, and again backward, a sequence and layer.

    2 g d max(sizes) (P - 1): of the activations' type forward, of fp32 or better backward.
    """
    return 2 * key_heads * head_width * max(sizes) * (len(sizes) - 1)
