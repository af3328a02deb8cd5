"""Exact bytes of the tensors that were made since a point in time and are still alive."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Records weak references to the storages of all tensors that operators return within the block."""

    def __init__(self, measures_peak: bool = False) -> None:
        super().__init__()
        self.made: dict[int, StorageWeakRef] = {}
        self.measures_peak, self.peak, self.bound = measures_peak, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages_of((args, kwargs))}
        for storage in storages_of(result):
            if storage._cdata not in given:  # a view of what was there before
                ref = StorageWeakRef(storage)
                self.made[ref.cdata] = ref
                self.bound += storage.nbytes()
        if self.measures_peak and self.bound > self.peak:  # otherwise nothing can be above the peak
            self.bound = self.held()
            self.peak = max(self.peak, self.bound)
        return result

    def held(self) -> int:
        """Return the bytes of the storages that are alive; those of freed gathered weights are empty."""
        self.made = {key: ref for key, ref in self.made.items() if not ref.expired()}
        alive = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.made.values()]
        return sum(storage.nbytes() for storage in alive if storage is not None)


def storages_of(values: Any) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors in a structure."""
    tensors = [each for each in tree_leaves(values) if isinstance(each, Tensor)]
    local = [each._local_tensor if isinstance(each, DTensor) else each for each in tensors]
    return [each.untyped_storage() for each in local]
