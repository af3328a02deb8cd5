"""Folders of videos and images, here or in an object store, with or without a table of metadata."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from worldmodel.config.flow import FlowSourceConfig
from worldmodel.errors import ConfigError
from worldmodel.flow.catalog.records import NewClip, clip_id
from worldmodel.flow.sources import table
from worldmodel.flow.text import is_odd, storable
from worldmodel.media.limits import IMAGE_SUFFIXES, VIDEO_SUFFIXES

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
"""A table with the column `file_name`, as in video and image folders of the Hugging Face Hub."""
EXTENSIONS = (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES)
MAX_TEXT_BYTES = 2**20


class FolderListing:
    """The files of a folder and of those inside it, sorted by name.

    The text of a file is the content of the file of the same name that ends in .txt, if there is one.

    Args:
        name: name of the source.
        config: its settings.
        first: the file to begin with, if `bookmark` says that those before it are the same.
        bookmark: what the method returned behind the file before `first`.

    Raises:
        ConfigError: there is no such folder, or it has no videos or images.
    """

    def __init__(
        self, name: str, config: FlowSourceConfig, first: int, bookmark: dict[str, Any] | None = None
    ) -> None:
        self.name, self.config = name, config
        self.digest: Any = None
        """Of the names of all files up to the last one that was listed."""
        inside = self._find()
        if metadata := next((each for each in METADATA if each in inside), None):
            columns = {"address": "file_name", **config.columns}
            changed = dataclasses.replace(config, path=f"{self.root}/{metadata}", columns=columns)
            self.first = 0 if bookmark else first
            self.rows = table.listing(name, changed, self.first)
            return
        files = [path for path in inside if Path(path).suffix.lower() in EXTENSIONS]
        if not files:
            raise ConfigError(
                f"sources.{name}.path {config.path!r} has no videos or images ({', '.join(EXTENSIONS)})."
            )
        self._add(*files[:first])
        if first and self.bookmark() != bookmark:  # files were added or removed between them
            first, self.digest = 0, None
        self.first = first
        texts = {path for path in inside if path.endswith(".txt")}
        self.rows = (self._clips(path, texts) for path in files[first:])

    def __iter__(self) -> Iterator[list[NewClip]]:
        return self

    def __next__(self) -> list[NewClip]:
        return next(self.rows)

    def bookmark(self) -> dict[str, Any] | None:
        """Return what the files that were listed are known by; None for a table of metadata."""
        return None if self.digest is None else {"files": self.digest.hexdigest()}

    def _find(self) -> list[str]:
        """Return the names of all files, sorted."""
        import fsspec

        path = self.config.path
        self.root = path.rstrip("/") if "://" in path else os.path.abspath(os.path.expanduser(path))
        try:
            self.storage, folder = fsspec.url_to_fs(self.root)
            found = sorted(self.storage.find(folder))
        except Exception as error:  # every storage raises types of its own
            raise ConfigError(f"sources.{self.name}.path {path!r} cannot be listed ({error}).") from None
        self.folder = folder.rstrip("/")
        return [each[len(self.folder) + 1 :] for each in found]

    def _add(self, *paths: str) -> None:
        """Add the names of files to the digest."""
        self.digest = self.digest or hashlib.sha256()
        for path in paths:
            self.digest.update(json.dumps(path).encode())

    def _clips(self, path: str, texts: AbstractSet[str]) -> list[NewClip]:
        self._add(path)
        address = f"{self.root}/{path}"
        identity = clip_id(self.name, address)
        if is_odd(address):
            error = f"the file name {path!r} is not valid in UTF-8"
            return [NewClip(identity, "", self.config.licence, row={"error": error})]
        row = {}
        if (text := str(Path(path).with_suffix(".txt"))) in texts:
            data = self.storage.cat_file(f"{self.folder}/{text}", end=MAX_TEXT_BYTES)
            row["text"] = storable(data.decode(errors="replace").strip())
        return [NewClip(identity, address, self.config.licence, row=row)]
