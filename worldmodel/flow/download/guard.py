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
from collections.abc import Iterable, Sequence
from typing import Any

import httpcore

from worldmodel.errors import ConfigError
from worldmodel.flow.download.address import DownloadError

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
EVERYWHERE = (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0"))
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


def networks_of(allow_private: bool | Sequence[str]) -> tuple[Network, ...]:
    """Return the networks that may be connected to beside the public internet.

    Args:
        allow_private: whether all are, or which ones, such as 10.1.0.0/16 or a single address.

    Raises:
        ConfigError: one is not a network.
    """
    if isinstance(allow_private, bool):
        return EVERYWHERE if allow_private else ()
    if isinstance(allow_private, str):
        allow_private = [allow_private]
    try:
        return tuple(map(ipaddress.ip_network, allow_private))
    except ValueError as error:
        raise ConfigError(
            f"allow_private has {error}; use true, false, or a list of networks such as 10.1.0.0/16."
        ) from None


async def resolve(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host, in the order in which the system would try them.

    Raises:
        OSError: the host is unknown.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Opens connections of httpcore, and refuses those to addresses that are not public.

    Args:
        allow_private: whether private ones are permitted as well, or the networks whose are.

    Raises:
        ConfigError: one is not a network.
    """

    def __init__(self, allow_private: bool | Sequence[str]) -> None:
        self.networks = networks_of(allow_private)
        self.backend: Any = httpcore.AnyIOBackend()

    def permits(self, address: IPAddress) -> bool:
        """Return whether an IP address may be connected to."""
        return is_public(address) or any(address in network for network in self.networks)

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
        permitted = [ip for ip in found if self.permits(ipaddress.ip_address(ip))]
        if not permitted:
            raise DownloadError(
                f"{host} is at {', '.join(found)}, which is not a public address; add its network to "
                "allow_private if it is trusted"
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
