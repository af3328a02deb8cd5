"""Export of a flow's log to tar shards and a table that do without the flow."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worldmodel.errors import OutputError
from worldmodel.flow.buffer.tar import tar_bytes
from worldmodel.flow.clips import clip_row
from worldmodel.flow.log import ClipFiles, Log
from worldmodel.flow.pack import member_extension, to_json
from worldmodel.flow.storage import Storage
from worldmodel.io import atomic_file

TABLE = "clips.jsonl"


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
                rows.write(to_json({"shard": shard, "key": clip.id, **row}) + b"\n")
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
