"""Shards of WebDataset, here, over http(s) or in an object store: each video is a byte range of its shard."""

import json
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

from worldmodel.config.flow import FlowSourceConfig
from worldmodel.data.clips import Part
from worldmodel.data.tar import FRAMES, JSON, MAX_TEXT_BYTES, TEXT, VIDEO, ByteRange, find_shards, samples
from worldmodel.errors import ConfigError, InputError
from worldmodel.flow.catalog.records import NewClip, clip_id
from worldmodel.flow.sources.rows import plain
from worldmodel.flow.text import is_odd, storable

log = logging.getLogger(__name__)


def listing(name: str, config: FlowSourceConfig, first: int) -> Iterator[list[NewClip]]:
    """Yield the videos of all shards from number `first` on, with their json and txt parts.

    `sources.NAME.path` may be a pattern: `shards/*.tar`, or `https://host/{000..127}.tar`.

    Raises:
        ConfigError: no shard matches, or one is not a tar file, compressed or cut off.
    """
    shards = find_shards(config.path)
    if not shards:
        raise ConfigError(f"sources.{name}.path {config.path!r} matches no file; set it to tar files.")
    number, passed = 0, Counter[str]()
    for shard in shards:
        for sample in samples(shard, passed):
            if VIDEO in sample:
                if number >= first:
                    yield [_clip(name, config, shard, sample)]
                number += 1
            else:
                passed["clips of single images" if FRAMES in sample else "samples without a video"] += 1
    if passed:
        kinds = ", ".join(f"{count} {what}" for what, count in passed.most_common(5))
        log.warning("In the shards of %s, what no clip is made of: %s.", name, kinds)


def _clip(name: str, config: FlowSourceConfig, shard: str, sample: dict[str, ByteRange]) -> NewClip:
    address = f"{shard}#{sample[VIDEO].offset}+{sample[VIDEO].size}"
    identity = clip_id(name, address)
    row: dict[str, Any] = {}
    try:
        if JSON in sample:
            found = json.loads(_read(shard, sample[JSON]))
            row = plain(found) if isinstance(found, dict) else {}
        if TEXT in sample:
            text = _read(shard, sample[TEXT]).decode(errors="replace").strip()
            row.setdefault("text", storable(text))
        error = "the name of its shard is not valid in UTF-8" if is_odd(address) else ""
    except (InputError, ValueError, RecursionError) as failure:
        error = f"its json or txt cannot be read ({failure})"
    if error:
        return NewClip(identity, "", config.licence, row={"error": storable(f"{address!r}: {error}")})
    for field, column in config.columns.items():
        if column in row:
            row[field] = row[column]
    licence, start, end = (row.pop(field, None) for field in ("licence", "start", "end"))
    start_s, end_s = (_seconds(each) for each in (start, end))
    return NewClip(identity, address, str(licence or config.licence), start_s, end_s, row)


def _seconds(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


def _read(shard: str, part: ByteRange) -> bytes:
    if part.size > MAX_TEXT_BYTES:
        raise InputError(f"it is larger than {MAX_TEXT_BYTES // 2**20} MiB")
    return Part(shard, part.offset, part.size).read()
