"""Shards of WebDataset, here, over http(s) or in an object store: each video is a byte range of its shard."""

import json
from collections.abc import Iterator
from typing import Any

from worldmodel.config.flow import FlowSourceConfig
from worldmodel.data.clips import Part
from worldmodel.data.tar import JSON, MAX_TEXT_BYTES, TEXT, VIDEO, ByteRange, find_shards, samples
from worldmodel.errors import ConfigError, InputError
from worldmodel.flow.records import NewClip, clip_id
from worldmodel.flow.sources.rows import plain


def listing(name: str, config: FlowSourceConfig, first: int) -> Iterator[list[NewClip]]:
    """Yield the videos of all shards from number `first` on, with their json and txt parts.

    `sources.NAME.path` may be a pattern: `shards/*.tar`, or `https://host/{000..127}.tar`.

    Raises:
        ConfigError: no shard matches, or one is not a tar file, compressed or cut off.
    """
    shards = find_shards(config.path)
    if not shards:
        raise ConfigError(f"sources.{name}.path {config.path!r} matches no file; set it to tar files.")
    number = 0
    for shard in shards:
        for sample in samples(shard):
            if VIDEO in sample:
                if number >= first:
                    yield [_clip(name, config, shard, sample)]
                number += 1


def _clip(name: str, config: FlowSourceConfig, shard: str, sample: dict[str, ByteRange]) -> NewClip:
    address = f"{shard}#{sample[VIDEO].offset}+{sample[VIDEO].size}"
    row: dict[str, Any] = {}
    try:
        if JSON in sample:
            found = json.loads(_read(shard, sample[JSON]))
            row = plain(found) if isinstance(found, dict) else {}
        if TEXT in sample:
            row.setdefault("text", _read(shard, sample[TEXT]).decode(errors="replace").strip())
    except (InputError, ValueError) as error:
        row = {"error": f"its json or txt cannot be read ({error})"}
    for field, column in config.columns.items():
        if column in row:
            row[field] = row[column]
    licence, start, end = (row.pop(field, None) for field in ("licence", "start", "end"))
    start_s, end_s = (float(each) if isinstance(each, int | float) else None for each in (start, end))
    return NewClip(clip_id(name, address), address, str(licence or config.licence), start_s, end_s, row)


def _read(shard: str, part: ByteRange) -> bytes:
    if part.size > MAX_TEXT_BYTES:
        raise InputError(f"it is larger than {MAX_TEXT_BYTES // 2**20} MiB")
    return Part(shard, part.offset, part.size).read()
