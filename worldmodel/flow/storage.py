"""Files by name under a folder or an object store's address: the one place that tells them apart."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from worldmodel.errors import ConfigError, OutputError, pip_install
from worldmodel.flow.errors import FlowError
from worldmodel.io import TEMPORARY_PREFIX, atomic_file


class Storage:
    """A flat store of immutable files.

    Args:
        address: a folder, or an address of fsspec such as `s3://bucket/path`.

    Raises:
        ConfigError: the package of such an address is not installed.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self.remote: Any = None
        if "://" not in address:
            self.folder = Path(address).expanduser().absolute()
            return
        try:
            import fsspec

            self.remote, self.root = fsspec.core.url_to_fs(self.address)
        except ImportError as error:
            scheme = address.split("://")[0]
            raise ConfigError(
                f"{address!r} requires another package ({error}); for s3:// {pip_install('s3')}."
                if scheme == "s3"
                else f"{address!r} requires another package: {error}."
            ) from None

    def write(self, name: str, data: bytes) -> None:
        """Write a file, which appears whole and is on the disk when this returns.

        Raises:
            OutputError: it cannot be written, or the disk is full.
        """
        if self.remote is None:
            with atomic_file(self.folder / name, durable=True) as temporary:
                temporary.write_bytes(data)
            return
        with self._writing(name, "written"):
            self.remote.pipe_file(f"{self.root}/{name}", data)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes of a file from `start` up to `stop`.

        Raises:
            FlowError: there is no such file, it is shorter, or the store does not answer.
        """
        if start == stop:
            return b""  # HTTP cannot express an empty range; S3 would return the whole file
        with self._reading(f"{self.address}/{name}"):
            if self.remote is not None:
                data = self.remote.cat_file(f"{self.root}/{name}", start=start, end=stop)
            else:
                with open(self.folder / name, "rb") as file:
                    file.seek(start)
                    data = file.read(-1 if stop is None else stop - start)
        if stop is not None and len(data) < stop - start:
            raise FlowError(f"{self.address}/{name} is cut off at byte {start + len(data)}.")
        return data

    def exists(self, name: str) -> bool:
        """Return whether there is such a file.

        Raises:
            FlowError: the store does not answer, or refuses.
        """
        if self.remote is None:
            return (self.folder / name).is_file()
        self.remote.invalidate_cache()
        with self._reading(f"{self.address}/{name}"):
            try:  # not `isfile`, for which a store that does not answer has no files
                return self.remote.info(f"{self.root}/{name}")["type"] == "file"
            except FileNotFoundError:
                return False

    def files(self) -> dict[str, tuple[int, float]]:
        """Return size in bytes and time of the last change, in seconds since 1970, of all files by name.

        Files that were being written when their process was killed are among them.

        Raises:
            FlowError: the store does not answer, or refuses.
        """
        if self.remote is None:
            paths = (path for path in self.folder.rglob("*") if path.is_file())
            return {
                path.relative_to(self.folder).as_posix(): (path.stat().st_size, path.stat().st_mtime)
                for path in paths
            }
        self.remote.invalidate_cache()
        first = len(self.root.rstrip("/")) + 1
        with self._reading(self.address):
            found = self.remote.find(self.root, detail=True)
            return {path[first:]: (info["size"], self._changed(path, info)) for path, info in found.items()}

    def remove_interrupted(self, older_than_s: float) -> None:
        """Remove files that were being written when their process was killed; an object store keeps none.

        Args:
            older_than_s: younger ones stay, since another process may be writing them.
        """
        if self.remote is not None:
            return
        latest = time.time() - older_than_s
        for path in self.folder.glob(f"{TEMPORARY_PREFIX}*"):
            with suppress(FileNotFoundError):  # it got its name meanwhile
                if path.stat().st_mtime <= latest:
                    path.unlink()

    def _changed(self, path: str, info: Mapping[str, Any]) -> float:
        changed = info.get("LastModified") or self.remote.modified(path)
        return changed.timestamp()

    def delete(self, name: str) -> None:
        """Remove a file, if it is there.

        Raises:
            FlowError: the store does not answer, or refuses.
            OutputError: it cannot be removed.
        """
        if self.remote is not None and not self.exists(name):
            return
        with self._writing(name, "removed"):
            if self.remote is None:
                (self.folder / name).unlink(missing_ok=True)
            else:
                self.remote.rm_file(f"{self.root}/{name}")

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Turn the errors of a store, each of which raises types of its own, into ours."""
        try:
            yield
        except Exception as error:
            if self.remote is None and not isinstance(error, OSError):
                raise
            remedy = "" if self.remote is None else "; check the store, and that it may be read and listed"
            raise FlowError(f"{what} cannot be read ({_reason(error)}){remedy}.") from None

    @contextmanager
    def _writing(self, name: str, done: str) -> Iterator[None]:
        """Turn the errors of a store into ours."""
        try:
            yield
        except Exception as error:
            raise OutputError(
                f"{self.address}/{name} cannot be {done} ({_reason(error)}); check the store."
            ) from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
