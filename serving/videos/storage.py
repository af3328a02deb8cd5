"""Files of videos: written whole or not at all, named by the server alone, one server at a time."""

import fcntl
import json
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from worldmodel.errors import OutputError
from worldmodel.io import TEMPORARY_PREFIX, atomic_file

LOG = logging.getLogger(__name__)

SUFFIXES = {"video": ".mp4", "thumbnail": ".thumbnail.jpg", "spritesheet": ".spritesheet.jpg"}
"""Files of a finished video, by variant."""
RECORD = ".json"
_ID = re.compile(r"video_[A-Za-z0-9_-]{22}")


def new_id() -> str:
    """Return a name that nobody can guess."""
    return f"video_{secrets.token_urlsafe(16)}"


class Storage:
    """A folder of records and videos.

    A file is written under a temporary name, flushed to the disk and then renamed: whoever finds it finds all
    of it, even after the process or the machine has died.
    """

    def __init__(self, folder: Path) -> None:
        """Take the folder for this process.

        Raises:
            OutputError: it cannot be written, or another server uses it.
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
        """Let another server have the folder."""
        os.close(self._lock)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield all readable records; unreadable ones are left where they are and logged."""
        for path in sorted(self.folder.glob(f"video_*{RECORD}")):
            identity = path.name.removesuffix(RECORD)
            if not _ID.fullmatch(identity):
                continue
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                record = None
            if isinstance(record, dict) and record.get("id") == identity:
                yield record
            else:
                LOG.warning("The record %s cannot be read and is left out.", path.name)

    def tidy(self, finished: Iterable[str]) -> None:
        """Remove half-written files, and files of videos that are not among the finished ones."""
        kept = set(finished)
        for path in self.folder.iterdir():
            identity, dot, suffix = path.name.partition(".")
            orphan = (
                _ID.fullmatch(identity) and f"{dot}{suffix}" in SUFFIXES.values() and identity not in kept
            )
            if path.name.startswith(TEMPORARY_PREFIX) or orphan:
                path.unlink(missing_ok=True)

    def path(self, identity: str, variant: str) -> Path:
        """Return where a file of a video is."""
        assert _ID.fullmatch(identity)
        return self.folder / f"{identity}{SUFFIXES[variant]}"

    def complete(self, identity: str) -> bool:
        """Whether all files of a video are there."""
        return all(self.path(identity, variant).is_file() for variant in SUFFIXES)

    def write_record(self, record: dict[str, Any]) -> None:
        """Write a video's record; it is on the disk when this returns."""
        text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
        with atomic_file(self.folder / f"{record['id']}{RECORD}", durable=True, mode=0o600) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def write(self, identity: str, variant: str, data: bytes) -> None:
        """Write a file of a video; it is on the disk when this returns."""
        with atomic_file(self.path(identity, variant), durable=True, mode=0o600) as temporary:
            temporary.write_bytes(data)

    def remove(self, identity: str) -> None:
        """Remove all that is kept of a video: its record first, for files without one are tidied away."""
        (self.folder / f"{identity}{RECORD}").unlink(missing_ok=True)
        for variant in SUFFIXES:
            self.path(identity, variant).unlink(missing_ok=True)
