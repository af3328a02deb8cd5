"""Video files on disk: atomic writes, server-generated names, one server per folder."""

import fcntl
import json
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import read_array

from worldmodel.errors import OutputError
from worldmodel.io import TEMPORARY_PREFIX, atomic_file

LOG = logging.getLogger(__name__)

SUFFIXES = {"video": ".mp4", "thumbnail": ".thumbnail.jpg", "spritesheet": ".spritesheet.jpg"}
"""File suffixes of a completed video, by variant."""
RECORD = ".json"
INPUT = ".input.npy"
"""Suffix of the frames that a video starts from, uint8 `[t, h, w, 3]`."""
_ID = re.compile(r"video_[A-Za-z0-9_-]{22}")


def new_id() -> str:
    """Return an unguessable id."""
    return f"video_{secrets.token_urlsafe(16)}"


class Storage:
    """A folder of records and videos.

    A file is written under a temporary name, flushed to the disk and then renamed, so a file that exists is
    complete, even after a crash of the process or the machine.
    """

    def __init__(self, folder: Path) -> None:
        """Lock the folder for this process.

        Raises:
            OutputError: the folder cannot be written, or another server uses it.
        """
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OutputError(
                f"The data folder {str(folder)!r} cannot be written ({error.strerror}); choose another."
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise OutputError(
                f"Another server uses the data folder {str(folder)!r}; stop it or choose another folder."
            ) from None

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield all readable records; unreadable ones are logged and kept."""
        for path in sorted(self.folder.glob(f"video_*{RECORD}")):
            video_id = path.name.removesuffix(RECORD)
            if not _ID.fullmatch(video_id):
                continue
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                record = None
            if isinstance(record, dict) and record.get("id") == video_id:
                yield record
            else:
                LOG.warning("The record %s cannot be read and is ignored.", path.name)

    def delete_orphans(self, ordered: Iterable[str], completed: Iterable[str]) -> None:
        """Delete temporary files, inputs without an order, and files of videos that are not completed."""
        inputs, results = set(ordered), set(completed)
        kept = {INPUT: inputs, **{suffix: results for suffix in SUFFIXES.values()}}
        for path in self.folder.iterdir():
            video_id, dot, suffix = path.name.partition(".")
            orphan = _ID.fullmatch(video_id) and video_id not in kept.get(f"{dot}{suffix}", {video_id})
            if path.name.startswith(TEMPORARY_PREFIX) or orphan:
                path.unlink(missing_ok=True)

    def path(self, video_id: str, variant: str) -> Path:
        """Return the path of a video's file."""
        assert _ID.fullmatch(video_id)
        return self.folder / f"{video_id}{SUFFIXES[variant]}"

    def complete(self, video_id: str) -> bool:
        """Whether all files of a video exist."""
        return all(self.path(video_id, variant).is_file() for variant in SUFFIXES)

    def write_record(self, record: dict[str, Any]) -> None:
        """Write a video's record durably."""
        text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
        with atomic_file(self.folder / f"{record['id']}{RECORD}", durable=True, mode=0o600) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def write_order(self, record: dict[str, Any], frames: np.ndarray | None) -> None:
        """Write the frames that a video starts from and its record durably; the record comes last."""
        if frames is not None:
            with atomic_file(self._input(record["id"]), durable=True, mode=0o600) as temporary:
                np.save(temporary, frames, allow_pickle=False)
        self.write_record(record)

    def read_input(self, video_id: str) -> np.ndarray | None:
        """Return the frames that a video starts from, uint8 `[t, h, w, 3]`; None if it starts from text."""
        if not self.has_input(video_id):
            return None
        with self._input(video_id).open("rb") as file:
            return read_array(file, allow_pickle=False)

    def has_input(self, video_id: str) -> bool:
        """Whether the frames that a video starts from are stored."""
        return self._input(video_id).is_file()

    def write(self, video_id: str, variant: str, data: bytes) -> None:
        """Write a file of a video durably."""
        with atomic_file(self.path(video_id, variant), durable=True, mode=0o600) as temporary:
            temporary.write_bytes(data)

    def remove(self, video_id: str) -> None:
        """Delete a video; the record first, since `delete_orphans` removes files without one."""
        (self.folder / f"{video_id}{RECORD}").unlink(missing_ok=True)
        self._input(video_id).unlink(missing_ok=True)
        for variant in SUFFIXES:
            self.path(video_id, variant).unlink(missing_ok=True)

    def _input(self, video_id: str) -> Path:
        return self.folder / f"{video_id}{INPUT}"
