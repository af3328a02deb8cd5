"""The interface of buffers."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import pyarrow as pa

UNUSED_S = 24 * 3600.0
"""Age from which an unused result is removed: a younger one may be about to be recorded by a worker that
waits for its database."""


class Buffer(Protocol):
    """Binary columns of clips, by place.

    A result counts once its place is recorded in the catalog. What is written and never recorded, because a
    worker ended in between or another one was first, is unused and removed by `compact`. What is recorded
    stays, also of clips that were dropped or packed: a changed chain may read it. So a buffer grows with the
    sources.
    """

    def write(self, stage: str, key: str, batch: pa.RecordBatch) -> list[str]:
        """Store the binary columns of a stage's result and return the place of each row.

        Raises:
            OutputError: it cannot be written, or the disk is full.
        """
        ...

    def read(self, places: Sequence[str], column: str) -> list[bytes | None]:
        """Return one column of the rows at some places; None where a row has no value.

        Raises:
            FlowError: a place does not exist.
        """
        ...

    def sizes(self) -> dict[tuple[str, str], int]:
        """Return the size in bytes of the files of each stage and key.

        Raises:
            FlowError: the store does not answer.
        """
        ...

    def compact(self, used: Iterable[str], older_than_s: float = UNUSED_S) -> int:
        """Remove what none of the places in `used` needs, and return how many bytes that were.

        Args:
            used: places that are recorded.
            older_than_s: age from which results are removed. It must be longer than any worker takes between
                writing a result and recording it, or stages may lose results that they were about to record.

        Raises:
            FlowError: the store does not answer.
            OutputError: something cannot be removed.
        """
        ...
