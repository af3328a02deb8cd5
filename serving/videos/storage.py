"""Video files on disk: atomic writes, server-generated names; replicas share the folder."""

import errno
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.lib.format import read_array

from worldmodel.errors import OutputError
from worldmodel.io import TEMPORARY_PREFIX, atomic_file

RESULTS = {"video": ".mp4", "thumbnail": ".thumbnail.jpg", "spritesheet": ".spritesheet.jpg"}
"""File suffixes of a completed video, by variant."""
SUFFIXES = {"input": ".input.npy", **RESULTS}
"""Those and that of the frames that a video starts from, uint8 `[t, h, w, 3]`."""
ORPHAN_AGE_S = 3600.0
"""Age from which a file that belongs to no order is deleted."""
_ID = re.compile(r"video_[A-Za-z0-9_-]{22}")


def new_id() -> str:
    """Return an unguessable id."""
    return f"video_{secrets.token_urlsafe(16)}"


class Storage:
    """A folder of videos.

    A file is written under a temporary name, flushed to the disk and then renamed, so a file that exists is
    complete, even after a crash of the process or the machine.
    """

    def __init__(self, folder: Path) -> None:
        """Create the folder.

        Raises:
            OutputError: the path is not a folder, or its disk is full.
        """
        self.folder = folder
        self.obstacle: str | None = None
        """Why nothing can be written: the disk is read-only, or the folder belongs to somebody else."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise OutputError(
                    f"The data folder {str(folder)!r} cannot be written ({error.strerror}); choose another."
                ) from None
            self.obstacle = str(error.strerror)

    def identity(self) -> str:
        """Return a random id that the folder has from its first use."""
        path, written = self.folder / ".id", self.folder / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        if not path.exists():
            written.write_text(secrets.token_urlsafe(12), encoding="utf-8")
            with suppress(FileExistsError):  # another server, which starts at the same time, has made it
                os.link(written, path)
            written.unlink()
        return path.read_text("utf-8")

    def delete_orphans(self, ordered: Iterable[str], completed: Iterable[str]) -> None:
        """Delete old temporary files, inputs without an order, and files of videos that are not completed.

        New ones may be those that another server is writing.
        """
        if self.obstacle is not None:
            return
        inputs, results = set(ordered), set(completed)
        kept = {suffix: inputs if name == "input" else results for name, suffix in SUFFIXES.items()}
        for path in self.folder.iterdir():
            video_id, dot, suffix = path.name.partition(".")
            orphan = _ID.fullmatch(video_id) and video_id not in kept.get(f"{dot}{suffix}", {video_id})
            if path.name.startswith(TEMPORARY_PREFIX) or orphan:
                with suppress(FileNotFoundError):  # another server has deleted it
                    if time.time() - path.stat().st_mtime > ORPHAN_AGE_S:
                        path.unlink()

    def path(self, video_id: str, variant: str) -> Path:
        """Return the path of a video's file."""
        assert _ID.fullmatch(video_id)
        return self.folder / f"{video_id}{SUFFIXES[variant]}"

    def complete(self, video_id: str) -> bool:
        """Whether all files of a video exist."""
        return all(self.path(video_id, variant).is_file() for variant in RESULTS)

    def has_input(self, video_id: str) -> bool:
        """Whether the frames that a video starts from are stored."""
        return self.path(video_id, "input").is_file()

    def read_input(self, video_id: str) -> np.ndarray | None:
        """Return the frames that a video starts from, uint8 `[t, h, w, 3]`; None if it starts from text."""
        if not self.has_input(video_id):
            return None
        with self.path(video_id, "input").open("rb") as file:
            return read_array(file, allow_pickle=False)

    def write(self, video_id: str, variant: str, data: bytes | np.ndarray) -> None:
        """Write a file of a video durably."""
        with atomic_file(self.path(video_id, variant), durable=True, mode=0o600) as temporary:
            if isinstance(data, bytes):
                temporary.write_bytes(data)
            else:
                np.save(temporary, data, allow_pickle=False)

    def remove(self, video_id: str) -> None:
        """Delete the files of a video."""
        for variant in SUFFIXES:
            path = self.path(video_id, variant)
            if path.exists():  # on a disk that is read-only, deleting nothing is an error, too
                path.unlink(missing_ok=True)
