"""Connections to public IP addresses only.

Addresses of videos come from tables of strangers, so a machine that fetches them must not be led to its own
network: to databases on localhost, or to the metadata service of a cloud. The check is made on the IP
address that is connected to, after the host was resolved, for every connection and so for every redirect. A
name that resolves differently the next time (DNS rebinding) gains nothing. Proxies of the environment are not
used: they would connect to hosts unchecked.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

import httpcore

from worldmodel.flow.download.address import DownloadError

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: IPAddress) -> bool:
    """Return whether an IP address is a host of the public internet.

    Not public: private, loopback, link-local, multicast, reserved and documentation ranges, shared address
    space, and IPv6 addresses that contain such an IPv4 address (mapped, 6to4, Teredo, NAT64).
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address in NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if any(each is not None and not is_public(each) for each in inner):
            return False
        if address.ipv4_mapped is None and address not in GLOBAL_IPV6:
            return False
    return address.is_global and not address.is_multicast


async def resolve(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host, in the order in which the system would try them.

    Raises:
        OSError: the host is unknown.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Opens connections of httpcore, and refuses those to addresses that are not public."""

    def __init__(self, allow_private: bool) -> None:
        self.allow_private = allow_private
        self.backend: Any = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Resolve a host once, and connect to the first of its permitted IP addresses that answers.

        Raises:
            DownloadError: none is permitted.
            httpcore.ConnectError: the host is unknown, or none answers.
        """
        try:
            async with asyncio.timeout(timeout):
                found = await resolve(host, port)
        except TimeoutError:
            raise httpcore.ConnectTimeout(f"{host} was not resolved in time") from None
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"{host} cannot be resolved ({error})") from None
        permitted = [ip for ip in found if self.allow_private or is_public(ipaddress.ip_address(ip))]
        if not permitted:
            raise DownloadError(
                f"{host} is at {', '.join(found)}, which is not a public address; set allow_private if its "
                "network is trusted"
            )
        for number, ip in enumerate(permitted, start=1):
            try:  # an IP address is not resolved again
                return await self.backend.connect_tcp(ip, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if number == len(permitted):
                    raise
        raise AssertionError("a host without addresses")

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Refuse.

        Raises:
            DownloadError: always.
        """
        raise DownloadError("sockets of this machine are not read")

    async def sleep(self, seconds: float) -> None:
        await self.backend.sleep(seconds)
