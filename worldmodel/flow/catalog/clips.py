"""Recipes of clips from the columns that stages made: for training, and for stages that need their texts."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from worldmodel.actions import action_kinds
from worldmodel.config import SourceConfig, WorldModelConfig
from worldmodel.data.clips import Clip, Part, RoundFormat
from worldmodel.data.columns import RowReader, own_columns
from worldmodel.data.latents import LatentFormat, StoredLatents, StoredTexts
from worldmodel.errors import InputError

COLUMNS = ("row", "text", "caption", "events", "actions", "start_s", "end_s")
"""Columns that recipes are made of, beside the columns of files; a clip need not have all."""


class ClipReader:
    """Makes recipes of clips.

    Args:
        name: name of the source, for messages.
        config: its settings; `columns` may name columns of the clips' own sources.
        model: the model that the rounds are for.
    """

    def __init__(self, name: str, config: SourceConfig, model: WorldModelConfig) -> None:
        self.name, self.config, self.model = name, config, model
        self.rounds, self.latents = RoundFormat.of(model), LatentFormat.of(model)
        self.readers: dict[tuple[str, ...], RowReader] = {}

    def clip(self, id: str, columns: Mapping[str, Any], files: Mapping[str, Part | bytes]) -> Clip:
        """Return the recipe of a clip.

        Args:
            id: the clip.
            columns: those that are not binary; absent ones may be None.
            files: those that are, by column.

        Raises:
            InputError: a column cannot be read, or the model does not take the action.
        """
        row = clip_row(columns)
        start, end = (row.pop(name, None) for name in ("start", "end"))
        video = files.get("video") or Part(f"the video of clip {id}", 0, 0)  # may not be needed
        clip = self._reader(tuple(sorted(row))).clip(row, id, video=video)
        clip = replace(clip, start=start or 0.0, end=end, exact=False)
        if not self.config.precomputed:
            return clip
        if "latents" in files:
            clip = replace(clip, latents=StoredLatents(files["latents"], self.latents))
        if "text_states" in files:
            clip = replace(clip, text_states=StoredTexts(files["text_states"]))
        return clip

    def _reader(self, offered: tuple[str, ...]) -> RowReader:
        """Return the reader of rows with some columns."""
        if offered not in self.readers:
            own = own_columns(offered, self.model.action)
            columns = {field: column for field, column in self.config.columns.items() if column in offered}
            own.pop("video", None)
            config = dataclasses.replace(self.config, columns={**own, **columns})
            self.readers[offered] = RowReader(self.name, config, offered, self.rounds, self.model.action)
        return self.readers[offered]


def clip_row(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns of a clip as a row: columns of its table and of stages, with the names of a source.

    Its text are the events of its caption, if there are some, else the caption, else the text of its table.
    Its actions come from the column `actions`, if it has one.

    Raises:
        InputError: `actions` cannot be read.
    """
    stages = {name: value for name, value in columns.items() if name != "row" and value is not None}
    table = columns.get("row") or {}
    table = json.loads(table) if isinstance(table, str) else table  # rows of several types in a batch
    row = {**table, **stages}
    row["text"] = row.get("events") or row.get("caption") or row.get("text")
    row |= {"start": row.pop("start_s", None), "end": row.pop("end_s", None)}
    row |= action_fields(row.pop("actions", None))
    return {name: value for name, value in row.items() if value is not None}


def action_fields(actions: Any) -> dict[str, Any]:
    """Return the fields of a row for the column `actions`: a list with an action per round, or its JSON.

    Raises:
        InputError: it is something else.
    """
    try:
        listed = json.loads(actions) if isinstance(actions, str) else actions or []
        rounds = [{"text": each} if isinstance(each, str) else dict(each or {}) for each in listed]
    except (TypeError, ValueError):
        raise InputError(f"its actions {actions!r} are not a list with one per round") from None
    found = {kind.name: [each.get(kind.name) for each in rounds] for kind in action_kinds()}
    return {name: values for name, values in found.items() if any(value is not None for value in values)}
