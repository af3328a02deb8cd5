"""Tensor parallelism: every process has some heads of each attention and some channels of each feed-forward.

Layers are divided in pairs: the first keeps a part of its outputs, the second the same part of its inputs,
and the results of the second are summed over all processes. Between the pairs every process has all channels
of all tokens. It is for inference: sums have no gradient.

Source: Shoeybi et al. 2019, Megatron-LM (arXiv:1909.08053), section 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from worldmodel.errors import ConfigError
from worldmodel.parallel import collectives

NAME = "tensor"
"""Name of the collective in `collectives.sent`."""


@dataclass(frozen=True)
class Part:
    """One of `size` equal parts of the weights."""

    rank: int
    size: int

    def share(self, count: int, what: str) -> int:
        """Return how many of `count` heads or channels each process has.

        Raises:
            ConfigError: they cannot be divided evenly.
        """
        if count % self.size:
            raise ConfigError(
                f"--generator-tensor-parallel-size is {self.size}, which does not divide the {count} {what} "
                "of the generator; use a number that does."
            )
        return count // self.size

    def index(self, channels: int, groups: int = 1) -> Int[Tensor, " n"]:
        """Return the channels of this part; with groups (queries, keys, values), its part of each."""
        own = self.share(channels // groups, "channels")
        return torch.arange(channels).view(groups, self.size, own)[:, self.rank].flatten()


def keep_outputs(layer: nn.Module, part: Part, groups: int = 1) -> None:
    """Keep a part of the outputs of a linear layer or of a depthwise convolution, in place.

    Raises:
        ConfigError: the outputs cannot be divided evenly, or an adapter of the layer cannot be divided.
    """
    for each in _linear(layer, "lora_B"):
        index = part.index(each.weight.shape[0], groups)
        _select(each, "weight", 0, index)
        if each.bias is not None:
            _select(each, "bias", 0, index)
        if isinstance(each, nn.Conv2d):
            each.groups = each.in_channels = each.out_channels = len(index)


def keep_inputs(layer: nn.Module, part: Part) -> None:
    """Keep a part of the inputs of a linear layer, in place; its result becomes the sum over all processes.

    Raises:
        ConfigError: the inputs cannot be divided evenly, or an adapter of the layer cannot be divided.
    """
    for each in _linear(layer, "lora_A"):
        _select(each, "weight", 1, part.index(each.weight.shape[1]))
    for each in _linear(layer, "lora_B"):
        if part.rank:  # the first process adds the bias
            each.register_parameter("bias", None)
    layer.register_forward_hook(_total)


class DividedRMSNorm(nn.Module):
    """A part of an RMSNorm over channels that are divided among processes."""

    def __init__(self, whole: nn.RMSNorm, part: Part) -> None:
        super().__init__()
        (self.channels,) = whole.normalized_shape
        self.eps, self.weight = whole.eps, whole.weight
        _select(self, "weight", 0, part.index(self.channels))

    def forward(self, x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape d"]:
        """Return `x` divided by its root mean square over the channels of all processes, and scaled."""
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = collectives.all_reduce(precise.pow(2).sum(dim=-1, keepdim=True), NAME)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return (precise * torch.rsqrt(squares / self.channels + eps) * self.weight).to(x.dtype)


def _total(layer: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    return collectives.all_reduce(out, NAME)


def _linear(layer: Any, factor: str) -> Iterator[Any]:
    """Yield a layer without its adapters, and then one factor of each LoRA."""
    base = getattr(layer, "base_layer", layer)
    yield base
    if base is not layer:
        if not isinstance(base, nn.Linear) or layer.lora_variant:
            raise ConfigError(
                "An adapter of the generator is not plain LoRA of linear layers (DoRA, for example), which "
                "--generator-tensor-parallel-size cannot divide; omit one."
            )
        yield from getattr(layer, factor).values()


def _select(module: nn.Module, name: str, dim: int, index: Int[Tensor, " n"]) -> None:
    whole = module.get_parameter(name)
    own = whole.detach().index_select(dim, index.to(whole.device))
    module.register_parameter(name, nn.Parameter(own, whole.requires_grad))
