"""Webhooks: a signed message to the operator's address when a video has finished.

Headers and signature are those of Standard Webhooks 1.0 (https://www.standardwebhooks.com), so that its
libraries check them. A message is stored together with the end of its video. One that is not taken with a
status 2xx is sent again, with the same id, also by the next server on the database.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpcore
import httpx
import sqlalchemy as sa
from sqlalchemy import Connection

from worldmodel.database import insert
from worldmodel.errors import ConfigError
from worldmodel.flow.download.guard import GuardedBackend
from worldmodel.flow.errors import FlowError
from worldmodel.leases import Holder, now
from worldmodel.retry import Backoff, retry_after
from worldmodel.serving.auth import Keys, read_private
from worldmodel.serving.errors import UnavailableError
from worldmodel.serving.replicas.database import Database, webhooks
from worldmodel.serving.replicas.replica import Replica
from worldmodel.serving.settings import HttpOptions
from worldmodel.serving.videos.record import VideoJob, VideoRecord, video_object

LOG = logging.getLogger(__name__)

PREFIX = "whsec_"
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 24, 64
"""Size of a secret, as Standard Webhooks has it."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, PATIENCE_S = 1.0, 600.0, 86_400.0
"""First and longest pause between attempts, and the time after which a message is given up."""
TIMEOUTS = {"connect": 5.0, "read": 15.0, "write": 15.0, "pool": 60.0}
MAX_SENDING = 8
"""Messages that one server sends at a time."""
LEAST_WAIT_S, POLL_S = 0.05, 10.0
"""How often it looks for messages: at most, and at least for those that another server has left."""
RETRY_S = 1.0
"""Pause after which a database that did not answer is asked again."""
GONE = 410
"""Status of a receiver that wants no more attempts."""


class Webhooks:
    """Messages in the database until they are taken, and the task that sends those that are due."""

    def __init__(
        self, options: HttpOptions, keys: Keys, database: Database, replica: Replica | None = None
    ) -> None:
        """Read the secret, and forget expired messages; without an address nothing is sent.

        Raises:
            ConfigError: the address or the secret cannot be used.
            DatabaseError: the database does not answer.
        """
        self._url, self._keys = options.webhook_url, keys
        self._secret = check_webhooks(options)
        self._holder, self._run = Holder() if replica is None else replica.lease, database.run
        self._wake, self._sending = asyncio.Event(), set[asyncio.Task[None]]()
        self._task: asyncio.Task[None] | None = None
        self._pool = httpcore.AsyncConnectionPool(
            httpx.create_ssl_context(),
            max_connections=MAX_SENDING,
            network_backend=GuardedBackend(options.webhook_allow_private),
        )
        database.run_now(lambda db: db.execute(sa.delete(webhooks).where(webhooks.c.expires_at <= now(db))))

    def add(self, db: Connection, record: VideoRecord) -> None:
        """Store the message that a video has finished, in the transaction that says so of its record."""
        if self._url is None:
            return
        message = {
            "type": f"video.{record.status}",
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "key": self._keys.name(record.owner),
            "data": video_object(VideoJob(record)).model_dump(),
        }
        values = {
            "id": f"msg_{record.id}_{record.status}",  # the same from every server that sends it
            "due_at": now(db),
            "expires_at": now(db) + PATIENCE_S,
            "attempts": 0,
            "body": json.dumps(message),
        }
        db.execute(insert(db, webhooks).values(values).on_conflict_do_nothing())

    def wake(self) -> None:
        """Look for messages now, as one was added."""
        self._wake.set()

    def start(self) -> None:
        """Begin to send, also what earlier servers have left."""
        if self._url is not None:
            self._task = asyncio.create_task(self._send_due(self._url))

    async def close(self) -> None:
        """Stop sending; what was not taken is left to other servers on the database, or to the next."""
        tasks = [task for task in (self._task, *self._sending) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
            held = sa.update(webhooks).where(self._holder.holds(webhooks)).values(holder=None)
            with suppress(UnavailableError):
                await self._run(lambda db: db.execute(held))
        await self._pool.aclose()

    async def _send_due(self, url: str) -> None:
        while True:
            self._wake.clear()
            wait_s = RETRY_S
            try:
                if (room := MAX_SENDING - len(self._sending)) > 0:
                    claimed, wait_s = await self._run(lambda db, room=room: self._claim(db, room))
                    for row in claimed:
                        task = asyncio.create_task(self._send(url, row))
                        self._sending.add(task)
                        task.add_done_callback(self._sending.discard)
            except UnavailableError:
                LOG.warning("The database does not answer; no webhook is sent.")
            except Exception:  # nothing awaits this task
                LOG.exception("Webhooks cannot be read.")
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    def _claim(self, db: Connection, count: int) -> tuple[Sequence[Any], float]:
        """Take messages that are due; return them, and the seconds until there may be others."""
        due = webhooks.c.due_at
        claimed = self._holder.claim(db, webhooks, due <= now(db), [due], count)
        free = self._holder.is_free(db, webhooks.c.holder)
        next_s = db.scalar(sa.select(sa.func.min(due) - now(db)).where(free))
        return claimed, POLL_S if next_s is None else min(max(next_s, LEAST_WAIT_S), POLL_S)

    async def _send(self, url: str, row: Any) -> None:
        """Send a message once, and store what became of it."""
        pause_s, why = await self._attempt(url, row)
        this = sa.and_(webhooks.c.id == row.id, self._holder.holds(webhooks))

        def work(db: Connection) -> bool:
            if pause_s is not None:
                again = sa.update(webhooks).where(this, webhooks.c.expires_at > now(db))
                values = {"holder": None, "due_at": now(db) + pause_s, "attempts": row.attempts + 1}
                if db.execute(again.values(values)).rowcount:
                    return True
            db.execute(sa.delete(webhooks).where(this))
            return False

        while True:
            try:
                waits = await self._run(work)
                break
            except UnavailableError:  # meanwhile it is this server's, and is not sent again
                await asyncio.sleep(RETRY_S)
        if waits:
            LOG.info("The webhook %s was not taken (%s); it is sent again.", row.id, why)
        elif why:
            LOG.error("The webhook %s was not taken (%s), and is not sent again.", row.id, why)
        self._wake.set()

    async def _attempt(self, url: str, row: Any) -> tuple[float | None, str]:
        """Send a message; return the pause before the next attempt, if there is to be one, and why."""
        asked_s, body = 0.0, row.body.encode()
        try:
            headers: dict[str | bytes, str | bytes] = {
                "host": urlsplit(url).netloc.rpartition("@")[2],
                "content-type": "application/json",
                "content-length": str(len(body)),
                **signed(self._secret, row.id, int(time.time()), body),
            }
            answer = await self._pool.request(
                "POST", url, headers=headers, content=body, extensions={"timeout": TIMEOUTS}
            )
            if 200 <= answer.status < 300 or answer.status == GONE:
                return None, ""
            why = f"status {answer.status}"
            asked = [value for header, value in answer.headers if header.lower() == b"retry-after"]
            asked_s = retry_after(asked[0].decode("latin-1")) if asked else 0.0
        except FlowError as error:  # the address is not public, and will not be
            return None, str(error)
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
            why = type(error).__name__
        first_s = min(FIRST_PAUSE_S * 2 ** min(row.attempts, 32), LONGEST_PAUSE_S)
        return Backoff(first_s, LONGEST_PAUSE_S).pause_s(asked_s), why


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
