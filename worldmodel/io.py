"""Atomic writes: a file or folder gets its name only when it is complete.

Content is written under a temporary name in the same folder and then renamed, so a reader sees the old
content or all of the new. With `durable`, it is also on the disk before it gets its name.
"""

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worldmodel.errors import OutputError

TEMPORARY_PREFIX = ".writing-"
"""First part of temporary names: what is left under such a name was interrupted and can be removed."""
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}


@contextmanager
def atomic_file(path: str | Path, durable: bool = False, mode: int = 0o666) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block succeeds and is removed when it fails.

    Missing parent folders are created. The temporary name keeps the suffix of `path`.

    Args:
        path: the file to write; `~` is expanded.
        durable: wait until the file and its name are on the disk.
        mode: permissions of the new file, before the umask.

    Raises:
        OutputError: `path` is a folder, cannot be written, or the disk is full.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        raise OutputError(f"{str(path)!r} is a folder; name a file in it.")
    temporary = path.with_name(_temporary_name(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Created before the block runs: an unwritable folder is reported before minutes of work.
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    except OSError as error:
        raise _cannot_write(path, error, "choose another folder") from None
    try:
        yield temporary
        if durable:
            fsync(temporary)
        move(temporary, path, durable)
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        raise _cannot_write(path, error, "free some space or choose another folder") from None
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield a new empty folder that replaces `path` when the block succeeds and is removed when it fails.

    An existing folder at `path` is removed with all its content once the new one is complete.

    Raises:
        OutputError: `path` is a file, cannot be written, or the disk is full.
    """
    path = Path(path).expanduser()
    if path.is_file():
        raise OutputError(f"{str(path)!r} is a file; choose a new folder.")
    temporary = path.with_name(_temporary_name(path))
    replaced = temporary.with_name(f"{temporary.name}.old")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise _cannot_write(path, error, "choose another folder") from None
    try:
        yield temporary
        if path.exists():
            path.rename(replaced)
        try:
            temporary.rename(path)
        except OSError:
            if replaced.exists():
                replaced.rename(path)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        raise _cannot_write(path, error, "free some space or choose another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def staged_files(path: str | Path) -> Iterator[Path]:
    """Yield an empty folder whose files move into the folder `path`, all together, when the block succeeds.

    `path` is created, and found to be writable, before the block runs. When the block fails, files that
    `path` already held stay as they were, and folders that were created are removed.

    Raises:
        OutputError: `path` cannot be written.
    """
    path = Path(path).expanduser()
    created: list[Path] = []
    try:
        for folder in (*reversed(path.parents), path):
            if not folder.exists():
                folder.mkdir()
                created.append(folder)
        staged = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=path))
    except OSError as error:
        _remove_empty(created)
        raise _cannot_write(path, error, "choose another folder") from None
    try:
        yield staged
        for file in sorted(staged.iterdir()):
            move(file, path / file.name)
        created.clear()
    except OSError as error:
        raise _cannot_write(path, error, "free some space or choose another folder") from None
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        _remove_empty(created)


def user_cache() -> Path:
    """Return the folder of cached files: `$XDG_CACHE_HOME/worldmodel` or `~/.cache/worldmodel`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "worldmodel"


def move(source: Path, target: Path, durable: bool = False) -> None:
    """Rename within one file system, replacing a file; with `durable`, wait until the name is on the disk."""
    os.replace(source, target)
    if durable:
        fsync(target.parent)


def fsync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary_name(path: Path) -> str:
    return f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}{path.suffix}"


def _cannot_write(path: Path, error: OSError, remedy: str) -> OutputError:
    return OutputError(f"{str(path)!r} cannot be written ({error.strerror}); {remedy}.")


def _remove_empty(folders: list[Path]) -> None:
    for folder in reversed(folders):
        folder.rmdir()
