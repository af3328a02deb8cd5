"""Reading of files by their address, over http(s) and from storages; addresses are not trusted."""

from worldmodel.flow.download.address import Address, DownloadError, parse_address
from worldmodel.flow.download.http import Client, Download, DownloadLimits
from worldmodel.flow.download.storage import read_storage

__all__ = [
    "Address",
    "Client",
    "Download",
    "DownloadError",
    "DownloadLimits",
    "parse_address",
    "read_storage",
]
