"""One reader for the processes that share sequences."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from worldmodel.data.loader import Batch, BatchLoader, Bookmarks
from worldmodel.parallel.mesh import Mesh

T = TypeVar("T")


class SequenceLoader:
    """The batches of a loader, on every process of a sequence group; only the first of them opens it.

    The first process reads, decodes and broadcasts, so all of them have the same samples whatever is on their
    disks, and all raise the same error. A step waits for the broadcast of its pixels as uint8, by NCCL on
    GPUs and by gloo on CPUs.

    Raises:
        WorldModelError: as `open_loader`.
    """

    def __init__(self, open_loader: Callable[[], BatchLoader], mesh: Mesh) -> None:
        self.group, self.device = mesh.sequence, mesh.device
        self.loader: BatchLoader | None = None
        self.bad: Counter[str] = Counter()
        """Number of bad clips of the stage so far, by source, over all ranks."""
        self.stall_s = 0.0
        """Seconds that the caller waited for batches."""
        self._share(lambda: self._open(open_loader))

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        began = time.perf_counter()
        batches, self.bad = self._share(self._read)
        self.stall_s += time.perf_counter() - began
        return batches

    def bookmarks(self) -> Bookmarks:
        """Return a bookmark of every stream that this process reads."""
        return self.loader.bookmarks() if self.loader else {}

    def close(self) -> None:
        """End the workers and close the sources."""
        if self.loader:
            self.loader.close()

    def __enter__(self) -> "SequenceLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self, open_loader: Callable[[], BatchLoader]) -> None:
        self.loader = open_loader()
        self.bad = self.loader.bad

    def _read(self) -> tuple[list[Batch], Counter[str]]:
        assert self.loader is not None, "only the first process of a group reads"
        return next(self.loader), self.loader.bad

    def _share(self, work: Callable[[], T]) -> T:
        """Return on every process what `work` returns on the first one of the group, or raise its error."""
        if self.group.size == 1:
            return work()
        outcome: list[Any] = [None]
        if self.group.rank == 0:
            try:
                outcome = [(work(), None)]
            except Exception as error:  # StopIteration at the end, too
                outcome = [(None, error)]
        dist.broadcast_object_list(outcome, group=self.group.group, group_src=0, device=self.device)
        result, error = outcome[0]
        if error is not None:
            raise error
        return result
