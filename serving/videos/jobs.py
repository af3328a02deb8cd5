"""Videos as jobs: a bounded queue, real progress, cancelling within a denoising step, and records that last.

A record is on the disk before its job is answered for, and a video before its record says that it is
finished. What a killed server left unfinished is failed when the next one starts.
"""

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np

from worldmodel.errors import InputError, OutputError
from worldmodel.serving.errors import Conflict, NotFound, TooManyRequests, Unavailable
from worldmodel.serving.media import encoding
from worldmodel.serving.metrics import Metrics
from worldmodel.serving.protocol import Status
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.videos.storage import Storage, new_id
from worldmodel.serving.worlds.service import WorldService, WorldSettings
from worldmodel.types import Action

LOG = logging.getLogger(__name__)

SHEET = 4
"""Pictures along one side of a spritesheet."""
CANCELLED = ("cancelled", "The video was deleted before it was finished.")
FULL_DISK = "The server has no room for videos just now; try again later."


class IdempotencyKeyReused(Conflict):
    """An Idempotency-Key came with another request before."""

    code = "idempotency_key_reused"


@dataclass(frozen=True)
class Order:
    """What is to be made: a first observation or a text to imagine one, and an action for every round."""

    settings: WorldSettings
    actions: tuple[Action, ...]
    num_frames: int
    frames: np.ndarray | None = None
    text: str | None = None


@dataclass
class Record:
    """What is known of a video, as it is written to the disk."""

    id: str
    owner: str
    model: str
    prompt: str
    size: str
    seconds: str
    num_frames: int
    fps: int
    seed: int
    created_at: int
    expires_at: int
    status: Status = "queued"
    completed_at: int | None = None
    inference_time_s: float | None = None
    error: dict[str, str] | None = None
    idempotency: str | None = None
    """Hash of the owner and the Idempotency-Key that came with the request."""
    fingerprint: str | None = None
    """Hash of the request."""

    @property
    def finished(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.status in ("completed", "failed")


@dataclass(eq=False)
class Job:
    """A record and, until it is finished, its order and its work."""

    record: Record
    order: Order | None = None
    steps_done: int = 0
    work: asyncio.Task[None] | None = None
    stopping: tuple[str, str] | None = None
    """Code and sentence with which it was stopped from outside."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def progress(self) -> int:
        """Percent of the denoising steps of all rounds; 100 only when the file is there."""
        if self.record.status == "completed":
            return 100
        if self.order is None:
            return 0
        total = len(self.order.actions) * self.order.settings.num_inference_steps
        return min(99, 100 * self.steps_done // total)


class Jobs:
    """All videos of one server."""

    def __init__(self, service: WorldService, config: ServerConfig, metrics: Metrics) -> None:
        """Read what earlier servers left in the data folder.

        Raises:
            OutputError: the data folder cannot be used.
        """
        self.service, self.config, self.metrics = service, config, metrics
        self.storage = Storage(config.data_dir)
        self.draining = False
        self._jobs: dict[str, Job] = {}
        self._queue: deque[Job] = deque()
        self._running: set[Job] = set()
        self._submitting = asyncio.Lock()
        self._mean_run_s = 5.0
        self._recover()
        metrics.queued_jobs.set_function(lambda: len(self._queue))
        metrics.running_jobs.set_function(lambda: len(self._running))

    # ---- what a client asks ----------------------------------------------------------------------------

    async def submit(self, record: Record, order: Order) -> Job:
        """Queue a video, or return the one that the same Idempotency-Key made before.

        Raises:
            IdempotencyKeyReused: it came with another request before.
            TooManyRequests: the queue is full, or the owner has as many videos as one may have.
            Unavailable: the server is stopping or its disk is full.
        """
        async with self._submitting:
            if (earlier := self.earlier(record)) is not None:
                return earlier
            self._admit(record.owner)
            try:
                await asyncio.to_thread(self.storage.write_record, asdict(record))
            except (OSError, OutputError):
                LOG.exception("A record cannot be written.")
                raise Unavailable(FULL_DISK) from None
            job = Job(record, order)
            self._jobs[record.id] = job
            self._queue.append(job)
        self._pump()
        return job

    def earlier(self, record: Record) -> Job | None:
        """Return the job that the same Idempotency-Key made before.

        Raises:
            IdempotencyKeyReused: it was another request.
        """
        if record.idempotency is None:
            return None
        for job in self._jobs.values():
            if job.record.idempotency == record.idempotency:
                if job.record.fingerprint != record.fingerprint:
                    raise IdempotencyKeyReused(
                        "This Idempotency-Key came with another request before; use a new one."
                    )
                return job
        return None

    def get(self, owner: str, identity: str) -> Job:
        """Find a video of its owner.

        Raises:
            NotFound: there is none, or it is somebody else's.
        """
        job = self._jobs.get(identity)
        if job is None or job.record.owner != owner:
            raise NotFound("There is no such video; GET /v1/videos lists yours.")
        return job

    def owned(self, owner: str) -> list[Job]:
        """Return an owner's videos, oldest first."""
        return [job for job in self._jobs.values() if job.record.owner == owner]

    def position(self, job: Job) -> int | None:
        """Return a waiting job's place in the queue, 1 for the next."""
        return self._queue.index(job) + 1 if job in self._queue else None

    async def delete(self, job: Job) -> None:
        """Stop a job, within one denoising step, and remove all that is kept of it."""
        if not job.record.finished:
            await self._stop(job, *CANCELLED)
        self._jobs.pop(job.record.id, None)
        await asyncio.to_thread(self.storage.remove, job.record.id)

    async def sweep(self) -> None:
        """Remove finished videos whose time is over."""
        now = time.time()
        for job in list(self._jobs.values()):
            if job.record.finished and job.record.expires_at <= now:
                await self.delete(job)

    # ---- stopping --------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether the queue takes no more."""
        return len(self._queue) >= self.config.max_queued_jobs

    async def drain(self, timeout_s: float) -> None:
        """Take no more, let what is there end, and fail what has not ended in time."""
        self.draining = True
        unfinished = [job for job in self._jobs.values() if not job.record.finished]
        if unfinished:
            waits = [asyncio.ensure_future(job.ended.wait()) for job in unfinished]
            _, late = await asyncio.wait(waits, timeout=timeout_s)
            for wait in late:
                wait.cancel()
        for job in unfinished:
            if not job.record.finished:
                await self._stop(job, "server_stopped", "The server stopped before the video was finished.")

    async def close(self) -> None:
        """Fail what is unfinished and give the data folder back."""
        await self.drain(0)
        self.storage.close()

    async def _stop(self, job: Job, code: str, message: str) -> None:
        if job.stopping is None:
            job.stopping = (code, message)
            if job in self._queue:
                self._queue.remove(job)
                await self._fail(job, code, message)
            elif job.work is not None:
                job.work.cancel()
        await job.ended.wait()

    # ---- work ------------------------------------------------------------------------------------------

    def _admit(self, owner: str) -> None:
        if self.draining:
            raise Unavailable("The server is stopping and takes no more videos; ask another one, or later.")
        wait_s = min(60.0, self._mean_run_s)
        if self.full:
            raise TooManyRequests(
                f"{len(self._queue)} videos wait already, the most allowed; try again later.", wait_s
            )
        owned = self.owned(owner)
        if sum(not job.record.finished for job in owned) >= self.config.max_jobs_per_key:
            raise TooManyRequests(
                f"This key has {self.config.max_jobs_per_key} unfinished videos; wait for one to end.", wait_s
            )
        if len(owned) >= self.config.max_videos_per_key:
            raise TooManyRequests(f"This key keeps {len(owned)} videos; delete some first.", 60.0)

    def _pump(self) -> None:
        while self._queue and len(self._running) < self.config.max_running_jobs:
            job = self._queue.popleft()
            self._running.add(job)
            job.record.status = "in_progress"
            job.work = asyncio.create_task(self._run(job))
            job.work.add_done_callback(partial(self._left, job))

    def _left(self, job: Job, _: asyncio.Task[None]) -> None:
        self._running.discard(job)
        if not job.ended.is_set():  # it was cancelled before its first line
            job.work = asyncio.create_task(self._fail(job, *(job.stopping or CANCELLED)))
        self._pump()

    async def _run(self, job: Job) -> None:
        """Make a video; whatever happens, its record says how it ended."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.config.job_deadline_s):
                frames = await self._play(job)
            took = time.monotonic() - began
            await self._complete(job, frames, took)
            self._mean_run_s += 0.2 * (took - self._mean_run_s)
        except asyncio.CancelledError:
            await self._fail(job, *(job.stopping or CANCELLED))
        except TimeoutError:
            limit = self.config.job_deadline_s
            await self._fail(
                job, "deadline_exceeded", f"The video was not finished in {limit:g} s; ask for fewer frames."
            )
        except InputError as error:
            await self._fail(job, "invalid_request", str(error))
        except Exception:
            LOG.exception("The video %s failed.", job.record.id)
            await self._fail(job, "internal_error", "The server made a mistake; try again.")
        finally:
            job.ended.set()

    async def _play(self, job: Job) -> np.ndarray:
        order = job.order
        assert order is not None
        settings = order.settings
        world = await self.service.start(order.frames, text=order.text, **asdict(settings))
        try:
            clips = []
            for index, action in enumerate(order.actions):

                def on_progress(
                    step: int, _: int, before: int = index * settings.num_inference_steps
                ) -> None:
                    job.steps_done = before + step

                clips.append(await world.step(action, on_progress))
        finally:
            world.close()
        return np.concatenate(clips)[: order.num_frames]

    async def _complete(self, job: Job, frames: np.ndarray, took: float) -> None:
        now = int(time.time())
        done = replace(
            job.record, status="completed", completed_at=now, inference_time_s=round(took, 3), error=None
        )
        # A thread cannot be cancelled: whoever stops the job now comes too late, and waits for its files.
        storing = asyncio.ensure_future(asyncio.to_thread(self._store, done, frames))
        try:
            await asyncio.shield(storing)
        except asyncio.CancelledError:
            await storing
        job.record, job.order = done, None
        self.metrics.jobs.labels(outcome="ok").inc()

    def _store(self, record: Record, frames: np.ndarray) -> None:
        self.storage.write(record.id, "video", encoding.encode_mp4(frames, record.fps))
        self.storage.write(record.id, "thumbnail", encoding.encode_jpeg(frames[0]))
        self.storage.write(record.id, "spritesheet", encoding.encode_jpeg(spritesheet(frames)))
        self.storage.write_record(asdict(record))

    async def _fail(self, job: Job, code: str, message: str) -> None:
        record, job.order = job.record, None
        record.status, record.error = "failed", {"code": code, "message": message}
        record.completed_at = int(time.time())
        stopped = code in ("cancelled", "server_stopped")
        self.metrics.jobs.labels(outcome="cancelled" if stopped else "failed").inc()
        try:
            await asyncio.to_thread(self.storage.write_record, asdict(record))
        except (OSError, OutputError):  # the next server will find it unfinished, and fail it too
            LOG.exception("The record %s cannot be written.", record.id)
        finally:
            job.ended.set()

    def _recover(self) -> None:
        """Take over what is on the disk: finished videos are there again, the others are failed."""
        known = {each.name for each in fields(Record)}
        for values in self.storage.records():
            try:
                record = Record(**{name: value for name, value in values.items() if name in known})
            except TypeError:
                LOG.warning("The record %s lacks fields and is left out.", values["id"])
                continue
            lost = record.status == "completed" and not self.storage.complete(record.id)
            if lost or not record.finished:
                code = "files_lost" if lost else "server_restarted"
                record.status = "failed"
                record.error = {"code": code, "message": "The server ended before the video was finished."}
                record.completed_at = int(time.time())
                self.storage.write_record(asdict(record))
            self._jobs[record.id] = Job(record)
        self._jobs = dict(sorted(self._jobs.items(), key=lambda item: item[1].record.created_at))
        self.storage.tidy(name for name, job in self._jobs.items() if job.record.status == "completed")


def new_record(owner: str, config: ServerConfig, **values: Any) -> Record:
    """Return the record of a video that is asked for now."""
    now = int(time.time())
    return Record(
        id=new_id(), owner=owner, created_at=now, expires_at=now + int(config.video_lifetime_s), **values
    )


def fingerprint(values: Mapping[str, Any], upload: bytes | None) -> str:
    """Return a hash that two requests share only when they ask for the same."""
    digest = hashlib.sha256(repr(sorted(values.items())).encode("utf-8", "surrogatepass"))
    digest.update(b"\0" + hashlib.sha256(upload).digest() if upload is not None else b"")
    return digest.hexdigest()


def idempotency(owner: str, key: str | None) -> str | None:
    """Return what a record keeps of an Idempotency-Key: the same of another owner is another."""
    return None if key is None else hashlib.sha256(f"{owner}\0{key}".encode()).hexdigest()


def spritesheet(frames: np.ndarray) -> np.ndarray:
    """Return up to 16 frames, evenly spaced, in rows of four: uint8 `[h, w, 3]`."""
    count = min(SHEET * SHEET, len(frames))
    chosen = frames[np.linspace(0, len(frames) - 1, count).round().astype(int)]
    columns = min(SHEET, count)
    rows = -(-count // columns)
    blank = np.zeros((rows * columns - count, *frames.shape[1:]), np.uint8)
    grid = np.concatenate([chosen, blank])
    height, width = frames.shape[1:3]
    return (
        grid.reshape(rows, columns, height, width, 3)
        .transpose(0, 2, 1, 3, 4)
        .reshape(rows * height, columns * width, 3)
    )
