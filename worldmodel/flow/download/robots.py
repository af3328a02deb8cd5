"""Rules of robots.txt (RFC 9309), asked for once per host and kept for a day."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx
from protego import Protego

from worldmodel.flow.download.address import DownloadError

MAX_BYTES = 500 * 1024
"""Bytes that are read of a file; RFC 9309, section 2.5."""
KEPT_S = 24 * 3600.0
MAX_HOSTS = 20_000
MAX_KEPT_BYTES = 16 * 2**20
"""Of all files together; their rules take up to 40 times as much memory."""


@dataclass
class Kept:
    """The rules of a host, or the task that reads them."""

    asked_at: float
    task: asyncio.Task[Protego]
    num_bytes: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether they need not be asked for again: not if that failed, or was a day ago."""
        failed = self.task.done() and (self.task.cancelled() or self.task.exception() is not None)
        return not failed and time.monotonic() - self.asked_at <= KEPT_S


class Robots:
    """Permissions of the hosts of one client.

    Args:
        read: reads the file of a URL up to a number of bytes; returns its status code and its content.
        timeout_s: for one file.
        agent: our product token, which the rules name.
    """

    def __init__(
        self, read: Callable[[httpx.URL, int], Awaitable[tuple[int, bytes]]], timeout_s: float, agent: str
    ) -> None:
        self.read, self.timeout_s, self.agent = read, timeout_s, agent
        self.known: OrderedDict[str, Kept] = OrderedDict()

    async def check(self, url: httpx.URL) -> None:
        """Return if the host permits us to fetch a URL.

        Raises:
            DownloadError: it does not; or, as a temporary error, its rules cannot be read.
        """
        rules = await self._rules(url)
        if not rules.can_fetch(str(url), self.agent):
            raise DownloadError(f"robots.txt of {url.host} disallows this address")

    async def _rules(self, url: httpx.URL) -> Protego:
        origin = f"{url.scheme}://{url.netloc.decode()}"
        kept = self.known.get(origin)
        if kept is None or not kept.is_usable:
            self._forget()
            self.known[origin] = kept = Kept(time.monotonic(), asyncio.create_task(self._read(origin)))
            self.known.move_to_end(origin)
        return await asyncio.shield(kept.task)  # others wait for it, too

    def _forget(self) -> None:
        """Forget the rules that were read first, where all of them take too much memory."""
        num_bytes = sum(kept.num_bytes for kept in self.known.values())
        while len(self.known) >= MAX_HOSTS or num_bytes > MAX_KEPT_BYTES:
            num_bytes -= self.known.popitem(last=False)[1].num_bytes

    async def _read(self, origin: str) -> Protego:
        url = httpx.URL(f"{origin}/robots.txt")
        try:
            async with asyncio.timeout(self.timeout_s):
                status, data = await self.read(url, MAX_BYTES)
        except TimeoutError:
            raise DownloadError(
                f"robots.txt of {url.host} was not read within {self.timeout_s:g} s", temporary=True
            ) from None
        if status >= 500 or status == 429:
            raise DownloadError(f"robots.txt of {url.host} cannot be read (HTTP {status})", temporary=True)
        data = data if status == 200 else b""
        if origin in self.known:
            self.known[origin].num_bytes = len(data)
        return Protego.parse(data.decode("utf-8", "replace"))
