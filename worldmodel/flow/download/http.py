"""Downloading of files over http(s), with limits."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

import httpcore
import httpx

from worldmodel.flow.download.address import HTTP, Address, DownloadError
from worldmodel.flow.download.guard import GuardedBackend
from worldmodel.flow.download.robots import Robots
from worldmodel.retry import retry_after

REDIRECTS = (301, 302, 303, 307, 308)
TEMPORARY = (408, 425, 429)
"""Status codes below 500 after which trying again may succeed."""
OPT_OUT = ("noai", "noimageai")
"""Directives of the header X-Robots-Tag with which a host refuses the use of a file for training."""
SNIFFED = 4096
"""Bytes after which the format of a file is judged."""
NUMBER = re.compile(r"[0-9]{1,18}")
CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18}|\*)")
MAX_LINK = 2048
"""Characters of the header Link that are looked at."""


@dataclass(frozen=True)
class DownloadLimits:
    """Limits on one file."""

    max_bytes: int = 200 * 2**20
    timeout_s: float = 120.0
    """For the whole file, with redirects; a server that sends a byte now and then does not extend it."""
    read_timeout_s: float = 20.0
    """For a connection, and for a server's silence."""
    max_redirects: int = 5
    max_resumes: int = 4
    """Broken connections after which a download goes on where it ended."""


@dataclass(frozen=True)
class Download:
    """A downloaded file."""

    data: bytes
    final_address: str
    """Where redirects led to."""
    licence_link: str | None = None
    """Target of the header `Link: <...>; rel=license`."""


class Client:
    """Downloads files; used by one event loop.

    Args:
        user_agent: name, and after a slash a version and an address for questions; rules of robots.txt name
            its first part.
        allow_private: as of `GuardedBackend`.
        robots: whether robots.txt and the directives `noai` and `noimageai` are respected.
        per_host: connections to one host at a time.
    """

    def __init__(
        self,
        limits: DownloadLimits,
        user_agent: str,
        allow_private: bool | Sequence[str],
        robots: bool,
        per_host: int,
    ) -> None:
        self.limits, self.per_host = limits, per_host
        self.headers = {"User-Agent": user_agent, "Accept": "*/*", "Accept-Encoding": "identity"}
        self.pool = httpcore.AsyncConnectionPool(
            httpx.create_ssl_context(), max_connections=None, max_keepalive_connections=64,
            keepalive_expiry=30, network_backend=GuardedBackend(allow_private),
        )  # fmt: skip
        # At most half of a file's time goes to the rules, so that some is left for the file itself.
        agent = user_agent.split("/")[0]
        self.robots = Robots(self.read_text, limits.timeout_s / 2, agent) if robots else None
        self.hosts: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def download(self, address: Address, accept: Callable[[bytes], None]) -> Download:
        """Return a file, or the part of it that the address names.

        Args:
            address: what to read.
            accept: gets the first bytes, and raises `DownloadError` if the rest is not wanted.

        Raises:
            DownloadError: it cannot be had, or exceeds a limit.
        """
        url = parse_url(address.location)
        if url is None:
            raise DownloadError(f"the address {address.location[:200]!r} is not a valid URL")
        slots = self.hosts.setdefault(url.host, asyncio.Semaphore(self.per_host))
        async with slots:
            try:
                async with asyncio.timeout(self.limits.timeout_s):
                    return await Transfer(self, url, address, accept).run()
            except TimeoutError:
                raise DownloadError(
                    f"{url.host} did not send the file within {self.limits.timeout_s:g} s", temporary=True
                ) from None

    async def read_text(self, url: httpx.URL, max_bytes: int) -> tuple[int, bytes]:
        """Return the status of a URL, and the first bytes of its content.

        Raises:
            DownloadError: the host does not answer.
        """
        data = bytearray()
        try:
            async with self.open(url, {}) as (_, response):
                async for chunk in response.aiter_stream():
                    data += chunk[: max_bytes - len(data)]
                    if len(data) >= max_bytes:
                        break
                return response.status, bytes(data)
        except CONNECTION_ERRORS as error:
            raise connection_error(url.host, error) from None

    @asynccontextmanager
    async def open(
        self,
        url: httpx.URL,
        headers: dict[str, str],
        check: Callable[[httpx.URL], Awaitable[None]] | None = None,
    ) -> AsyncIterator[tuple[httpx.URL, httpcore.Response]]:
        """Request a URL and follow redirects; `check` is called with every URL before its request.

        Raises:
            DownloadError: too many redirects, or one to another protocol.
            httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException: the connection failed.
        """
        limit, seconds = self.limits.max_redirects, self.limits.read_timeout_s
        timeout = {"connect": seconds, "read": seconds, "write": seconds, "pool": None}
        for _ in range(limit + 1):
            if url.scheme not in HTTP or not url.host:
                raise DownloadError(f"it leads to {str(url)[:200]!r}, which is not an http(s) address")
            if check is not None:
                await check(url)
            target = httpcore.URL(
                scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
            )
            sent = [(k.encode(), v.encode()) for k, v in {**self.headers, **headers}.items()]
            sent.insert(0, (b"Host", url.netloc))
            async with self.pool.stream(
                "GET", target, headers=sent, extensions={"timeout": timeout}
            ) as response:
                location = httpx.Headers(response.headers).get("location")
                if response.status not in REDIRECTS or not location:
                    yield url, response
                    return
            following = parse_url(location, url)
            if following is None:
                raise DownloadError(f"{url.host} redirects to {location[:200]!r}, which is not a URL")
            url = following
        raise DownloadError(f"it has more than {limit} redirects")


class Transfer:
    """One download, over as many connections as it takes."""

    def __init__(
        self, client: Client, url: httpx.URL, address: Address, accept: Callable[[bytes], None]
    ) -> None:
        self.client, self.url, self.address, self.accept = client, url, address, accept
        self.limit = client.limits.max_bytes
        self.data = bytearray()
        self.accepted = False
        self.total: int | None = None
        """Size of the whole file, where the host says it."""
        self.validator = ""
        """Identity of the file's version, without which bytes of two requests cannot be joined."""

    async def run(self) -> Download:
        """Return the file; a broken connection is resumed where it ended.

        Raises:
            DownloadError: it cannot be had, or exceeds a limit.
        """
        if (self.address.size or 0) > self.limit:
            raise self._too_large()
        for _ in range(self.client.limits.max_resumes):
            before = len(self.data)
            try:
                return await self._request()
            except CONNECTION_ERRORS as error:
                if len(self.data) <= before or not self.validator:
                    raise connection_error(self.url.host, error) from None
        try:
            return await self._request()
        except CONNECTION_ERRORS as error:
            raise connection_error(self.url.host, error) from None

    async def _request(self) -> Download:
        offset, size = self.address.offset, self.address.size
        start = offset + len(self.data)
        headers = {}
        if start or size is not None:
            headers["Range"] = f"bytes={start}-{'' if size is None else offset + size - 1}"
            if self.data:
                headers["If-Range"] = self.validator
        robots = self.client.robots
        async with self.client.open(self.url, headers, robots and robots.check) as (final, response):
            found = httpx.Headers(response.headers)
            skip = self._skipped(response.status, found, start)
            await self._read(response.aiter_stream(), skip)
        last = None if size is None else offset + size
        had, end = offset + len(self.data), min((each for each in (self.total, last) if each), default=0)
        if response.status == 206 and had < end:  # less of a range than was asked for
            raise httpcore.RemoteProtocolError(f"the answer ended at byte {had} of {end}")
        if size is not None and len(self.data) < size:
            raise DownloadError(f"the file ends before byte {offset + size}")
        self._judge()
        return Download(bytes(self.data), str(final), licence_link(found))

    def _skipped(self, status: int, headers: httpx.Headers, start: int) -> int:
        """Return the number of bytes to skip before the wanted ones, after checking a response's headers."""
        if status >= 500 or status in TEMPORARY:
            wait_s = retry_after(headers.get("retry-after", ""))
            raise DownloadError(f"{self.url.host} answered HTTP {status}", True, wait_s)
        if status not in (200, 206):
            raise DownloadError(f"{self.url.host} answered HTTP {status}")
        tags = {tag.strip().lower() for tag in re.split("[,:]", headers.get("x-robots-tag", ""))}
        if self.client.robots is not None and (refused := tags.intersection(OPT_OUT)):
            raise DownloadError(f"{self.url.host} refuses use for training (X-Robots-Tag: {min(refused)})")
        length = headers.get("content-length", "")
        declared = int(length) if NUMBER.fullmatch(length) else None
        if status == 206:
            found = CONTENT_RANGE.match(headers.get("content-range", ""))
            if found is None or int(found[1]) != start:
                raise DownloadError(f"{self.url.host} sent another byte range than was asked for")
            skip = 0
            self.total = self.total if found[2] == "*" else int(found[2])
        else:  # the whole file: ranges are not supported, or it has changed since the last request
            self.data.clear()
            self.accepted, self.total = False, declared
            skip = self.address.offset
            if skip > self.limit:
                raise DownloadError(f"{self.url.host} does not support byte ranges")
        if self.address.size is None and (declared or 0) - skip + len(self.data) > self.limit:
            raise self._too_large()
        tag = headers.get("etag", "")
        self.validator = tag if tag.startswith('"') else headers.get("last-modified", "")
        return skip

    async def _read(self, chunks: AsyncIterator[bytes], skip: int) -> None:
        wanted = self.limit + 1 if self.address.size is None else self.address.size
        async for chunk in chunks:
            passed = min(skip, len(chunk))
            skip -= passed
            self.data += chunk[passed : passed + wanted - len(self.data)]
            if len(self.data) > self.limit:
                raise self._too_large()
            if len(self.data) >= SNIFFED:
                self._judge()
            if len(self.data) >= wanted:
                return

    def _judge(self) -> None:
        if not self.accepted:
            self.accept(bytes(self.data[:SNIFFED]))
            self.accepted = True

    def _too_large(self) -> DownloadError:
        return DownloadError(f"it is larger than {self.limit / 2**20:g} MiB")


def parse_url(text: str, base: httpx.URL | None = None) -> httpx.URL | None:
    """Return a URL, which may be relative to another one; None if it, its host or its port is wrong."""
    try:
        url = httpx.URL(text) if base is None else base.join(text)
        _ = url.host  # it is decoded when it is read
        return url if (url.port or 0) < 2**16 else None
    except (httpx.InvalidURL, UnicodeError, ValueError):
        return None


CONNECTION_ERRORS = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException)


def connection_error(host: str, error: Exception) -> DownloadError:
    """Return the error of a connection that failed; a wrong certificate does not mend itself."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return DownloadError(
        f"the connection to {host} failed ({reason})", temporary="CERTIFICATE_VERIFY_FAILED" not in reason
    )


def licence_link(headers: httpx.Headers) -> str | None:
    """Return the target of `Link: <...>; rel="license"`, if there is one."""
    for link in re.findall(r"<([^<>]*)>([^<]*)", headers.get("link", "")[:MAX_LINK]):
        if re.search(r"""rel\s*=\s*"?'?licen[sc]e\b""", link[1], re.IGNORECASE):
            return link[0]
    return None
