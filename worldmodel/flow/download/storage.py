"""Reading of files from object storages and from a local folder, through fsspec."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worldmodel.errors import pip_install
from worldmodel.flow.download.address import Address, DownloadError
from worldmodel.flow.errors import FlowError

REMEDIES = {
    "s3": pip_install("s3"),
    "gs": "pip install gcsfs",
    "gcs": "pip install gcsfs",
    "hf": "pip install huggingface_hub",
}
"""What installs the file system of a protocol."""


def read_storage(address: Address, root: str | None, options: Mapping[str, Any], max_bytes: int) -> bytes:
    """Return the bytes of an address that is not http(s).

    Args:
        address: what to read.
        root: the folder in which local files must be; None: no local file may be read. Relative paths begin
            there.
        options: arguments of the fsspec file system, for example `{"endpoint_url": ...}`.
        max_bytes: larger files are refused.

    Raises:
        DownloadError: it cannot be had or is too large.
        FlowError: the package for the protocol is not installed.
    """
    if address.protocol == "file":
        location = _local(address.location.removeprefix("file://"), root)
    else:
        location = address.location
    import fsspec

    try:
        storage, path = fsspec.url_to_fs(location, **options)
    except ImportError:
        remedy = REMEDIES[address.protocol]
        raise FlowError(f"Reading {address.protocol}:// requires a package: {remedy}.") from None
    except ValueError as error:
        raise DownloadError(f"the address {location[:200]!r} is wrong ({error})") from None
    end = None if address.size is None else address.offset + address.size
    try:
        whole = storage.info(path)
        if whole["type"] != "file":
            raise DownloadError(f"{location[:200]!r} is a folder")
        length = (whole["size"] if end is None else min(end, whole["size"])) - address.offset
        if length > max_bytes:
            raise DownloadError(f"it is larger than {max_bytes / 2**20:g} MiB")
        # The Hub's file system reads on behind a part, by 5 MB, unless told not to.
        exact = {"cache_type": "none"} if address.protocol == "hf" else {}
        data = storage.cat_file(path, start=address.offset or None, end=end, **exact)
    except DownloadError:
        raise
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise DownloadError(f"{location[:200]!r} cannot be read ({type(error).__name__})") from None
    except Exception as error:  # every storage raises types of its own
        reason = " ".join(str(error).split())[:200]
        raise DownloadError(f"{location[:200]!r} cannot be read ({reason})", temporary=True) from None
    if address.size is not None and len(data) < address.size:
        raise DownloadError(f"the file ends before byte {end}")
    return data


def _local(path: str, root: str | None) -> str:
    if root is None:
        raise DownloadError(
            f"{path[:200]!r} is a local file; set fetch's setting root to a folder that may be read"
        )
    folder = Path(root).expanduser().resolve()
    try:
        found = (folder / path).resolve()
        if not found.is_relative_to(folder):
            raise DownloadError(f"{path[:200]!r} is outside of the folder {str(folder)!r}")
        if not found.is_file():
            raise DownloadError(f"there is no file {path[:200]!r} in {str(folder)!r}")
    except (OSError, ValueError) as error:  # a name that is too long, or with a zero byte
        raise DownloadError(f"{path[:200]!r} is not a path ({error})") from None
    return str(found)
