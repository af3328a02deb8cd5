"""Sources of a flow: lists of clips that are to be fetched."""

import json
from collections.abc import Iterator
from pathlib import Path

from worldmodel.config.flow import FlowSourceConfig
from worldmodel.errors import ConfigError
from worldmodel.flow.records import NewClip, clip_id


def open_listing(name: str, config: FlowSourceConfig, first: int) -> Iterator[list[NewClip]]:
    """Yield the clips of every row of a source from row `first` on, always in the same order.

    Raises:
        ConfigError: the source cannot be read, or lacks a column.
    """
    if config.kind != "table":
        raise ConfigError(f"sources.{name}.kind is {config.kind!r}; use table.")
    path = Path(config.path).expanduser()
    root = config.root or str(path.absolute().parent)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        if number >= first:
            row = json.loads(line)
            address = str(row.pop(config.columns.get("address", "address")))
            if "://" not in address:
                address = f"{root}/{address}"
            yield [NewClip(clip_id(name, address), address, row.get("licence", config.licence), row=row)]
