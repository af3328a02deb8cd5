"""The stage `probe`: lengths, sizes and codec of a file, which is decoded to find damage."""

import pyarrow as pa

from worldmodel import media
from worldmodel.errors import InputError
from worldmodel.flow.stages.base import Resources, stage
from worldmodel.flow.stages.rows import Row, each_clip, interval

OUTPUTS = pa.schema(
    {
        "duration_s": pa.float64(),
        "fps": pa.float64(),
        "width": pa.int32(),
        "height": pa.int32(),
        "num_frames": pa.int64(),
        "codec": pa.string(),
    }
)


@stage(
    version="1",
    inputs=["video", "start_s", "end_s"],
    outputs=OUTPUTS.names,
    resources=Resources(cpu=1.0, memory_gb=1.0),
    batch_size=8,
    timeout_s=600.0,
)
def probe(batch: pa.RecordBatch, *, decode: bool = True) -> pa.RecordBatch:
    """Describe the files of a batch, and drop damaged ones.

    Args:
        batch: with the column `video`.
        decode: whether every frame is decoded; otherwise only what the header says is checked.
    """

    def row(clip: Row) -> Row:
        if clip["video"] is None:
            raise InputError("The clip has no video.")
        found = media.probe(clip["video"], decode=decode)
        start, end = interval(clip)
        if start >= found.duration_s > 0:
            raise InputError(
                f"It starts at {start:g} s, after the end of its file at {found.duration_s:g} s."
            )
        if end is not None and not start < end:
            raise InputError(f"It starts at {start:g} s and ends at {end:g} s; the end must be later.")
        return {name: getattr(found, name) for name in OUTPUTS.names}

    return each_clip(batch, OUTPUTS, row)
