"""Webhooks: a signed message to the operator's address when a video has finished.

Headers and signature are those of Standard Webhooks 1.0 (https://www.standardwebhooks.com), so that its
libraries check them. A message that is not taken with a status 2xx is sent again, with the same id.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpcore
import httpx

from worldmodel.errors import ConfigError
from worldmodel.flow.download.guard import GuardedBackend
from worldmodel.flow.errors import FlowError
from worldmodel.retry import Backoff, retry_after
from worldmodel.serving.auth import read_private
from worldmodel.serving.settings import HttpOptions
from worldmodel.serving.videos.record import VideoJob, video_object

LOG = logging.getLogger(__name__)

PREFIX = "whsec_"
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 24, 64
"""Size of a secret, as Standard Webhooks has it."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, PATIENCE_S = 1.0, 600.0, 86_400.0
"""First and longest pause between attempts, and the time after which a message is given up."""
TIMEOUTS = {"connect": 5.0, "read": 15.0, "write": 15.0, "pool": 60.0}
MAX_CONNECTIONS, MAX_WAITING = 8, 1000
GONE = 410
"""Status of a receiver that wants no more attempts."""


class Webhooks:
    """Sends messages in the background; those that were not taken end with the server."""

    def __init__(self, options: HttpOptions) -> None:
        """Read the secret; without an address nothing is sent.

        Raises:
            ConfigError: the address or the secret cannot be used.
        """
        self._url, self._waiting = options.webhook_url, set[asyncio.Task[None]]()
        self._secret = check_webhooks(options)
        self._pool = httpcore.AsyncConnectionPool(
            httpx.create_ssl_context(),
            max_connections=MAX_CONNECTIONS,
            network_backend=GuardedBackend(options.webhook_allow_private),
        )

    def finished(self, job: VideoJob, key: str) -> None:
        """Tell the receiver that a video has finished; `key` is the name of its owner's key."""
        if self._url is None:
            return
        if len(self._waiting) >= MAX_WAITING:
            LOG.error("%d webhooks wait; that of %s is not sent.", MAX_WAITING, job.record.id)
            return
        kind = f"video.{job.record.status}"
        message = {
            "type": kind,
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "key": key,
            "data": video_object(job).model_dump(),
        }
        name = f"msg_{job.record.id}_{job.record.status}"  # the same from every server that sends it
        task = asyncio.create_task(self._send(self._url, name, json.dumps(message).encode()))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def close(self) -> None:
        """Give up what was not taken yet."""
        if self._waiting:
            LOG.warning("%d webhooks were not taken, and are not sent again.", len(self._waiting))
            for task in self._waiting:
                task.cancel()
            await asyncio.wait(self._waiting)
        await self._pool.aclose()

    async def _send(self, url: str, name: str, body: bytes) -> None:
        """Send a message until it is taken."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, timeout_s=PATIENCE_S)
        while True:
            asked_s, why = 0.0, ""
            try:
                now = int(time.time())
                headers: dict[str | bytes, str | bytes] = {
                    "host": urlsplit(url).netloc.rpartition("@")[2],
                    "content-type": "application/json",
                    "content-length": str(len(body)),
                    **signed(self._secret, name, now, body),
                }
                answer = await self._pool.request(
                    "POST", url, headers=headers, content=body, extensions={"timeout": TIMEOUTS}
                )
                if 200 <= answer.status < 300 or answer.status == GONE:
                    return
                why = f"status {answer.status}"
                asked = [value for header, value in answer.headers if header.lower() == b"retry-after"]
                asked_s = retry_after(asked[0].decode("latin-1")) if asked else 0.0
            except FlowError as error:  # the address is not public, and will not be
                LOG.error("The webhook %s is not sent: %s.", name, error)
                return
            except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
                why = type(error).__name__
            pause_s = backoff.pause_s(asked_s)
            if pause_s is None:
                LOG.error("The webhook %s was not taken (%s), and is not sent again.", name, why)
                return
            LOG.info("The webhook %s was not taken (%s); it is sent again.", name, why)
            await asyncio.sleep(pause_s)


def signed(secret: bytes, name: str, timestamp: int, body: bytes) -> Mapping[str, str]:
    """Return the headers of a message: its id, its time and its signature."""
    content = f"{name}.{timestamp}.".encode() + body
    signature = base64.b64encode(hmac.new(secret, content, hashlib.sha256).digest()).decode()
    return {
        "webhook-id": name,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{signature}",
    }


def check_webhooks(options: HttpOptions) -> bytes:
    """Return the secret that signs webhooks; empty without an address.

    Raises:
        ConfigError: the address or the secret cannot be used.
    """
    url, file = options.webhook_url, options.webhook_secret_file
    if (url is None) != (file is None):
        raise ConfigError(
            "Webhooks need an address and a secret; pass --webhook-url and --webhook-secret-file."
        )
    if url is None or file is None:
        return b""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"webhook_url is {url!r}; write it as https://HOST/PATH.")
    return read_secret(file)


def read_secret(file: Path) -> bytes:
    """Read a secret that begins with `whsec_`.

    Raises:
        ConfigError: the file cannot be read, is accessible to other users, or has no such secret.
    """
    text = read_private(file, "webhook secret").strip()
    try:
        secret = base64.b64decode(text.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if not (text.startswith(PREFIX) and MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES):
        raise ConfigError(
            f"The webhook secret in {str(file)!r} is not {PREFIX} and the base64 of {MIN_SECRET_BYTES} to "
            f"{MAX_SECRET_BYTES} bytes; write it with: echo {PREFIX}$(openssl rand -base64 32)."
        )
    return secret
