"""Bytes of an image or video, from a path or from memory."""

from pathlib import Path

from worldmodel.errors import InputError

Source = str | Path | bytes
"""The path of a file, or the content of one."""


def read_bytes(source: Source, max_bytes: int, noun: str) -> tuple[str, bytes]:
    """Return the name of the source for messages, and its bytes.

    Args:
        source: a path or bytes.
        max_bytes: more are refused without reading them.
        noun: name in messages of bytes without a path, for example `image`.

    Raises:
        InputError: the file is missing, a folder, a URL, empty, too large or not readable.
    """
    if isinstance(source, bytes):
        name, data = f"The {noun}", source
    else:
        name = repr(str(source))
        if "://" in str(source):
            raise InputError(f"{name} is a URL; download the file first and pass its path.")
        try:
            path = Path(source).expanduser()
            if path.is_dir():
                raise InputError(f"{name} is a folder; pass one file in it.")
            if not path.is_file():
                raise InputError(f"There is no file {name}; check the path.")
            with path.open("rb") as file:
                data = file.read(max_bytes + 1)
        except (OSError, RuntimeError):  # RuntimeError: the home of a user who does not exist
            raise InputError(f"{name} cannot be read; check its path and permissions.") from None
    if not data:
        raise InputError(f"{name} is empty (0 bytes); pass a file with content.")
    if len(data) > max_bytes:
        raise InputError(f"{name} is larger than {max_bytes // 2**20} MiB; shrink or cut it first.")
    return name, data
