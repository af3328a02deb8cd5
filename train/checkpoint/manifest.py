"""What a checkpoint consists of: `manifest.json`, which is written last and holds a digest of every file.

A folder is a checkpoint only if its files are those of the manifest, byte for byte: a run that was killed
while it wrote, a full disk, a copy that broke off and a flipped bit are all seen before a tensor is read.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from worldmodel.errors import ModelError

FORMAT = 2
NAME = "manifest.json"
THREADS = 8


@dataclass(frozen=True)
class File:
    """A file of tensors as it was written."""

    name: str
    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "File":
        """Measure a file."""
        with path.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        return cls(path.name, path.stat().st_size, digest)


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint: where the run stood, what tensors there are, and their files."""

    progress: dict[str, Any]
    """Where the run stood, in the trainer's own words."""
    lasting: bool
    """Whether the checkpoint is never removed, as the end of a stage."""
    tensors: dict[str, tuple[str, list[int]]]
    """Type and whole shape of every tensor, by name."""
    files: list[File]

    def write(self, folder: Path) -> None:
        """Write the manifest of a folder whose other files are complete, and wait for the disk."""
        values = {"format": FORMAT, **asdict(self)}
        with (folder / NAME).open("w", encoding="utf-8") as handle:
            json.dump({"sha256": _digest(values), **values}, handle, indent=1)
            handle.flush()
            os.fsync(handle.fileno())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of a checkpoint; the files it names are not looked at.

        Raises:
            ModelError: there is none, or it is not as it was written.
        """
        try:
            values = json.loads((folder / NAME).read_text(encoding="utf-8"))
            told = values.pop("sha256")
            if told != _digest(values) or values.pop("format") != FORMAT:
                raise ValueError
            values["tensors"] = {name: (kind, shape) for name, (kind, shape) in values["tensors"].items()}
            values["files"] = [File(**file) for file in values["files"]]
            return cls(**values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(
                f"{folder} is no checkpoint of this version or its {NAME} is damaged; use another one."
            ) from None


def verify(folder: Path) -> Manifest:
    """Compare every byte of a checkpoint with its manifest.

    Raises:
        ModelError: a file is missing, too many or changed; the sentence names it.
    """
    manifest = Manifest.read(folder)
    told = {file.name: file for file in manifest.files}
    there = {path.name for path in folder.iterdir()} - {NAME}
    if odd := sorted(told.keys() ^ there):
        raise ModelError(
            f"{folder / odd[0]} is {'missing' if odd[0] in told else 'no part of the checkpoint'}; "
            "use another checkpoint."
        )
    with ThreadPoolExecutor(THREADS) as threads:  # hashing lets other threads run
        for found in threads.map(lambda name: File.of(folder / name), sorted(told)):
            if found != told[found.name]:
                raise ModelError(f"{folder / found.name} is damaged; use another checkpoint.")
    return manifest


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
