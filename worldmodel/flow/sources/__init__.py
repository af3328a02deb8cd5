"""Sources of a flow: lists of clips that are to be fetched, in an order that never changes."""

import hashlib
import json
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from worldmodel.config.flow import FlowSourceConfig
from worldmodel.errors import ConfigError
from worldmodel.flow.catalog.records import NewClip

LISTINGS = {
    "table": "worldmodel.flow.sources.table",
    "webdataset": "worldmodel.flow.sources.shards",
    "huggingface": "worldmodel.flow.sources.hub",
    "folder": "worldmodel.flow.sources.folder",
}
"""Modules with a function `listing(name, config, first)`, by kind of source."""
BOOKMARKED = ("huggingface", "folder")
"""Kinds whose function takes a bookmark, too."""


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
    module = import_module(LISTINGS[config.kind])
    return module.listing(name, config, first, *([bookmark] if config.kind in BOOKMARKED else []))


def source_digest(config: FlowSourceConfig) -> str:
    """Return a digest of the settings that say which rows a source has and what is in them."""
    facts = [config.kind, config.path, config.root, config.split, config.columns, config.preset]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
