"""Weights in 8 bits for inference, by torchao."""

import importlib.util
from collections.abc import Sequence
from typing import Literal, get_args

from torch import nn

from worldmodel.errors import ConfigError, pip_install

Method = Literal["int8", "fp8"]
METHODS: tuple[str, ...] = get_args(Method)
APART = ("lm_head", "lora_")
"""Linear layers that keep their type: one may share its weight with the embeddings, the others are small."""


def quantize(parts: Sequence[nn.Module], method: str) -> None:
    """Store the weights of all linear layers in 8 bits with one scale per output, in place.

    Activations keep their type, and a layer converts its weight when it is called, which saves memory and
    takes time. Adapters are attached before.

    Args:
        parts: Modules, such as the backbone and the generator.
        method: int8, or fp8 (float8_e4m3fn).

    Raises:
        ConfigError: torchao is not installed, or the method is another one.
    """
    if method not in METHODS:
        raise ConfigError(f"quantization is {method!r}; the in-process engine has {' and '.join(METHODS)}.")
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"quantization {method} needs torchao; run {pip_install('quantization')}, or omit it."
        )
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    config = (Int8WeightOnlyConfig if method == "int8" else Float8WeightOnlyConfig)(version=2)
    for part in parts:
        quantize_(part, config, filter_fn=_is_quantized)


def num_bytes(module: nn.Module) -> int:
    """Return the memory of the weights of a module, with their scales."""
    total = 0
    for weight in {id(each): each for each in module.parameters()}.values():
        names = getattr(weight, "tensor_data_names", None)
        held = [weight] if names is None else [getattr(weight, name) for name in names]
        total += sum(each.numel() * each.element_size() for each in held)
    return total


def _is_quantized(module: nn.Module, name: str) -> bool:
    return type(module) is nn.Linear and not any(part in name for part in APART)
