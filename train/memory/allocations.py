"""Memory that a computation allocates, recorded without memory.

Tensors that follow from weights, and large ones, are fake: they have shapes and no values (`FakeTensorMode`).
Small ones that follow from the host alone (masks, random numbers, noise levels) are computed, so that what
depends on their values is done as in a run.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MAX_COMPUTED = 2**20
"""Elements of the largest tensor that is computed."""


@dataclass(frozen=True)
class Moment:
    """Bytes that are held after an operator."""

    activations: float
    gathered: float
    """Weights that FSDP has gathered, and gradients of a layer before they are reduced."""
    gradients: float
    """Whole gradients, before they are divided over processes."""
    prepared: bool
    """Whether the frozen parts have run, so that gradients of earlier microbatches are held."""


class Allocations(TorchDispatchMode):
    """Records the storages that operators allocate within the block, and when they are freed.

    The caller adds what the played computation leaves out: `gathered`, `gradients`, and `repeated`, what more
    layers hold.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.moments: list[Moment] = []
        self.live: dict[int, int] = {}
        self.held = 0
        """Bytes of live storages."""
        self.counts = self.prepared = False
        self.gathered = self.gradients = self.repeated = 0.0

    def __enter__(self) -> "Allocations":
        self.fake.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.fake.__exit__(*exception)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is allocated within the block."""
        self.counts = True
        try:
            yield
        finally:
            self.counts = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # attributes of fake tensors
            return func(*args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return False if args[0].dtype == torch.bool else 1  # a loss, a norm
        result = self._run(func, args, kwargs, tensors)
        if self.counts:
            given = {each.untyped_storage()._cdata for each in tensors}
            for each in tree_leaves(result):
                if isinstance(each, Tensor):
                    self._hold(each.untyped_storage(), given)
            self.note()
        return result

    def note(self) -> None:
        """Record a moment."""
        self.moments.append(Moment(self.held + self.repeated, self.gathered, self.gradients, self.prepared))

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        if any(isinstance(each, FakeTensor) or each.numel() > MAX_COMPUTED for each in tensors):
            return func(*args, **kwargs)
        if not tensors:
            result = func(*args, **kwargs)
            made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
            if any(each.numel() > MAX_COMPUTED for each in made):
                return result
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _hold(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key = storage._cdata
        if key in self.live or key in given:
            return
        self.live[key] = storage.nbytes()
        self.held += self.live[key]
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.held -= self.live.pop(key, 0)
