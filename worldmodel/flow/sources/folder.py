"""Folders of videos and images, here or in an object store, with or without a table of metadata."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from worldmodel.config.flow import FlowSourceConfig
from worldmodel.errors import ConfigError
from worldmodel.flow.records import NewClip, clip_id
from worldmodel.flow.sources import table

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""A table with the column `file_name`, as in video and image folders of the Hugging Face Hub."""
EXTENSIONS = (
    *(".mp4", ".mov", ".m4v", ".webm", ".mkv", ".avi", ".gif"),
    *(".png", ".jpg", ".jpeg", ".webp"),
)
MAX_TEXT_BYTES = 2**20


def listing(name: str, config: FlowSourceConfig, first: int) -> Iterator[list[NewClip]]:
    """Yield the files of a folder and of those inside it, sorted by name, from number `first` on.

    The text of a file is the content of the file of the same name that ends in .txt, if there is one.

    Raises:
        ConfigError: there is no such folder, or it has no videos or images.
    """
    import fsspec

    root = (
        config.path.rstrip("/") if "://" in config.path else os.path.abspath(os.path.expanduser(config.path))
    )
    try:
        storage, folder = fsspec.url_to_fs(root)
        found = sorted(storage.find(folder))
    except Exception as error:  # every storage raises types of its own
        raise ConfigError(f"sources.{name}.path {config.path!r} cannot be listed ({error}).") from None
    folder = folder.rstrip("/")
    inside = [path[len(folder) + 1 :] for path in found]
    if metadata := next((each for each in METADATA if each in inside), None):
        columns = {"address": "file_name", **config.columns}
        changed = dataclasses.replace(config, path=f"{root}/{metadata}", columns=columns)
        yield from table.listing(name, changed, first)
        return
    files = [path for path in inside if Path(path).suffix.lower() in EXTENSIONS]
    if not files:
        raise ConfigError(
            f"sources.{name}.path {config.path!r} has no videos or images ({', '.join(EXTENSIONS)})."
        )
    texts = {path for path in inside if path.endswith(".txt")}
    for path in files[first:]:
        row = {}
        if (text := str(Path(path).with_suffix(".txt"))) in texts:
            row["text"] = (
                storage.cat_file(f"{folder}/{text}", end=MAX_TEXT_BYTES).decode(errors="replace").strip()
            )
        address = f"{root}/{path}"
        yield [NewClip(clip_id(name, address), address, config.licence, row=row)]
