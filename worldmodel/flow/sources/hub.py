"""Streamed data sets of the Hugging Face Hub whose rows name videos or images, or hold them."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from worldmodel.config.flow import FlowSourceConfig
from worldmodel.data.huggingface import TEXT_NAMES, VIDEO_NAMES, open_stream
from worldmodel.errors import ConfigError
from worldmodel.flow.catalog.records import NewClip
from worldmodel.flow.sources.rows import ADDRESSES, ClipRows


class HubListing:
    """An iterator over the clips of each row of a streamed data set.

    Args:
        name: name of the source.
        config: its settings.
        first: the row to begin with; without a bookmark, those before it are read over.
        bookmark: what the method returned behind the row before `first`.

    Raises:
        ConfigError: `datasets` is not installed, or there is no such data set, split or column.
    """

    def __init__(
        self, name: str, config: FlowSourceConfig, first: int, bookmark: dict[str, Any] | None = None
    ) -> None:
        self.path, self.key, self.number = config.path, f"sources.{name}", first
        dataset, features = open_stream(self.key, config.path, config.split)
        columns = list(features)
        named = {**_usual(features, config), **config.columns}
        root = config.root or os.path.abspath(os.path.expanduser(config.path))
        origin = f"{config.path}/{config.split}"
        self.rows = ClipRows(name, replace(config, columns=named), columns, root, origin)
        if bookmark is not None:
            dataset.load_state_dict(bookmark)
            self.dataset, self.read = dataset, iter(dataset)
        else:
            self.dataset = dataset.skip(first) if first else dataset
            self.read = iter(self.dataset)

    def __iter__(self) -> Iterator[list[NewClip]]:
        return self

    def __next__(self) -> list[NewClip]:
        """Return the clips of the next row."""
        try:
            row = next(self.read)
        except StopIteration:
            raise
        except Exception as error:  # every format raises types of its own
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{self.key}.path {self.path!r} cannot be read from row {self.number + 1} on: {reason}"
            ) from None
        clips = self.rows.clips(row, self.number)
        self.number += 1
        return clips

    def bookmark(self) -> dict[str, Any] | None:
        """Return where the next row is; None where the format of the data set has no such state."""
        try:
            return json.loads(json.dumps(self.dataset.state_dict()))
        except (AttributeError, TypeError):
            return None


def _usual(features: Mapping[str, Any], config: FlowSourceConfig) -> dict[str, str]:
    """Return the columns of files and texts, as far as types and usual names tell.

    A column that holds files comes before one of addresses: its files need no download.
    """
    if config.preset:
        return {}
    kinds = {column: _kind(feature) for column, feature in features.items()}
    usual = (*VIDEO_NAMES, *ADDRESSES)
    typed = [column for kind in ("Video", "Image") for column in kinds if kinds[column] == kind]
    binary = [column for column in kinds if kinds[column] == "binary"]
    named = sorted((column for column in binary if column in usual), key=usual.index)
    files = [*typed, *named]
    if not files and len(binary) == 1 and not any(column in features for column in ADDRESSES):
        files = binary
    found = {"address": files[0]} if files else {}
    text = next((column for column in TEXT_NAMES if column in features), None)
    return {**found, **({"text": text} if text else {})}


def _kind(feature: Any) -> str:
    """Return Video, Image, binary, or '' for the type of a column."""
    kind = type(feature).__name__
    if kind == "Value" and "binary" in str(getattr(feature, "dtype", "")):
        return "binary"
    return kind if kind in ("Video", "Image") else ""
