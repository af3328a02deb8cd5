"""Stages whose result for a clip depends on this clip alone."""

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from worldmodel.errors import InputError
from worldmodel.flow.stages.base import CLIP, DROP, RETRY, RETRY_AFTER

Row = dict[str, Any]


def each_clip(batch: pa.RecordBatch, outputs: pa.Schema, function: Callable[[Row], Row]) -> pa.RecordBatch:
    """Return the result of a stage that calls `each_row`."""
    return result_of(batch, outputs, each_row(batch, function))


def each_row(batch: pa.RecordBatch, function: Callable[[Row], Row]) -> list[Row]:
    """Call a function with every row of a batch; an `InputError` is the verdict that its clip is dropped."""

    def row(clip: Row) -> Row:
        try:
            return function(clip)
        except InputError as error:
            return {DROP: str(error)}

    return [row(clip) for clip in batch.to_pylist()]


def result_of(batch: pa.RecordBatch, outputs: pa.Schema, rows: list[Row]) -> pa.RecordBatch:
    """Return the result of a stage by its rows, in the order of the batch; absent cells are null."""
    columns: dict[str, pa.Array] = {CLIP: batch.column(CLIP)}
    for name, kind in [*zip(outputs.names, outputs.types, strict=True), *VERDICTS]:
        columns[name] = pa.array([row.get(name) for row in rows], kind)
    return pa.record_batch(columns)


VERDICTS = ((DROP, pa.string()), (RETRY, pa.string()), (RETRY_AFTER, pa.float64()))


def interval(row: Mapping[str, Any]) -> tuple[float, float | None]:
    """Return where a clip begins and ends in its file, in seconds; None: at its end."""
    return row.get("start_s") or 0.0, row.get("end_s")
