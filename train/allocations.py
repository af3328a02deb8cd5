"""Allocations of a computation that is played on tensors without memory.

Tensors that follow from weights, and large ones, are fake: they have shapes and no values (`FakeTensorMode`).
Small ones that follow from the host alone (masks, random numbers, noise levels) are computed, so that what
depends on their values is done as in a run.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._tools.fake_collectives  # registers what collectives return for fake tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MAX_COMPUTED = 2**20
"""Elements of the largest tensor that is computed."""


@dataclass
class Allocation:
    """Memory of one storage between two times, counted in operators."""

    storage: int
    """Identifies the storage while it lives."""
    num_bytes: int
    begin: int
    gathered: bool
    """Whether FSDP gathers weights in it, and frees it meanwhile."""
    end: int = -1
    """-1: it is still there."""


class Allocations(TorchDispatchMode):
    """Records when storages are allocated and freed within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.log: list[Allocation] = []
        self.live: dict[int, Allocation] = {}
        self.gathered: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Storages that FSDP may have resized since the last operator."""
        self.time = 0
        self.counts = True

    def __enter__(self) -> "Allocations":
        self.fake.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.fake.__exit__(*exception)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave out what is allocated within the block, such as memory of the host."""
        self.counts = False
        try:
            yield
        finally:
            self.counts = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # attributes of fake tensors
            return func(*args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return False if args[0].dtype == torch.bool else 1  # a loss, a norm
        self.time += 1
        result = self._run(func, args, kwargs, tensors)
        if self.counts:
            self.hold(each for each in tree_leaves(result) if isinstance(each, Tensor))
            if func.namespace == "fsdp":
                self.hold(tensors, gathered=True)
            self._notice_resized()
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        if any(isinstance(each, FakeTensor) for each in tensors):
            return func(*args, **kwargs)
        if all(each.is_meta for each in tensors) and (tensors or _is_meta(kwargs.get("device"))):
            if _is_meta(kwargs.get("device", "meta")):
                return _computed(func, args, kwargs)
            return func(*args, **kwargs)
        if any(each.numel() > MAX_COMPUTED for each in tensors):
            return func(*args, **kwargs)
        if not tensors:
            result = func(*args, **kwargs)
            made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
            if any(each.numel() > MAX_COMPUTED for each in made):
                return result
        return _computed(func, args, kwargs)

    def hold(self, tensors: Iterable[Tensor], gathered: bool = False) -> None:
        """Record the storages of tensors, from now on."""
        for tensor in tensors:
            storage = _storage(tensor)
            key, num_bytes = storage._cdata, storage.nbytes()
            if (found := self.live.get(key)) is None:
                weakref.finalize(storage, self._free, key)
            if found is None or found.num_bytes != num_bytes:
                self._set(key, num_bytes, gathered)
            if gathered and num_bytes:
                self.live[key].gathered = True
                self.gathered[key] = weakref.ref(storage)

    def _set(self, key: int, num_bytes: int, gathered: bool) -> None:
        if key in self.live:
            self.live[key].end = self.time
        self.live[key] = Allocation(key, num_bytes, self.time, gathered)
        self.log.append(self.live[key])

    def _free(self, key: int) -> None:
        self.gathered.pop(key, None)
        if key in self.live:
            self.live.pop(key).end = self.time

    def _notice_resized(self) -> None:
        for key, reference in list(self.gathered.items()):
            storage = reference()
            if storage is not None and not storage.nbytes():
                self._set(key, 0, True)
                del self.gathered[key]

    def mark(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the indices in the log of the live storages of tensors."""
        live = {id(self.live[key]) for key in map(_key, tensors) if key in self.live}
        return {index for index, each in enumerate(self.log) if id(each) in live}


def peak(
    allocations: Allocations, kinds: Mapping[str, set[int]], since: int, scale: Mapping[str, float]
) -> dict[str, float]:
    """Return the bytes of each kind of allocation at the time when their sum is largest.

    Args:
        allocations: A finished recording.
        kinds: Kinds by name, as the indices that `mark` returned; all else is `activations`, or `gathered`.
        since: Begin of the time that counts.
        scale: Factors of the bytes of kinds, such as other numbers of shards.
    """
    kind_of = {index: name for name, indices in kinds.items() for index in indices}
    changes: list[tuple[int, int, str, float]] = []
    for index, each in enumerate(allocations.log):
        if 0 <= each.end < since:
            continue
        name = kind_of.get(index, "gathered" if each.gathered else "activations")
        num_bytes = each.num_bytes * scale.get(name, 1.0)
        changes.append((max(each.begin, since), 1, name, num_bytes))
        if each.end >= 0:
            changes.append((each.end, 0, name, -num_bytes))
    held = dict.fromkeys((*kinds, "gathered", "activations"), 0.0)
    most, largest, total = dict(held), 0.0, 0.0
    for _, _, name, change in sorted(changes, key=lambda change: change[:2]):
        held[name] += change
        total += change
        if total > largest:
            most, largest = dict(held), total
    return most


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _key(tensor: Tensor) -> int:
    return _storage(tensor)._cdata
