"""Stages that tests run, and a table of small files for them."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from sqlalchemy import text

from worldmodel.config import build
from worldmodel.config.flow import FlowConfig
from worldmodel.database import connect, transaction
from worldmodel.flow.stages.base import stage

CALLS = "FLOW_CALLS"
"""Variable with a file to which every call writes the stage and its clips."""


def called(name: str, batch: pa.RecordBatch) -> None:
    if path := os.environ.get(CALLS):
        with open(path, "a", encoding="utf-8") as file:
            file.write("".join(f"{name} {clip}\n" for clip in batch.column("clip").to_pylist()))


@stage(version="1", inputs=["address"], outputs=["video"], batch_size=4)
def read(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Read the file of each clip; drop those that are missing."""
    called("read", batch)
    paths = [Path(path) for path in batch.column("address").to_pylist()]
    content = [path.read_bytes() if path.exists() else None for path in paths]
    missing = [None if each is not None else "there is no such file" for each in content]
    return pa.record_batch(
        {
            "clip": batch.column("clip"),
            "video": pa.array(content, pa.binary()),
            "drop": pa.array(missing, pa.string()),
        }
    )


@stage(
    version="1", inputs=["video", "text"], outputs=["length", "digits"], uncounted=["wait_s"], batch_size=4
)
def measure(batch: pa.RecordBatch, *, least: int = 0, wait_s: float = 0.0) -> pa.RecordBatch:
    """Return the length of each file, and drop short ones."""
    called("measure", batch)
    time.sleep(wait_s)
    lengths = [len(video) for video in batch.column("video").to_pylist()]
    short = [f"{length} bytes, below {least}" if length < least else None for length in lengths]
    digits = [[int(d) for d in str(length)] for length in lengths]
    columns = {"clip": batch.column("clip"), "length": lengths, "digits": digits}
    return pa.record_batch({**columns, "drop": pa.array(short, pa.string())})


@stage(version="1", inputs=["address"], outputs=["odd"], batch_size=4)
def trouble(batch: pa.RecordBatch, *, how: str, where: str = "") -> pa.RecordBatch:
    """Fail in one of several ways at the clips whose address contains `where`."""
    called("trouble", batch)
    clips = batch.column("clip").to_pylist()
    hit = [where in address for address in batch.column("address").to_pylist()]
    retry: list[str | None] = [None] * len(clips)
    if any(hit):
        if how == "raise":
            raise RuntimeError("the clip is strange")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(60)
        if how == "fewer":
            return pa.record_batch({"clip": clips[:-1], "odd": [0] * (len(clips) - 1)})
        if how == "database":  # a file that is none
            transaction(
                connect(f"sqlite:///{batch.column('address')[0]}"), lambda db: db.execute(text("SELECT 1"))
            )
        if how == "retry":
            retry = ["the host is busy" if each else None for each in hit]
    odd = [len(clip) % 2 for clip in clips]
    return pa.record_batch({"clip": clips, "odd": odd, "retry": pa.array(retry, pa.string())})


@stage(version="1", inputs=["length"], outputs=["start_s", "end_s"], expands=True)
def halves(batch: pa.RecordBatch, *, parts: int = 2) -> pa.RecordBatch:
    """Divide every clip into parts of one second."""
    called("halves", batch)
    clips = [clip for clip in batch.column("clip").to_pylist() for _ in range(parts)]
    starts = [float(part) for _ in range(batch.num_rows) for part in range(parts)]
    return pa.record_batch({"parent": clips, "start_s": starts, "end_s": [start + 1 for start in starts]})


@stage(version="1", inputs=["video", "start_s"], outputs=["sum"])
class Sum:
    """Sum the bytes of each part's file."""

    def __init__(self, plus: int = 0) -> None:
        self.plus = plus

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        called("sum", batch)
        sums = [int(np.frombuffer(v, np.uint8).sum()) + self.plus for v in batch.column("video").to_pylist()]
        return pa.record_batch({"clip": batch.column("clip"), "sum": sums})


@stage(version="1", inputs=["text"], outputs=["fingerprint"], uncounted=["wait_s"], batch_size=3)
def given(batch: pa.RecordBatch, *, max_distance: int = 6, wait_s: float = 0.0) -> pa.RecordBatch:
    """Take fingerprints from the table, after a random time."""
    time.sleep(np.random.default_rng().uniform(0, 1) * wait_s)
    return pa.record_batch({"clip": batch.column("clip"), "fingerprint": batch.column("text")})


def write_table(folder: Path, count: int) -> Path:
    """Write files of 100, 101, … bytes and a table of them; return the table."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        (folder / f"{number}.bin").write_bytes(rng.bytes(100 + number))
        rows.append({"address": f"{number}.bin", "text": f"clip {number}"})
    table = folder / "clips.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return table


def flow_config(
    folder: Path, table: Path, stages: dict[str, dict[str, Any]] | None = None, **settings: Any
) -> FlowConfig:
    """Return a flow of the stages above over a table, in threads unless `executor` says otherwise."""
    chosen = {"read": {}, "measure": {}} if stages is None else stages
    named = {
        name: {"function": f"flow_stages:{'Sum' if name == 'sum' else name}", **each}
        for name, each in chosen.items()
    }
    values: dict[str, Any] = {
        "folder": str(folder),
        "executor": "threads",
        "sources": {"files": {"path": str(table), "columns": {"address": "address", "text": "text"}}},
        "stages": named,
        "segment_size": 8,
        "max_in_flight": 32,
        "retry_delay_s": 0.01,
        "pack": ["video", "text", "length", "sum"],
    }
    return build(FlowConfig, {**values, **settings})
