"""Tables of addresses: csv, jsonl or parquet, in a file or at an address."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from worldmodel.config.flow import FlowSourceConfig
from worldmodel.data.tables import open_table
from worldmodel.errors import ConfigError, InputError
from worldmodel.flow.catalog.records import NewClip
from worldmodel.flow.sources.rows import ClipRows, bad_row


def listing(name: str, config: FlowSourceConfig, first: int) -> Iterator[list[NewClip]]:
    """Yield the clips of every row from row `first` on.

    Raises:
        ConfigError: the table cannot be read, or lacks a column.
    """
    with local_table(name, config.path) as path:
        table = open_table(path)
        try:
            rows = ClipRows(name, config, table.columns, config.root or parent(config.path))
            for number in range(first, len(table)):
                try:
                    row = table.row(number)
                except InputError as error:
                    yield [bad_row(name, number, str(error))]
                else:
                    yield rows.clips(row, number)
        finally:
            table.close()


@contextmanager
def local_table(name: str, address: str) -> Iterator[Path]:
    """Give a table as a file; one at an address is copied to a temporary file.

    Raises:
        ConfigError: it cannot be read.
    """
    if "://" not in address:
        if Path(address).expanduser().is_dir():
            raise ConfigError(f"sources.{name}.path {address!r} is a folder; use kind: folder.")
        yield Path(address).expanduser()
        return
    import fsspec

    suffix = Path(urlsplit(address).path).suffix
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"table{suffix}"
        try:
            with fsspec.open(address, "rb") as remote, path.open("wb") as file:
                shutil.copyfileobj(remote, file, 2**20)  # type: ignore[arg-type]
        except Exception as error:  # every storage raises types of its own
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"sources.{name}.path {address!r} cannot be read ({reason}).") from None
        yield path


def parent(path: str) -> str:
    """Return the folder of a file, or the address of the folder of an address."""
    return (
        path.rsplit("/", 1)[0]
        if "://" in path
        else os.path.dirname(os.path.abspath(os.path.expanduser(path)))
    )
