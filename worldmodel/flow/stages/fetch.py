"""The stage `fetch`: from an address to the bytes of a video or an image.

A clip is dropped if its address can never give one (HTTP 404, not a video, too large, not permitted by
robots.txt, in a private network), and tried again later after errors that pass (HTTP 429 and 5xx, timeouts,
broken connections that could not be resumed).
"""

import asyncio
import hashlib
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

from worldmodel.errors import ConfigError
from worldmodel.flow.download.address import HTTP, DownloadError, parse_address
from worldmodel.flow.download.guard import networks_of
from worldmodel.flow.download.http import Client, Download, DownloadLimits
from worldmodel.flow.download.storage import read_storage
from worldmodel.flow.errors import FlowError
from worldmodel.flow.stages.base import DROP, RETRY, RETRY_AFTER, Resources, stage
from worldmodel.flow.stages.rows import Row, result_of
from worldmodel.media import sniff

MEDIA_TYPES = {
    "mp4": "video/mp4",
    "matroska": "video/x-matroska",
    "avi": "video/x-msvideo",
    "gif": "image/gif",
    "png": "image/png",
    "jpeg": "image/jpeg",
    "webp": "image/webp",
}
"""Formats that are fetched; they are recognised by their first bytes."""
OUTPUTS = pa.schema(
    {
        "video": pa.large_binary(),
        "sha256": pa.string(),
        "num_bytes": pa.int64(),
        "media_type": pa.string(),
        "final_address": pa.string(),
        "robots": pa.string(),
        "licence_link": pa.string(),
    }
)
USER_AGENT = "worldmodel/1 (an open-source library; its user did not set fetch.user_agent)"


@stage(
    version="1",
    inputs=["address", "error", "video"],  # why a row of the source has no address; the file that it holds
    outputs=OUTPUTS.names,
    uncounted=[
        *("root", "allow_private", "user_agent", "concurrency", "per_host", "timeout_s", "read_timeout_s"),
        *("max_redirects", "max_resumes", "storage_options"),
    ],
    resources=Resources(cpu=0.5, memory_gb=4.0),
    batch_size=16,
    timeout_s=900.0,
)
class Fetch:
    """Fetches the files of a batch concurrently.

    Args:
        formats: names of accepted formats; None: all of `MEDIA_TYPES`.
        max_bytes: larger files are dropped, as soon as this is known.
        root: folder of local files; None: addresses of local files are refused.
        allow_private: whether addresses in private networks and on this machine may be fetched; a list
            permits those of some networks: [10.1.0.0/16].
        robots: whether robots.txt and `X-Robots-Tag: noai` are respected.
        user_agent: the User-Agent header; rules of robots.txt are matched with the part before its slash.
        concurrency: files that are fetched at the same time.
        per_host: the same, of one host.
        timeout_s: seconds for one file.
        read_timeout_s: seconds of silence after which a connection counts as broken.
        max_redirects: redirects that are followed.
        max_resumes: broken connections after which a download goes on where it ended.
        storage_options: arguments of fsspec's file systems by protocol: `{s3: {endpoint_url: ...}}`.

    Raises:
        ConfigError: a setting is out of range.
    """

    def __init__(
        self,
        *,
        formats: Sequence[str] | None = None,
        max_bytes: int = 200 * 2**20,
        root: str | None = None,
        allow_private: bool | Sequence[str] = False,
        robots: Literal["respect", "ignore"] = "respect",
        user_agent: str = USER_AGENT,
        concurrency: int = 16,
        per_host: int = 4,
        timeout_s: float = 120.0,
        read_timeout_s: float = 20.0,
        max_redirects: int = 5,
        max_resumes: int = 4,
        storage_options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        counts = {"max_bytes": max_bytes, "concurrency": concurrency, "per_host": per_host}
        for name, value in {**counts, "timeout_s": timeout_s, "read_timeout_s": read_timeout_s}.items():
            if not value > 0:
                raise ConfigError(f"The setting {name} of fetch is {value}; use a number above 0.")
        if robots not in ("respect", "ignore"):
            raise ConfigError(f"The setting robots of fetch is {robots!r}; use respect or ignore.")
        self.formats = tuple(MEDIA_TYPES if formats is None else formats)
        if unknown := sorted({*self.formats} - {*MEDIA_TYPES}):
            raise ConfigError(
                f"fetch has no format {unknown[0]!r}; the formats are {', '.join(MEDIA_TYPES)}."
            )
        self.root, self.concurrency, self.storage_options = root, concurrency, storage_options or {}
        self.limits = DownloadLimits(max_bytes, timeout_s, read_timeout_s, max_redirects, max_resumes)
        self.robots, self.user_agent = robots, user_agent
        networks_of(allow_private)  # or it is an error now
        self.allow_private, self.per_host = allow_private, per_host
        self.loop = asyncio.new_event_loop()  # runs between batches, too: connections are kept
        threading.Thread(target=_run, args=[self.loop], name="fetch", daemon=True).start()
        weakref.finalize(self, self.loop.call_soon_threadsafe, self.loop.stop)
        self.client: Client | None = None

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        fetching = self._fetch_all(batch.to_pylist())
        return result_of(batch, OUTPUTS, asyncio.run_coroutine_threadsafe(fetching, self.loop).result())

    async def _fetch_all(self, clips: list[Row]) -> list[Row]:
        if self.client is None:  # created inside the event loop that uses it
            self.client = Client(
                self.limits, self.user_agent, self.allow_private, self.robots == "respect", self.per_host
            )
        slots = asyncio.Semaphore(self.concurrency)

        async def row(clip: Row) -> Row:
            address = clip["address"]
            if not address and clip.get("error"):
                return {DROP: clip["error"]}
            if isinstance(clip.get("video"), bytes):  # a table may have another column of this name
                return self._held(address, clip["video"])
            async with slots:
                try:
                    remote = parse_address(address).protocol in HTTP
                    return self._row(remote, await self._fetch(address))
                except DownloadError as error:
                    if not error.temporary:
                        return {DROP: str(error)}
                    return {RETRY: str(error), RETRY_AFTER: error.retry_after_s}
                except FlowError:
                    raise
                except Exception as error:  # of a library that did not expect such an address or answer
                    return {RETRY: f"it cannot be fetched ({type(error).__name__}: {error})"}

        return await asyncio.gather(*map(row, clips))

    async def _fetch(self, text: str | None) -> Download:
        assert self.client is not None
        address = parse_address(text)
        if address.protocol in HTTP:
            return await self.client.download(address, self._accept)
        options = self.storage_options.get(address.protocol, {})
        reading = asyncio.to_thread(read_storage, address, self.root, options, self.limits.max_bytes)
        try:
            data = await asyncio.wait_for(reading, self.limits.timeout_s)
        except TimeoutError:
            seconds = f"{self.limits.timeout_s:g} s"
            raise DownloadError(f"{address.location[:200]!r} was not read in {seconds}", True) from None
        self._accept(data)
        return Download(data, address.location)

    def _held(self, address: str, data: bytes) -> Row:
        """Return the row of a file that came with its source; it is in the buffer already."""
        try:
            if len(data) > self.limits.max_bytes:
                raise DownloadError(f"it is larger than {self.limits.max_bytes / 2**20:g} MiB")
            self._accept(data)
        except DownloadError as error:
            return {DROP: str(error)}
        return {**self._row(False, Download(data, address)), "video": None}

    def _accept(self, data: bytes) -> None:
        """Refuse content of other formats, whatever its headers say."""
        if not data:
            raise DownloadError("it is empty (0 bytes)")
        kind = sniff.detect_format(data)
        if kind not in self.formats:
            raise DownloadError(f"it is {sniff.describe(kind, data)}, not {' or '.join(self.formats)}")

    def _row(self, remote: bool, found: Download) -> Row:
        return {
            "video": found.data,
            "sha256": hashlib.sha256(found.data).hexdigest(),
            "num_bytes": len(found.data),
            "media_type": MEDIA_TYPES[sniff.detect_format(found.data)],
            "final_address": found.final_address,
            "robots": ("allowed" if self.robots == "respect" else "ignored") if remote else "not asked",
            "licence_link": found.licence_link,
        }


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped."""
    loop.run_forever()
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
