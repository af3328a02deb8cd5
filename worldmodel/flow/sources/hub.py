"""Streamed data sets of the Hugging Face Hub whose rows name videos or images by address or by file."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from worldmodel.config.flow import FlowSourceConfig
from worldmodel.errors import ConfigError, InputError
from worldmodel.flow.records import NewClip
from worldmodel.flow.sources.rows import ClipRows, bad_row


def listing(name: str, config: FlowSourceConfig, first: int) -> Iterator[list[NewClip]]:
    """Yield the clips of every row from row `first` on; rows before it are skipped without fetching files.

    Raises:
        ConfigError: `datasets` is not installed, or there is no such data set, split or column.
    """
    key = f"sources.{name}"
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{key} requires datasets: pip install 'worldmodel[data]'.") from None
    try:
        dataset = datasets.load_dataset(config.path, split=config.split, streaming=True)
        if dataset.features is not None:  # columns of text have none to decode
            dataset = dataset.decode(False)
        columns = list(dataset.features or next(iter(dataset)))
    except Exception as error:  # missing, private, offline and damaged data sets raise many types
        reason = " ".join(str(error).split()) or "it has no rows"
        raise ConfigError(f"{key}.path {config.path!r} cannot be opened: {reason}") from None
    root = config.root or os.path.abspath(os.path.expanduser(config.path))
    rows = ClipRows(name, config, columns, root)
    column = rows.columns["address"]
    for number, row in enumerate(dataset.skip(first), start=first):
        try:
            yield rows.clips({**row, column: _address(row[column])}, number)
        except InputError as error:
            yield [bad_row(name, number, str(error))]


def _address(value: Any) -> str | None:
    """Return the address in a cell: text, or the file of a cell of type Video or Image."""
    if isinstance(value, Mapping):
        if not value.get("path") or value.get("bytes"):
            raise InputError("it contains its file instead of naming it; train on the data set itself")
        value = value["path"]
    if isinstance(value, str) and "::" in value:
        raise InputError(f"its file {value!r} is inside an archive")
    return value
