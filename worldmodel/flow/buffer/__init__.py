"""Buffers: where the binary results of stages are kept for later stages and later runs."""

from worldmodel.flow.buffer.base import Buffer


def open_buffer(address: str) -> Buffer:
    """Open a buffer: `lance:FOLDER`, or a folder or an address such as `s3://bucket/path` for tar files.

    Raises:
        ConfigError: the package that it needs is not installed.
    """
    if address.startswith("lance:"):
        from worldmodel.flow.buffer.lance import LanceBuffer

        return LanceBuffer(address.removeprefix("lance:"))
    from worldmodel.flow.buffer.tar import TarBuffer

    return TarBuffer(address)
