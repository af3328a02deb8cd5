"""Addresses of files: URLs, paths, and byte ranges of either."""

import re
from dataclasses import dataclass

from worldmodel.flow.errors import FlowError

HTTP = ("http", "https")
STORAGES = ("s3", "gs", "gcs", "hf", "file")
"""Protocols that are read through fsspec; no others are, as addresses may come from strangers."""
RANGE = re.compile(r"#([0-9]+)\+([0-9]+)$")
MAX_DIGITS = 18
"""Of an offset or a size; more than any file has bytes."""


class DownloadError(FlowError):
    """A file was not downloaded.

    Attributes:
        temporary: whether trying again later may succeed.
        retry_after_s: seconds that the host asks to wait.
    """

    def __init__(self, reason: str, temporary: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.temporary, self.retry_after_s = temporary, retry_after_s


@dataclass(frozen=True)
class Address:
    """A file, or a part of one such as a member of a tar file."""

    location: str
    protocol: str
    offset: int = 0
    size: int | None = None
    """Length of the part in bytes; None: up to the end."""


def parse_address(text: str | None) -> Address:
    """Parse `URL`, `PATH` or either with `#OFFSET+SIZE`, a byte range.

    Raises:
        DownloadError: it is empty, its protocol is not supported, or its byte range is not one of a file.
    """
    text = (text or "").strip()
    if not text:
        raise DownloadError("the address is empty")
    found = RANGE.search(text)
    location = text[: found.start()] if found else text
    before, separator, _ = location.partition("://")
    protocol = before.lower() if separator else "file"
    if protocol not in (*HTTP, *STORAGES):
        known = ", ".join((*HTTP, *STORAGES))
        raise DownloadError(f"the address {text[:200]!r} is not of a supported protocol ({known})")
    if found is None:
        return Address(location, protocol)
    if max(map(len, found.groups())) > MAX_DIGITS:
        raise DownloadError(f"the address {text[:200]!r} has a byte range that no file has")
    return Address(location, protocol, int(found[1]), int(found[2]))
