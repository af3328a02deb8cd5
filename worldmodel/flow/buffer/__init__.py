"""Buffers: where the binary results of stages are kept for later stages and later runs."""

import re

from worldmodel.config.imports import find_extension
from worldmodel.flow.buffer.base import Buffer
from worldmodel.flow.buffer.tar import TarBuffer

GROUP = "worldmodel.flow.buffers"
"""Entry points by the word in front of the address, each called with what is behind its colon."""
KIND = re.compile(r"(\w{2,}):(?!//)(.*)")
"""`lance:FOLDER`, and not `s3://bucket/path`."""


def open_buffer(address: str) -> Buffer:
    """Open a buffer: a folder or an address such as `s3://bucket/path` for tar files, else that of a plug-in.

    Raises:
        ConfigError: there is no such plug-in, or the package that it needs is not installed.
    """
    if found := KIND.fullmatch(address):
        return find_extension("buffer", found[1], GROUP, {})(found[2])
    return TarBuffer(address)
