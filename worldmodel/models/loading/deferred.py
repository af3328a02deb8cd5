"""Deferred loading: each process reads only its shard of the weights, after the model was sharded.

    with deferred.loading():
        model = WorldModel.from_config(config)  # parts of other libraries are on the meta device
    fully_shard(model, ...)
    deferred.materialize(model, device)
    deferred.load_shards(model)  # then a checkpoint, which holds what training changed

A process never holds more than its own shards, and the shards of one tensor while it reads.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.module import register_module_parameter_registration_hook

from worldmodel.errors import ModelError

Slices = Mapping[str, Any]
"""Slices of safetensors files by the name of the weight; indexing reads from the file."""

_ENABLED = ContextVar("deferred", default=False)
_ATTRIBUTE = "_deferred_slices"
_FILES = "_deferred_files"


class Zeros:
    """A weight of zeros, in place of a slice of a file."""

    def __getitem__(self, index: Any) -> Tensor:
        """Return a zero, which is broadcast to any shard."""
        return torch.zeros(())


@contextmanager
def loading(defer: bool = True) -> Iterator[None]:
    """Defer reading the weights of models of transformers and diffusers that are loaded within the block.

    With `defer` False they are read at once, also within a block that defers.
    """
    before = _ENABLED.set(defer)
    try:
        yield
    finally:
        _ENABLED.reset(before)


def enabled() -> bool:
    """Return whether loading is deferred."""
    return _ENABLED.get()


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Build modules whose parameters are on the meta device and whose buffers have their values."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None  # unchanged
        return nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()


def attach(module: nn.Module, slices: Slices, files: tuple[Path, ...] = ()) -> None:
    """Attach the slices from which `load_shards` fills a module, and the files that they are slices of."""
    setattr(module, _ATTRIBUTE, slices)
    setattr(module, _FILES, files)


def attached(module: nn.Module) -> Slices | None:
    """Return the slices attached to a module; None if there are none."""
    return getattr(module, _ATTRIBUTE, None)


def attached_files(module: nn.Module) -> tuple[Path, ...]:
    """Return the files of the slices attached to a module."""
    return getattr(module, _FILES, ())


def files(root: nn.Module) -> dict[str, Path]:
    """Return the files from which `load_shards` will read, by module and name."""
    return {
        f"{name}/{file.name}": file
        for name, module in root.named_modules()
        if attached(module)
        for file in attached_files(module)
    }


def names(root: nn.Module) -> set[str]:
    """Return the names of the weights that `load_shards` will read."""
    found = set[str]()
    for prefix, module in root.named_modules():
        if slices := attached(module):
            own = module.state_dict(prefix=f"{prefix}." if prefix else "", keep_vars=True)
            start = len(prefix) + 1 if prefix else 0
            found |= {name for name in own if base_name(name[start:]) in slices}
    return found


def materialize(root: nn.Module, device: torch.device) -> None:
    """Allocate the parameters on the meta device on another device, in place; tied weights stay tied."""
    for parameter in [parameter for parameter in root.parameters() if parameter.is_meta]:
        empty = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, empty)


@torch.no_grad()
def load_shards(root: nn.Module) -> None:
    """Read all deferred weights; of sharded ones only the shard of this process."""
    for module in [module for module in root.modules() if attached(module)]:
        state = {base_name(name): tensor for name, tensor in module.state_dict(keep_vars=True).items()}
        found = module.__dict__.pop(_FILES)
        for name, source in module.__dict__.pop(_ATTRIBUTE).items():
            shard, index = local_shard(state[name])
            if shard.numel():
                shard.copy_(source[index])
                check_finite({name: shard}, found[0].parent if found else type(module).__name__)


def check_finite(weights: Mapping[str, Tensor], source: Path | str) -> None:
    """Check that weights are finite numbers, by their sums.

    Raises:
        ModelError: one is not; the message names it and `source`.
    """
    for name, weight in weights.items():
        if weight.is_meta or not weight.is_floating_point():
            continue
        if not torch.isfinite(weight.detach().sum(dtype=torch.float32)):
            raise ModelError(
                f"The weights in {source} are not finite numbers (NaN or infinite) at {name!r}; get them "
                "again, or export an earlier checkpoint of their run."
            )


def base_name(name: str) -> str:
    """Return the name of a weight without LoRA."""
    return name.replace(".base_layer.", ".")


def local_shard(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return this process's shard of a tensor, and the index of the shard in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tensor, (slice(None),) * tensor.dim()
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(
        slice(first, first + size) for first, size in zip(start, shape, strict=True)
    )
