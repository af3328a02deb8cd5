"""Rules of robots.txt (RFC 9309), asked for once per host and kept for a day."""

import asyncio
import time
from collections import OrderedDict
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


class Robots:
    """What the hosts of one client permit.

    Args:
        client: reads the files.
        agent: our product token, which the rules name.
    """

    def __init__(self, client: "Client", agent: str) -> None:
        self.client, self.agent = client, agent
        self.known: OrderedDict[str, tuple[float, asyncio.Task[Protego]]] = OrderedDict()

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
        made, task = self.known.get(origin, (0.0, None))
        failed = task is not None and task.done() and (task.cancelled() or task.exception() is not None)
        if task is None or failed or time.monotonic() - made > KEPT_S:
            task = asyncio.create_task(self._read(httpx.URL(f"{origin}/robots.txt")))
            self.known[origin] = time.monotonic(), task
            while len(self.known) > MAX_HOSTS:
                self.known.popitem(last=False)
        return await asyncio.shield(task)  # others wait for it, too

    async def _read(self, url: httpx.URL) -> Protego:
        status, data = await self.client.read_text(url, MAX_BYTES)
        if status >= 500 or status == 429:
            raise DownloadError(f"robots.txt of {url.host} cannot be read (HTTP {status})", temporary=True)
        return Protego.parse(data.decode("utf-8", "replace") if status == 200 else "")
