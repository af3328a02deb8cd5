"""Files by path, or by an address such as https:// or s3://, which fsspec reads."""

import glob
import gzip
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from worldmodel.errors import InputError
from worldmodel.io import atomic_file, user_cache

PACKED = (".gz", ".tgz")
"""Ends of the names of files that are unpacked."""
MAX_UNPACKED_BYTES = 2**33
"""Largest content of a packed file."""

READ_AHEAD = 2**16
"""Bytes that are read from an address at a time: a header and what is near it."""
BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


def find_files(pattern: str) -> list[str]:
    """Return the paths or addresses that a pattern matches, sorted.

    `{000..127}` counts; `*`, `?` and `[]` match the names in a folder or an object store. An address without
    them is returned whether or not there is such a file. An existing path is never read as a pattern.

    Raises:
        OSError: a store cannot be listed.
    """
    if found := BRACES.search(pattern):
        first, last = int(found[1]), int(found[2])
        names = (str(number).zfill(len(found[1])) for number in range(first, last + 1))
        return [path for name in names for path in find_files(pattern.replace(found[0], name, 1))]
    if "://" not in pattern:
        path = os.path.expanduser(pattern)
        # The name of a file may have brackets, too.
        return [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
    if not glob.has_magic(pattern.split("://")[1]):
        return [pattern]
    storage, path = _storage(pattern)
    with _remote_errors():
        return [storage.unstrip_protocol(each) for each in sorted(storage.glob(path))]


@contextmanager
def open_file(path: str) -> Iterator[tuple[IO[bytes], int]]:
    """Open a file for reading in any order, with its size in bytes.

    Raises:
        OSError: it cannot be read.
    """
    if "://" not in path:
        with open(path, "rb") as file:
            yield file, os.path.getsize(path)
        return
    storage, inner = _storage(path)
    with _remote_errors():
        file = storage.open(inner, "rb", block_size=READ_AHEAD, cache_type="readahead")
    with file, _remote_errors():
        yield file, file.size


def read_range(path: str, offset: int, size: int) -> bytes:
    """Return a part of a file; fewer bytes where it ends earlier.

    Raises:
        OSError: it cannot be read.
    """
    if "://" not in path:
        with open(path, "rb") as file:
            return os.pread(file.fileno(), size, offset)
    storage, inner = _storage(path)
    with _remote_errors():
        data = storage.cat_file(inner, start=offset, end=offset + size)
    return data if len(data) <= size else data[offset : offset + size]  # a server without byte ranges


def inside(root: str, path: str) -> str:
    """Return the absolute path of `path` under `root`.

    Raises:
        InputError: it is outside of `root`.
    """
    whole = os.path.normpath(os.path.join(root, path))
    if os.path.commonpath([root, whole]) != root:
        raise InputError(f"{path!r} is outside of {root!r}; set root to a folder that contains all videos")
    return whole


def unpacked(path: str) -> str:
    """Return the path of the content of a packed file, in the user's cache; that of any other as it is.

    Raises:
        InputError: its content is larger than `MAX_UNPACKED_BYTES`.
        OSError: it cannot be read, or is damaged.
        EOFError: it is cut off.
    """
    if not path.endswith(PACKED):
        return path
    name = path if "://" in path else os.path.abspath(path)
    changed = "" if "://" in path else os.stat(path).st_mtime_ns
    with open_file(path) as (packed, size):
        key = hashlib.sha256(f"{name} {size} {changed}".encode()).hexdigest()[:32]
        suffix = ".tar" if path.endswith(".tgz") else Path(Path(path).stem).suffix
        target = user_cache() / "unpacked" / f"{key}{suffix}"
        if target.is_file():
            return str(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(packed) as content, atomic_file(target) as temporary, temporary.open("wb") as file:
            while block := content.read(2**20):
                file.write(block)
                if file.tell() > MAX_UNPACKED_BYTES:
                    raise InputError(f"it has more than {MAX_UNPACKED_BYTES // 2**30} GiB when unpacked")
    return str(target)


def _storage(path: str) -> tuple[Any, str]:
    try:
        import fsspec

        return fsspec.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise OSError(f"it requires another package or protocol: {error}") from None


@contextmanager
def _remote_errors() -> Iterator[None]:
    """Turn the errors of every storage into `OSError`; errors of Python's own modules pass."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or type(error).__module__ in ("builtins", "tarfile"):
            raise
        raise OSError(" ".join(str(error).split()) or type(error).__name__) from None


def unread_format(folder: str | Path) -> str:
    """Return why a folder of another format than ours is not read; an empty string for all others."""
    path = Path(folder).expanduser()
    if path.is_dir() and next(path.rglob("*.tfrecord*"), None) is not None:
        return (
            "it holds TFRecord files, as RLDS datasets do, which are not read; convert it to LeRobot first, "
            "for example with any4lerobot"
        )
    return ""
