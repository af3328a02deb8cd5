"""Rules of robots.txt (RFC 9309), asked for once per host and kept for a day."""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
from protego import Protego

from worldmodel.flow.download.address import DownloadError

if TYPE_CHECKING:
    from worldmodel.flow.download.http import Client

MAX_BYTES = 500 * 1024
"""What is read of a file; RFC 9309, section 2.5."""
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
    """What the hosts of one client permit.

    Args:
        client: reads the files.
        agent: our product token, which the rules name.
    """

    def __init__(self, client: "Client", agent: str) -> None:
        self.client, self.agent = client, agent
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
        """Read rules, in at most half the time that a file may take: so some is left for the file."""
        url, seconds = httpx.URL(f"{origin}/robots.txt"), self.client.limits.timeout_s / 2
        try:
            async with asyncio.timeout(seconds):
                status, data = await self.client.read_text(url, MAX_BYTES)
        except TimeoutError:
            raise DownloadError(
                f"robots.txt of {url.host} was not read within {seconds:g} s", temporary=True
            ) from None
        if status >= 500 or status == 429:
            raise DownloadError(f"robots.txt of {url.host} cannot be read (HTTP {status})", temporary=True)
        data = data if status == 200 else b""
        if origin in self.known:
            self.known[origin].num_bytes = len(data)
        return Protego.parse(data.decode("utf-8", "replace"))
