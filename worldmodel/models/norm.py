"""Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467) that keeps autocast's dtype."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` whose weight follows the input's dtype, so that the fused kernel applies."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6)

    def forward(self, x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape d"]:
        assert self.weight is not None
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)
