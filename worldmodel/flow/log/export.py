"""Export of a flow's log to tar shards, and of its catalog to a table, that do without the flow."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from worldmodel.errors import OutputError
from worldmodel.flow.buffer.tar import tar_bytes
from worldmodel.flow.catalog.catalog import Catalog
from worldmodel.flow.catalog.chain import PACK
from worldmodel.flow.catalog.clip_table import ClipEntry, ClipTable
from worldmodel.flow.catalog.clips import clip_row
from worldmodel.flow.errors import FlowError
from worldmodel.flow.log.log import ClipFiles, Log
from worldmodel.flow.log.pack import member_extension, to_json
from worldmodel.flow.storage import Storage
from worldmodel.io import atomic_file

TABLE = "clips.jsonl"
FIXED = pa.schema(
    {
        **dict.fromkeys(("clip", "verdict", "stage", "reason", "source", "parent"), pa.string()),
        **dict.fromkeys(("address", "licence"), pa.string()),
        **dict.fromkeys(("start_s", "end_s"), pa.float64()),
        "ordinal": pa.int64(),
        "row": pa.string(),
    }
)
"""Columns of every table of clips; the stages' columns follow."""


def export_log(address: str, folder: str | Path) -> tuple[int, int]:
    """Write the sealed segments of a log as WebDataset shards, and a table of their clips.

    The shards `000000.tar`, … are a data source of the kind `webdataset`: the JSON of a clip has the columns
    of its table, those of the stages, and its text under `text`. `clips.jsonl` has the same, with the `shard`
    and the `key` of each clip.

    Args:
        address: the log; it may still grow, and what is sealed is written.
        folder: an empty or a new folder.

    Returns:
        Number of shards and of clips.

    Raises:
        ConfigError: there is no such log.
        FlowError: a segment cannot be read.
        OutputError: the folder is not empty, or cannot be written.
    """
    log, target = Log(address), Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OutputError(f"{str(target)!r} is not an empty folder; name another.")
    number = clips = 0
    with atomic_file(target / TABLE) as table, table.open("wb") as rows:
        while log.sealed(number):
            shard, members = f"{number:06d}.tar", []
            for clip in log.segment(number):
                row, binary = _contents(log.storage, clip)
                rows.write(to_json({**row, "shard": shard, "key": clip.id}) + b"\n")
                members.append((f"{clip.id}.json", to_json(row)))
                members += [(f"{clip.id}.{member_extension(name)}", data) for name, data in binary.items()]
                clips += 1
            with atomic_file(target / shard) as temporary:
                temporary.write_bytes(tar_bytes(members)[0])
            number += 1
    return number, clips


def _contents(storage: Storage, clip: ClipFiles) -> tuple[Mapping[str, Any], dict[str, bytes]]:
    file = clip.file.rsplit("/", 1)[-1]
    parts = {name: storage.read(file, start, start + size) for name, (start, size) in clip.parts.items()}
    return clip_row(json.loads(parts.pop("json"))), parts


def export_clips(catalog: Catalog, path: str | Path) -> int:
    """Write all clips of a catalog, with their verdicts, as a Parquet table, a batch at a time.

    Its columns are those of `FIXED` (`row` is JSON: what the clip's own table says of it), the text, and
    those of the stages that are not binary; one without any value is left out. Values that are neither text,
    numbers nor booleans, or not all of one kind, are JSON.

    Args:
        catalog: an open catalog, also of a flow that runs.
        path: the file, which is replaced.

    Returns:
        Number of clips.

    Raises:
        FlowError: a running flow has added values of another kind meanwhile.
        OutputError: the file cannot be written.
    """
    table, count = ClipTable(catalog), 0
    columns = ["text", *(name for link in catalog.chain.links for name in link.stage.outputs)]
    columns = [name for name in dict.fromkeys(columns) if name not in FIXED.names]
    kinds: dict[str, set[type]] = {name: set() for name in columns}
    for entries in table.pages():
        for name, values in _columns(catalog, entries, columns).items():
            kinds[name] |= {_kind(value) for value in values if value is not None}
    types = {name: _arrow_type(found) for name, found in kinds.items() if found}
    schema = pa.schema([*FIXED, *types.items()])
    with atomic_file(path) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for entries in table.pages():
            values = _columns(catalog, entries, ["row", *types])
            values |= {name: [getattr(each, name) for each in entries] for name in FIXED.names[1:-1]}
            values["clip"] = [each.id for each in entries]
            arrays = [_array(field.name, values[field.name], field.type) for field in schema]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
            count += len(entries)
    return count


def _columns(catalog: Catalog, entries: Sequence[ClipEntry], columns: Sequence[str]) -> dict[str, list[Any]]:
    """Return columns of clips as a stage behind the last one would see them."""
    return catalog.columns([each.id for each in entries], columns, PACK)[0]


def _kind(value: Any) -> type:
    """Return the type of a value that a column of its own type can hold, or `object`."""
    fits = type(value) in (bool, float, str) or (type(value) is int and abs(value) < 2**63)
    return type(value) if fits else object


def _arrow_type(kinds: set[type]) -> pa.DataType:
    if kinds <= {int, float}:
        return pa.float64() if float in kinds else pa.int64()
    return pa.bool_() if kinds == {bool} else pa.string()


def _array(name: str, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_string(kind):
        texts = (each if each is None or isinstance(each, str) else to_json(each).decode() for each in values)
        return pa.array(texts, kind)
    try:
        return pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        raise FlowError(f"The column {name} got values of another kind meanwhile; export again.") from None
