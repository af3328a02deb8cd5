"""Moving of tensors, and stacking, splitting and indexing of dataclasses of them along the first axis.

Fields may be tensors, tuples, other such dataclasses, or None; anything else is copied from the first item.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

Tree = TypeVar("Tree")


def map_tensors(function: Callable[..., Tensor], *trees: Tree) -> Tree:
    """Apply a function to the tensors at the same position of trees of one structure."""
    first: Any = trees[0]
    if isinstance(first, Tensor):
        return function(*trees)  # type: ignore[return-value]
    if isinstance(first, tuple):
        return type(first)(map_tensors(function, *items) for items in zip(*trees, strict=True))  # type: ignore
    if is_dataclass(first):
        named = {
            field.name: map_tensors(function, *(getattr(tree, field.name) for tree in trees))
            for field in fields(first)
        }
        return type(first)(**named)  # type: ignore[return-value]
    return first


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor of the host to a device without waiting for it: a GPU copies from pinned memory."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def from_array(array: np.ndarray) -> Tensor:
    """Return an array as a tensor on the CPU; uint16 has the bits of bfloat16, which NumPy lacks."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def stack(items: Sequence[Tree]) -> Tree:
    """Concatenate batches; a single one is returned as it is."""
    return items[0] if len(items) == 1 else map_tensors(lambda *parts: torch.cat(parts), *items)


def take(batch: Tree, rows: Int[Tensor, " n"]) -> Tree:
    """Return some rows of a batch."""
    return map_tensors(lambda part: part[rows], batch)


def split(batch: Tree, sizes: Sequence[int]) -> list[Tree]:
    """Split a batch into consecutive ones of the given sizes."""
    if len(sizes) == 1:
        return [batch]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [
        map_tensors(lambda part, start=end - size, stop=end: part[start:stop], batch)
        for size, end in zip(sizes, ends, strict=True)
    ]


def shapes(tree: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a tree's tensors without their batch axis; equal ones can be stacked."""
    found: list[tuple[int, ...]] = []

    def visit(part: Tensor) -> Tensor:
        found.append(tuple(part.shape[1:]))
        return part

    map_tensors(visit, tree)
    return tuple(found)
