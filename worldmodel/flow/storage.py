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
        import fsspec

        self.address, self.is_remote = address.rstrip("/"), "://" in address
        self.store: Any = fsspec.filesystem("file")
        self.root = str(Path(address).expanduser().absolute())
        try:
            if self.is_remote:
                self.store, self.root = fsspec.core.url_to_fs(self.address)
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
        if not self.is_remote:  # fsspec would write a file in place
            with atomic_file(f"{self.root}/{name}", durable=True) as temporary:
                temporary.write_bytes(data)
            return
        with self._writing(name, "written"):
            self.store.pipe_file(f"{self.root}/{name}", data)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes of a file from `start` up to `stop`.

        Raises:
            FlowError: there is no such file, it is shorter, or the store does not answer.
        """
        if start == stop:
            return b""  # HTTP cannot express an empty range; S3 would return the whole file
        with self._reading(f"{self.address}/{name}"):
            data = self.store.cat_file(f"{self.root}/{name}", start=start, end=stop)
        if stop is not None and len(data) < stop - start:
            raise FlowError(f"{self.address}/{name} is cut off at byte {start + len(data)}.")
        return data

    def exists(self, name: str) -> bool:
        """Return whether there is such a file.

        Raises:
            FlowError: the store does not answer, or refuses.
        """
        self.store.invalidate_cache()
        with self._reading(f"{self.address}/{name}"):
            try:  # not `isfile`, for which a store that does not answer has no files
                return self.store.info(f"{self.root}/{name}")["type"] == "file"
            except (FileNotFoundError, NotADirectoryError):
                return False

    def files(self) -> dict[str, tuple[int, float]]:
        """Return size in bytes and time of the last change, in seconds since 1970, of all files by name.

        Files that were being written when their process was killed are among them.

        Raises:
            FlowError: the store does not answer, or refuses.
        """
        self.store.invalidate_cache()
        first = len(self.root.rstrip("/")) + 1
        with self._reading(self.address):
            found = self.store.find(self.root, detail=True)
            return {path[first:]: (info["size"], self._changed(path, info)) for path, info in found.items()}

    def remove_interrupted(self, older_than_s: float) -> None:
        """Remove files that were being written when their process was killed; an object store keeps none.

        Args:
            older_than_s: younger ones stay, since another process may be writing them.
        """
        latest = time.time() - older_than_s
        for path in () if self.is_remote else Path(self.root).glob(f"{TEMPORARY_PREFIX}*"):
            with suppress(FileNotFoundError):  # it got its name meanwhile
                if path.stat().st_mtime <= latest:
                    path.unlink()

    def _changed(self, path: str, info: Mapping[str, Any]) -> float:
        if "mtime" in info:  # of a local file
            return info["mtime"]
        changed = info.get("LastModified") or self.store.modified(path)
        return changed.timestamp()

    def delete(self, name: str) -> None:
        """Remove a file, if it is there.

        Raises:
            FlowError: the store does not answer, or refuses.
            OutputError: it cannot be removed.
        """
        if self.exists(name):
            with self._writing(name, "removed"), suppress(FileNotFoundError):  # another process was faster
                self.store.rm_file(f"{self.root}/{name}")

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Turn the errors of a store, each of which raises types of its own, into ours."""
        try:
            yield
        except Exception as error:
            if not self.is_remote and not isinstance(error, OSError):
                raise
            remedy = "; check the store, and that it may be read and listed" if self.is_remote else ""
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
