"""Indexes of large files, such as the offset of every row, kept on disk so that each is built once.

The index of `clips.csv` is `.clips.csv.KIND.index` beside it, or a file in the user's cache folder where that
folder cannot be written. It is used as long as the file has the size and the modification time for which it
was built.
"""

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.lib.format import read_array, write_array

from worldmodel.errors import OutputError
from worldmodel.io import atomic_file, user_cache

MIN_BYTES = 2**20
"""Smaller files are read faster than their index."""
VERSION = 5


def indexed(path: str | Path, kind: str, build: Callable[[], np.ndarray]) -> np.ndarray:
    """Return the index of a file: the stored one, or the result of `build`, which is then stored.

    Args:
        path: The file.
        kind: Name of the index: a file may have several.
        build: Reads the file, and raises the error if that fails; its result is int64 and depends on nothing
            else.
    """
    path = Path(path)
    stamp = _stamp(path)
    if stamp is None or stamp[1] < MIN_BYTES:
        return build()
    places = _places(path, kind)
    for place in places:
        found = _read(place, stamp)
        if found is not None:
            return found
    made = build()
    if (after := _stamp(path)) is not None and np.array_equal(stamp, after):  # it did not change meanwhile
        _write(places, stamp, made)
    return made


def _stamp(path: Path) -> np.ndarray | None:
    try:
        status = path.stat()
    except OSError:
        return None
    if stat.S_ISDIR(status.st_mode):  # says nothing of the files further down
        return None
    return np.array([VERSION, status.st_size, status.st_mtime_ns], dtype=np.int64)


def _places(path: Path, kind: str) -> list[Path]:
    """Return where the index of a file may be: beside it, or in the cache folder."""
    digest = hashlib.sha256(os.path.abspath(path).encode()).hexdigest()
    return [
        path.with_name(f".{path.name}.{kind}.index"),
        user_cache() / "indexes" / f"{digest[:32]}.{kind}.index",
    ]


def _read(place: Path, stamp: np.ndarray) -> np.ndarray | None:
    """Return a stored index, before which its stamp stands."""
    try:
        with place.open("rb") as file:
            known = read_array(file, allow_pickle=False)
            return read_array(file, allow_pickle=False) if np.array_equal(known, stamp) else None
    except (OSError, ValueError):  # there is none, or it is damaged
        return None


def _write(places: list[Path], stamp: np.ndarray, made: np.ndarray) -> None:
    for place in places:
        try:
            with atomic_file(place) as temporary, temporary.open("wb") as file:
                write_array(file, stamp)
                write_array(file, np.asarray(made, dtype=np.int64))
            return
        except (OutputError, OSError):  # the folder cannot be written
            continue
