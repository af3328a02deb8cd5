"""Sources of a flow: lists of clips that are to be fetched, in an order that never changes."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from worldmodel.config.flow import FlowSourceConfig
from worldmodel.config.imports import import_object
from worldmodel.errors import ConfigError
from worldmodel.flow.catalog.records import NewClip

LISTINGS = {
    "table": "worldmodel.flow.sources.table:listing",
    "webdataset": "worldmodel.flow.sources.shards:listing",
    "huggingface": "worldmodel.flow.sources.hub:HubListing",
    "folder": "worldmodel.flow.sources.folder:FolderListing",
}
"""What is called with the name and the config of a source and its first row, by kind of source."""
BOOKMARKED = ("huggingface", "folder")
"""Kinds that take a bookmark, too."""


def open_listing(
    name: str, config: FlowSourceConfig, first: int, bookmark: Any = None
) -> Iterator[list[NewClip]]:
    """Yield the clips of every row of a source from row `first` on, always in the same order.

    A row that cannot be read gives a clip without an address, whose row has the reason as `error`; the first
    stage drops it. A stream has a method `bookmark`, whose value behind the last row spares the next listing
    from reading over the rows before `first`. A folder has one, too, by which the next listing sees whether
    it has other files before `first`; if so, it begins with row 0. Its attribute `first` says where it does.

    Raises:
        ConfigError: the source cannot be read, or lacks a column.
    """
    if config.kind not in LISTINGS:
        raise ConfigError(f"sources.{name}.kind is {config.kind!r}; use one of {', '.join(LISTINGS)}.")
    if not config.path:
        raise ConfigError(f"sources.{name}.path is empty; set it to a table, shards, a data set or a folder.")
    listing = import_object(LISTINGS[config.kind])
    return listing(name, config, first, *([bookmark] if config.kind in BOOKMARKED else []))


def source_digest(config: FlowSourceConfig) -> str:
    """Return a digest of the settings that say which rows a source has and what is in them."""
    facts = [config.kind, config.path, config.root, config.split, config.columns, config.preset]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
