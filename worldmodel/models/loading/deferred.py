"""Weights that stay in their files until processes have divided a model, and then read their own part each.

    with unread.weights():
        model = WorldModel.from_config(config)  # parts of other libraries wait on the meta device
    fully_shard(model, ...)
    unread.make(model, device)
    unread.read(model)  # or fill it from a checkpoint

So no process ever holds more of them than its own part, and that of one tensor which it is reading.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Slices = Mapping[str, Any]
"""Tensors of opened files, by the names that a module has for them; what is indexed is read."""

_WANTED = ContextVar("unread", default=False)
_PLACE = "_unread"


@contextmanager
def weights() -> Iterator[None]:
    """Leave the weights of parts that are loaded inside in their files."""
    before = _WANTED.set(True)
    try:
        yield
    finally:
        _WANTED.reset(before)


def wanted() -> bool:
    """Tell whether weights are to be left in their files."""
    return _WANTED.get()


def leave(module: nn.Module, slices: Slices) -> None:
    """Remember from where `read` fills a module."""
    setattr(module, _PLACE, slices)


def left(module: nn.Module) -> Slices | None:
    """Return what `read` fills a module from; None where nothing is left."""
    return getattr(module, _PLACE, None)


def make(root: nn.Module, device: torch.device) -> None:
    """Make what waits on the meta device on another one, in place: weights that are tied stay so."""
    for waiting in [parameter for parameter in root.parameters() if parameter.is_meta]:
        made = nn.Parameter(torch.empty_like(waiting, device=device), waiting.requires_grad)
        torch.utils.swap_tensors(waiting, made)


@torch.no_grad()
def read(root: nn.Module) -> None:
    """Read all weights that were left in files, each process its own part of those that are sharded."""
    for module in [module for module in root.modules() if left(module)]:
        held = {plain(name): tensor for name, tensor in module.state_dict(keep_vars=True).items()}
        for name, source in module.__dict__.pop(_PLACE).items():
            mine, place = part(held[name])
            if mine.numel():
                mine.copy_(source[place])


def plain(name: str) -> str:
    """Return the name that a weight has where nothing learns by LoRA."""
    return name.replace(".base_layer.", ".")


def part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return what this process holds of a tensor, and where in the whole it lies."""
    if not isinstance(tensor, DTensor):
        return tensor, (slice(None),) * tensor.dim()
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))
