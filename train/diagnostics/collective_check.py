"""A debug mode that compares each collective with the other processes' before it runs.

Processes that run different collectives crash (gloo), wait for each other until they time out (NCCL) or, if
the sizes are equal, mix up weights without an error. None of these shows which module caused it.
"""

import itertools
import sys
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, _get_default_store
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worldmodel.config import TrainConfig

NAMESPACES = ("c10d", "_c10d_functional", "_dtensor", "worldmodel")
"""Namespaces of the operators that contain the collectives."""
SKIPPED = ("wait_tensor", "_wrap_tensor_autograd", "send", "recv_", "recv_any_source_")
"""Operators of these namespaces that are not the same on all processes of a group, or send nothing."""
UNEVEN = ("alltoall_", "alltoall_base_", "all_to_all_single", "all_to_all")
"""Collectives whose sizes may differ between processes."""
TAIL = 20
"""Number of collectives that are logged when a process does not answer."""
SERIAL = itertools.count()
"""Numbers of the checks of this process, which make their keys in the store unique."""


class CollectiveError(RuntimeError):
    """Processes run different collectives, or one of them has stopped."""


@dataclass(frozen=True)
class Collective:
    """The description of a collective; all processes of its group must agree on it."""

    operator: str
    ranks: tuple[int, ...]
    tensors: tuple[str, ...]
    """Dtype and shape of every tensor that a process sends; only the dtype where sizes may differ."""
    caller: str
    """The sharded module that runs it, or the function of this package."""

    def __str__(self) -> str:
        ranks = " ".join(map(str, self.ranks))
        return f"{self.operator}({', '.join(self.tensors)}) on ranks {ranks} for {self.caller}"


def collective_check(config: TrainConfig) -> AbstractContextManager[object]:
    """Return a context that compares collectives if `diagnostics.check_collectives` is set."""
    if not config.diagnostics.check_collectives or dist.get_world_size() == 1:
        return nullcontext()
    # Half the time, so that its error comes before those of the watchdog and of the collectives themselves.
    return CollectiveCheck(timedelta(seconds=config.hang_timeout_s / 2))


class CollectiveCheck(TorchDispatchMode):
    """Compares the collectives of this thread with the other processes'.

    Before a collective runs, each process of its group writes a description of it to the store that the
    processes met at, and reads the others'. Layers that are compiled run eagerly.

    Args:
        timeout: Longest wait for the other processes.
    """

    supports_higher_order_operators = True

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        self.timeout = timeout
        self.rank = dist.get_rank()
        default: Any = _get_default_store()
        # A connection of its own, because waiting blocks it and other threads use the default one.
        self.store = PrefixStore(f"collectives/{next(SERIAL)}", default.clone())
        self.counts: Counter[tuple[int, ...]] = Counter()
        """Collectives so far, by the ranks of their group."""
        self.recent: deque[Collective] = deque(maxlen=TAIL)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor then calls operators of plain tensors, which come here again
        if getattr(func, "namespace", None) in NAMESPACES and func._opname not in SKIPPED:
            self.compare(_describe(func, args))
        return func(*args, **(kwargs or {}))

    def compare(self, own: Collective) -> None:
        """Wait until every process of the group comes to its next collective, and compare them.

        Raises:
            CollectiveError: a process runs another collective, or none within the timeout.
        """
        number = self.counts[own.ranks]
        self.counts[own.ranks] += 1
        self.recent.append(own)
        keys = {rank: f"{own.ranks}/{number}/{rank}" for rank in own.ranks}
        for key in (f"latest/{self.rank}", keys[self.rank]):
            self.store.set(key, str(own))
        try:
            self.store.wait(list(keys.values()), self.timeout)
        except dist.DistStoreError:
            raise self._timeout_error(own, keys) from None
        for rank, found in zip(keys, self.store.multi_get(list(keys.values())), strict=True):
            if (other := found.decode()) != str(own):
                raise CollectiveError(
                    f"Processes run different collectives as number {number} of ranks {own.ranks}: process "
                    f"{self.rank} {own}, process {rank} {other}."
                )
        if number:  # every process has written this collective, so all have read the one before
            self.store.delete_key(f"{own.ranks}/{number - 1}/{self.rank}")

    def _timeout_error(self, own: Collective, keys: dict[int, str]) -> CollectiveError:
        """Log the last collectives of this process, and return an error that names the missing ones."""
        tail = "\n".join(f"  {each}" for each in self.recent)
        print(f"Last collectives of process {self.rank}:\n{tail}", file=sys.stderr, flush=True)
        missing = []
        for rank in (rank for rank, key in keys.items() if not self.store.check([key])):
            latest = f"latest/{rank}"
            last = self.store.get(latest).decode() if self.store.check([latest]) else "none"
            missing.append(f"process {rank}, whose last collective is {last}")
        return CollectiveError(
            f"Process {self.rank} waited {self.timeout.total_seconds():g} s with {own} for "
            f"{'; '.join(missing)}."
        )


def _describe(operator: Any, args: Sequence[Any]) -> Collective:
    """Describe a collective by the arguments of its operator."""
    given = {argument.name: value for argument, value in zip(operator._schema.arguments, args, strict=False)}
    group = given.get("group_name")
    group = _resolve_process_group(group) if group is not None else ProcessGroup.unbox(given["process_group"])
    sent = next(value for name, value in given.items() if name.startswith(("input", "tensor")))
    uneven = operator._opname in UNEVEN
    tensors = tuple(
        str(each.dtype).removeprefix("torch.") + ("" if uneven else str(list(each.shape)))
        for each in tree_leaves(sent)
        if isinstance(each, Tensor)
    )
    return Collective(operator._opname, tuple(dist.get_process_group_ranks(group)), tensors, _caller())


def _caller() -> str:
    """Return the sharded module that FSDP works for, else the calling function of this package."""
    frame: FrameType | None = sys._getframe()
    function = "another library"
    while frame := frame.f_back if frame else None:
        name = getattr(frame.f_locals.get("self"), "_module_fqn", None)  # FSDPParamGroup
        if name is not None:
            return name or "the root module"
        module = frame.f_globals.get("__name__", "")
        if function == "another library" and module.startswith("worldmodel.") and module != __name__:
            function = f"{module}.{frame.f_code.co_name}"
    return function
