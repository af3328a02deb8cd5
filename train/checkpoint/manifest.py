"""The manifest of a checkpoint: `manifest.json`, which is written last and has a digest of every file.

A folder is a valid checkpoint only if its files match the manifest byte for byte. Interrupted writes, full
disks, partial copies and flipped bits are detected before a tensor is read.
"""

import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from worldmodel.errors import ModelError

FORMAT = 1
NAME = "manifest.json"
THREADS = 8
TICK_NS = 20_000_000
"""More than the resolution of times of files."""


@dataclass(frozen=True)
class File:
    """Name, size and digest of a file of tensors."""

    name: str
    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "File":
        """Compute the entry of a file."""
        return cls(path.name, path.stat().st_size, sha256_of(path))


@dataclass(frozen=True)
class Origin:
    """Location of the weights that a checkpoint does not hold, because its stage does not train them."""

    base: dict[str, str] = field(default_factory=dict)
    """Name of the checkpoint that the stage started from, in the same folder, and digest of its manifest."""
    files: dict[str, str] = field(default_factory=dict)
    """Names of the files that the run started from, and their digests."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint: the progress of the run, its tensors, and their files."""

    progress: dict[str, Any]
    """The progress of the run, as the trainer stores it."""
    lasting: bool
    """Whether the checkpoint is never removed, as at the end of a stage."""
    tensors: dict[str, tuple[str, list[int]]]
    """Dtype and full shape of every tensor, by name."""
    files: list[File]
    origin: Origin = Origin()

    def write(self, folder: Path) -> None:
        """Write the manifest of a folder whose other files are complete, and sync it to disk."""
        values = {"format": FORMAT, **asdict(self)}
        with (folder / NAME).open("w", encoding="utf-8") as handle:
            json.dump({"sha256": _digest(values), **values}, handle, indent=1)
            handle.flush()
            os.fsync(handle.fileno())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of a checkpoint, without checking the files.

        Raises:
            ModelError: there is none, or it is damaged.
        """
        try:
            values = json.loads((folder / NAME).read_text(encoding="utf-8"))
            digest = values.pop("sha256")
            if digest != _digest(values) or values.pop("format") != FORMAT:
                raise ValueError
            values["tensors"] = {name: (kind, shape) for name, (kind, shape) in values["tensors"].items()}
            values["files"] = [File(**file) for file in values["files"]]
            values["origin"] = Origin(**values["origin"])
            return cls(**values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            if not folder.is_dir():
                raise ModelError(
                    f"There is no folder {folder}; use one in RUN_DIR/checkpoints, such as best."
                ) from None
            if (folder / "checkpoints").is_dir():
                raise ModelError(f"{folder} is a run; use {folder}/checkpoints/best.") from None
            raise ModelError(
                f"{folder} is not a checkpoint of this version, or its {NAME} is damaged; use another one."
            ) from None


def chain(folder: Path) -> list[Path]:
    """Return a checkpoint and those that its stage started from, the oldest first.

    Raises:
        ModelError: one is missing, damaged, or not the one that the next started from.
    """
    found = [folder]
    while base := Manifest.read(found[0]).origin.base:
        ((name, digest),) = base.items()
        found.insert(0, folder.parent / Path(name).name)
        if digest_of(found[0]) != digest:
            raise ModelError(
                f"{found[1]} started from {found[0]}, which is another checkpoint now; use another one."
            )
    return found


def digest_of(folder: Path) -> str:
    """Return the digest of a checkpoint: its manifest's.

    Raises:
        ModelError: it has none, or its manifest is damaged.
    """
    manifest = Manifest.read(folder)
    return _digest({"format": FORMAT, **asdict(manifest)})


def verify(folder: Path, mine: slice = slice(None)) -> Manifest:
    """Check every byte of a checkpoint, and of those that its stage started from, against their manifests.

    Args:
        folder: The checkpoint.
        mine: The files of each, in the order of their names, that this process reads; others read the rest.

    Raises:
        ModelError: a file is missing, unexpected or changed; the message names it.
    """
    for each in chain(folder):
        _verify_files(each, mine)
    return Manifest.read(folder)


def _verify_files(folder: Path, mine: slice) -> None:
    manifest = Manifest.read(folder)
    expected = {file.name: file for file in manifest.files}
    present = {path.name for path in folder.iterdir()} - {NAME}
    if different := sorted(expected.keys() ^ present):
        name = different[0]
        raise ModelError(
            f"{folder / name} is {'missing' if name in expected else 'not a part of the checkpoint'}; "
            "use another checkpoint."
        )
    with ThreadPoolExecutor(THREADS) as threads:  # hashing releases the GIL
        for found in threads.map(lambda name: File.of(folder / name), sorted(expected)[mine]):
            if found != expected[found.name]:
                raise ModelError(f"{folder / found.name} is damaged; use another checkpoint.")


_read: dict[tuple[int, ...], str] = {}
"""Digests of the versions of files that this process has read."""


def sha256_of(path: Path) -> str:
    """Compute the SHA-256 of a file; a version that this process has read is not read again."""
    with path.open("rb") as handle:
        status = os.fstat(handle.fileno())
        # Not the name: a checkpoint is renamed when it is complete. The time of the last change of the entry
        # itself cannot be set by programs.
        version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        # A file that changes once more within a tick of the clock has the same times.
        settled = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > TICK_NS
        digest = _read.get(version) or hashlib.file_digest(handle, "sha256").hexdigest()
    if settled:
        _read[version] = digest
    return digest


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
