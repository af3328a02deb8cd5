"""Clips from the rows of a table."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from worldmodel.config.flow import FlowSourceConfig
from worldmodel.data.columns import (
    PRESETS,
    Preset,
    Row,
    check_column,
    count_segments,
    parse_seconds,
    source_fields,
)
from worldmodel.data.columns import parse_segment as parse_segment
from worldmodel.errors import ConfigError, InputError
from worldmodel.flow.catalog.records import NewClip, clip_id
from worldmodel.flow.text import is_odd, storable, storable_json

ADDRESSES = ("address", "url", "contentUrl", "video", "path", "file", "file_name", "image")
"""Usual names of the column of addresses; the first that a table has is used."""
MAX_ROW_BYTES = 100_000


class ClipRows:
    """Makes clips of rows.

    Args:
        name: name of the source.
        config: its settings.
        offered: columns of the table; None: not known before its rows.
        root: folder or address of relative addresses.
        origin: address of the table, for those of files that its rows hold; empty takes the source's path.

    Raises:
        ConfigError: a preset or a column does not exist, or no column of addresses is known.
    """

    def __init__(
        self,
        name: str,
        config: FlowSourceConfig,
        offered: Sequence[str] | None,
        root: str,
        origin: str = "",
    ) -> None:
        key = f"sources.{name}"
        known = [each for each, preset in PRESETS.items() if preset.address]
        if config.preset and config.preset not in known:
            raise ConfigError(f"{key}.preset is {config.preset!r}; use {', '.join(known)}.")
        preset: Preset | None = PRESETS.get(config.preset)
        self.columns = {**({"address": preset.address, **preset.columns} if preset else {}), **config.columns}
        self.segments = preset.segments if preset else ""
        if offered is not None:
            if "address" not in self.columns:
                found = next((column for column in ADDRESSES if column in offered), None)
                if found is None:
                    raise ConfigError(
                        f"{key} has no known column of addresses; set columns.address to one of "
                        f"{', '.join(offered)}."
                    )
                self.columns["address"] = found
            contents = ("licence", *(field for field in source_fields() if field != "video"))
            self.columns = {**{field: field for field in contents if field in offered}, **self.columns}
            for field, column in self.columns.items():
                if field not in ("address", *contents):
                    raise ConfigError(f"{key}.columns has {field!r}; use address, {', '.join(contents)}.")
                check_column(f"{key}.columns.{field}", column, offered)
            if self.segments:
                check_column(f"{key}.preset", self.segments, offered)
        self.name, self.config, self.root = name, config, root.rstrip("/")
        self.origin = origin or config.path

    def clips(self, row: Row, number: int) -> list[NewClip]:
        """Return the clips of a row; one that cannot be read is a clip that says why."""
        try:
            return self._clips(row, number)
        except InputError as error:
            return [bad_row(self.name, number, str(error))]

    def _clips(self, row: Row, number: int) -> list[NewClip]:
        address, content = self._file(row, number)
        licence = storable(str(self._cell(row, "licence") or self.config.licence))
        used = {self.columns["address"], self.columns.get("licence"), self.columns.get("text")}
        facts = plain({column: value for column, value in row.items() if column not in used})
        if not self.segments:
            start, end = (parse_seconds(self._cell(row, field)) for field in ("start", "end"))
            found = self._clip(address, licence, start, end, {**facts, **self._mapped(row)})
            return [replace(found, content=content)]
        facts.pop(self.segments, None)
        clips = []
        for part in range(count_segments(row, self.segments)):
            (start, end), text = parse_segment(row[self.segments], self._cell(row, "text"), part)
            clips.append(self._clip(address, licence, start, end, {**facts, "text": storable(text)}))
        return [replace(clip, content=content) for clip in clips]

    def _file(self, row: Row, number: int) -> tuple[str, bytes | None]:
        """Return the address of a row's file, and the file itself where the row holds it.

        The address of a file in a row is that of the row, `ORIGIN#INDEX`.
        """
        value = self._cell(row, "address")
        if isinstance(value, Mapping):  # of type Video or Image
            value = value.get("path") if value.get("bytes") is None else value["bytes"]
        if isinstance(value, bytes):
            return f"{self.origin}#{number}", value
        if not isinstance(value, str) or not value.strip():
            raise InputError("it has no address")
        if is_odd(value):
            raise InputError(f"its address {value[:200]!r} is not valid in UTF-8, or has a NUL")
        if "::" in value and not value.startswith(("http://", "https://")):
            raise InputError(f"its file {value!r} is inside an archive")
        return resolve(self.root, value.strip()), None

    def _clip(
        self, address: str, licence: str, start: float | None, end: float | None, row: dict[str, Any]
    ) -> NewClip:
        if end is not None and not (start or 0.0) < end:
            raise InputError(f"it ends at {end:g} s, which is not after its start at {start or 0:g} s")
        return NewClip(clip_id(self.name, address, start, end), address, licence, start, end, row)

    def _mapped(self, row: Row) -> dict[str, Any]:
        """Return the cells of text and actions under the names of their fields."""
        fields = [field for field in self.columns if field not in ("address", "licence", "start", "end")]
        found = {field: self._cell(row, field) for field in fields}
        return plain({field: value for field, value in found.items() if value is not None})

    def _cell(self, row: Row, field: str) -> Any:
        value = row.get(self.columns.get(field, ""))
        return None if value == "" else value


def bad_row(source: str, number: int, reason: str) -> NewClip:
    """Return a clip in place of a row that cannot be read."""
    return NewClip(clip_id(source, number), "", row={"error": storable(f"row {number + 1}: {reason}")})


def resolve(root: str, address: str) -> str:
    """Return an address relative to a folder or an address."""
    return address if "://" in address or os.path.isabs(address) else f"{root}/{address}"


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a row can be stored as JSON: no bytes, no large values, no halves of surrogate pairs."""
    found = {}
    for name, value in row.items():
        try:
            text = json.dumps(value, default=_as_text, allow_nan=False)
            if len(text) <= MAX_ROW_BYTES:
                stored = json.loads(text)
                found[storable(str(name))] = storable_json(stored) if "\\u" in text else stored
        except (TypeError, ValueError, RecursionError):
            continue
    return found


def _as_text(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError
    return str(value)
