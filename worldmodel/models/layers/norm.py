"""RMSNorm in the dtype of autocast, and the upcast to fp32."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` with its weight cast to the input's dtype, so that the fused kernel is used.

    Source: Zhang & Sennrich 2019 (arXiv:1910.07467).
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6)

    def forward(self, x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape d"]:
        assert self.weight is not None
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def upcast(x: Tensor) -> Tensor:
    """Return `x` in fp32 if its dtype is narrower; fp64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
