"""Video jobs: a bounded queue, progress, cancellation within one denoising step, and orders on disk.

An order is on disk before its request is answered, and a video before its record says `completed`. The next
server on the data folder generates the videos that this one leaves unfinished, however it ends.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from worldmodel.errors import InputError, OutputError
from worldmodel.media.encoding import encode_jpeg, encode_video
from worldmodel.serving.errors import ConflictError, NotFoundError, RateLimitError, UnavailableError
from worldmodel.serving.metrics import Metrics
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.videos.record import VideoRecord
from worldmodel.serving.videos.storage import Storage
from worldmodel.serving.worlds.service import WorldService

LOG = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Servers that may be killed while they generate a video; it could be what kills them."""
SPRITE_COLUMNS = 4
"""Columns and maximum number of rows of a sprite sheet."""
CANCELLED = ("cancelled", "The video was deleted before it was completed.")
STORAGE_FAILED = "The server cannot store videos at the moment; try again later."


class IdempotencyKeyReusedError(ConflictError):
    """An Idempotency-Key was already used for a different request."""

    code = "idempotency_key_reused"


@dataclass(eq=False)
class VideoJob:
    """A record, and the task that generates its video."""

    record: VideoRecord
    steps_done: int = 0
    task: asyncio.Task[None] | None = None
    stopping: bool = False
    deleted: bool = False
    """Whether it is stopped because its owner deleted it; otherwise the server stops."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def progress(self) -> int:
        """Percentage of the denoising steps of all rounds; 100 only when the file is stored."""
        if self.record.status == "completed":
            return 100
        return min(99, 100 * self.steps_done // max(1, self.record.plan.num_steps))


class VideoJobs:
    """All videos of one server."""

    def __init__(self, service: WorldService, config: ServerConfig, metrics: Metrics) -> None:
        """Load the records in the data folder.

        Raises:
            OutputError: the data folder cannot be used.
        """
        self.service, self.config, self.metrics = service, config, metrics
        self.storage = Storage(config.data_dir)
        self.draining = False
        self._jobs: dict[str, VideoJob] = {}
        self._queue: deque[VideoJob] = deque()
        self._running: set[VideoJob] = set()
        self._submitting = asyncio.Lock()
        self._mean_run_s = 5.0
        self._load_orders()
        metrics.queued_jobs.set_function(lambda: len(self._queue))
        metrics.running_jobs.set_function(lambda: len(self._running))

    def start(self) -> None:
        """Start to generate the videos that an earlier server left."""
        self._start_queued()

    # ---- requests --------------------------------------------------------------------------------------

    async def submit(self, record: VideoRecord, frames: np.ndarray | None) -> VideoJob:
        """Store and queue an order, or return the video with the same Idempotency-Key.

        Raises:
            IdempotencyKeyReusedError: the key was used for a different request.
            RateLimitError: the queue is full, or the owner has the maximum number of videos.
            UnavailableError: the server is stopping or its disk is full.
        """
        async with self._submitting:
            if (duplicate := self.find_duplicate(record.idempotency, record.fingerprint)) is not None:
                return duplicate
            self.admit(record.owner)
            try:
                await asyncio.to_thread(self.storage.write_order, record.as_dict(), frames)
            except (OSError, OutputError):
                LOG.exception("An order cannot be written.")
                raise UnavailableError(STORAGE_FAILED) from None
            job = VideoJob(record)
            self._jobs[record.id] = job
            self._queue.append(job)
        self._start_queued()
        return job

    def find_duplicate(self, idempotency: str | None, fingerprint: str | None) -> VideoJob | None:
        """Return the job with the same Idempotency-Key, if any; a new one may follow one the server failed.

        Both arguments are hashes, as in `VideoRecord`.

        Raises:
            IdempotencyKeyReusedError: the key was used for a different request.
        """
        if idempotency is None:
            return None
        for job in self._jobs.values():
            if job.record.idempotency == idempotency:
                if job.record.fingerprint != fingerprint:
                    raise IdempotencyKeyReusedError(
                        "This Idempotency-Key was used for a different request; use a new one."
                    )
                if not job.record.failed_by_server:
                    return job
        return None

    def admit(self, owner: str) -> None:
        """Check whether an owner may order one more video.

        Raises:
            RateLimitError: the queue is full, or the owner has the maximum number of videos.
            UnavailableError: the server is stopping.
        """
        if self.draining:
            raise UnavailableError("The server is stopping and takes no more videos; try again later.")
        wait_s = min(60.0, self._mean_run_s)
        if self.full:
            raise RateLimitError(
                f"{len(self._queue)} videos are queued, the maximum; try again later.", wait_s
            )
        owned = self.owned_by(owner)
        if sum(not job.record.finished for job in owned) >= self.config.max_jobs_per_key:
            raise RateLimitError(
                f"This key has {self.config.max_jobs_per_key} unfinished videos; wait for one to finish.",
                wait_s,
            )
        if len(owned) >= self.config.max_videos_per_key:
            raise RateLimitError(f"This key has {len(owned)} videos, its maximum; delete some first.", 60.0)

    def get(self, owner: str, video_id: str) -> VideoJob:
        """Return a video of its owner.

        Raises:
            NotFoundError: there is no such video, or another key owns it.
        """
        job = self._jobs.get(video_id)
        if job is None or job.record.owner != owner:
            raise NotFoundError("There is no video with this id; GET /v1/videos lists yours.")
        return job

    def owned_by(self, owner: str) -> list[VideoJob]:
        """Return an owner's videos, oldest first."""
        return [job for job in self._jobs.values() if job.record.owner == owner]

    def position(self, job: VideoJob) -> int | None:
        """Return the position of a queued job, 1 for the next one."""
        return self._queue.index(job) + 1 if job in self._queue else None

    async def delete(self, job: VideoJob) -> None:
        """Stop a job within one denoising step, and delete its record and files."""
        job.deleted = True
        if job in self._queue:
            self._queue.remove(job)
            await self._fail(job, *CANCELLED)
        elif not job.record.finished:
            await self._stop(job)
        self._jobs.pop(job.record.id, None)
        await asyncio.to_thread(self.storage.remove, job.record.id)

    async def sweep(self) -> None:
        """Delete finished videos that have expired."""
        now = time.time()
        for job in list(self._jobs.values()):
            if job.record.finished and job.record.expires_at <= now:
                await self.delete(job)

    # ---- shutdown --------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether the queue is full."""
        return len(self._queue) >= self.config.max_queued_jobs

    async def drain(self, timeout_s: float) -> None:
        """Start no more videos, wait for those in progress, and leave the rest to the next server."""
        self.draining = True
        running = list(self._running)
        if running:
            waits = [asyncio.ensure_future(job.ended.wait()) for job in running]
            _, late = await asyncio.wait(waits, timeout=timeout_s)
            for wait in late:
                wait.cancel()
        for job in running:
            if not job.ended.is_set():
                await self._stop(job)

    async def close(self) -> None:
        """Stop all jobs and unlock the data folder."""
        await self.drain(0)
        self.storage.close()

    async def _stop(self, job: VideoJob) -> None:
        if not job.stopping and job.task is not None:
            job.stopping = True
            job.task.cancel()
        await job.ended.wait()

    # ---- execution --------------------------------------------------------------------------------------

    def _start_queued(self) -> None:
        while self._queue and len(self._running) < self.config.max_running_jobs and not self.draining:
            job = self._queue.popleft()
            self._running.add(job)
            job.record.status = "in_progress"
            job.record.attempts += 1
            job.task = asyncio.create_task(self._run(job))
            job.task.add_done_callback(partial(self._finished, job))

    def _finished(self, job: VideoJob, _: asyncio.Task[None]) -> None:
        self._running.discard(job)
        if not job.ended.is_set():  # cancelled before it started to run
            job.task = asyncio.create_task(self._cancelled(job))
        self._start_queued()

    async def _run(self, job: VideoJob) -> None:
        """Generate a video and record the outcome, also after errors and cancellation."""
        began = time.monotonic()
        try:
            # The attempt is on disk before the work that may kill the server.
            await _run_to_end(self.storage.write_record, job.record.as_dict())
            if job.stopping:
                raise asyncio.CancelledError
            async with asyncio.timeout(self.config.job_deadline_s):
                frames = await self._generate(job)
            duration_s = time.monotonic() - began
            await self._complete(job, frames, duration_s)
            self._mean_run_s += 0.2 * (duration_s - self._mean_run_s)
        except asyncio.CancelledError:
            await self._cancelled(job)
        except TimeoutError:
            limit = self.config.job_deadline_s
            await self._fail(
                job,
                "deadline_exceeded",
                f"The video was not completed within {limit:g} s; request fewer frames.",
            )
        except InputError as error:
            await self._fail(job, "invalid_request", str(error))
        except Exception:  # nothing awaits this task, and a job must never stay in progress
            LOG.exception("The video %s failed.", job.record.id)
            await self._fail(job, "internal_error", "Internal error; try again.")
        finally:
            job.ended.set()

    async def _generate(self, job: VideoJob) -> np.ndarray:
        plan, settings = job.record.plan, job.record.plan.settings
        start = await asyncio.to_thread(self.storage.read_input, job.record.id)
        world = await self.service.start(start, text=plan.text, **asdict(settings))
        try:
            clips = [] if start is None else [start[len(start) - plan.start_frames :]]
            for index, action in enumerate(plan.actions):

                def on_progress(
                    step: int, _: int, before: int = index * settings.num_inference_steps
                ) -> None:
                    job.steps_done = before + step

                clips.append(await world.step(action, on_progress))
        finally:
            world.close()
        return np.concatenate(clips)[: job.record.num_frames]

    async def _complete(self, job: VideoJob, frames: np.ndarray, duration_s: float) -> None:
        now = int(time.time())
        done = replace(
            job.record,
            status="completed",
            completed_at=now,
            inference_time_s=round(duration_s, 3),
            error=None,
        )
        await _run_to_end(self._store, done, frames)
        job.record = done
        self.metrics.jobs.labels(outcome="ok").inc()

    def _store(self, record: VideoRecord, frames: np.ndarray) -> None:
        self.storage.write(record.id, "video", encode_video(frames, record.fps))
        self.storage.write(record.id, "thumbnail", encode_jpeg(frames[0]))
        self.storage.write(record.id, "spritesheet", encode_jpeg(sprite_sheet(frames)))
        self.storage.write_record(record.as_dict())

    async def _cancelled(self, job: VideoJob) -> None:
        """Record that a job was deleted, or leave it to the next server."""
        if job.deleted:
            await self._fail(job, *CANCELLED)
            return
        job.record.status = "queued"
        job.record.attempts -= 1  # it was not this video that ended the server
        await self._write(job)

    async def _fail(self, job: VideoJob, code: str, message: str) -> None:
        job.record.fail(code, message)
        self.metrics.jobs.labels(outcome="cancelled" if job.deleted else "failed").inc()
        await self._write(job)

    async def _write(self, job: VideoJob) -> None:
        try:
            await asyncio.to_thread(self.storage.write_record, job.record.as_dict())
        except (OSError, OutputError):  # the next server finds it in progress and generates it again
            LOG.exception("The record %s cannot be written.", job.record.id)
        finally:
            job.ended.set()

    # ---- start -----------------------------------------------------------------------------------------

    def _load_orders(self) -> None:
        """Load the records on disk, queue unfinished videos, and fail those that cannot be generated."""
        records = []
        for values in self.storage.records():
            try:
                records.append(VideoRecord.from_dict(values))
            except (KeyError, TypeError, InputError):
                LOG.warning("The record %s lacks fields and is ignored.", values["id"])
        for record in sorted(records, key=lambda record: record.created_ns):
            if record.expires_at <= time.time():
                self.storage.remove(record.id)
                continue
            job = self._jobs[record.id] = VideoJob(record)
            if (obstacle := self._obstacle(record)) is not None:
                record.fail(*obstacle)
                self.storage.write_record(record.as_dict())
            elif not record.finished:
                record.status = "queued"
                self._queue.append(job)
        completed = [name for name, job in self._jobs.items() if job.record.status == "completed"]
        self.storage.delete_orphans(self._jobs, completed)

    def _obstacle(self, record: VideoRecord) -> tuple[str, str] | None:
        """Return why a stored video cannot be shown or generated, as error code and message."""
        storage, service = self.storage, self.service
        if record.finished:
            lost = record.status == "completed" and not storage.complete(record.id)
            return ("files_lost", "The files of the video are gone; request it again.") if lost else None
        if record.attempts >= MAX_ATTEMPTS:
            return (
                "server_restarted",
                f"The server was killed {record.attempts} times while it generated this video; "
                "request a shorter one.",
            )
        if record.plan.text is None and not storage.has_input(record.id):
            return "files_lost", "The upload of this video is gone; request it again."
        served = record.model in (self.config.model_name, *service.engine.adapters)
        if not served or (record.size, record.fps) != (service.frame_size, service.model.config.fps):
            return "model_changed", "The server was started with another model; request the video again."
        return None


async def _run_to_end(function: Callable[..., Any], *args: Any) -> None:
    """Run a function in a thread to its end, also when the caller is cancelled: a thread cannot be."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await running


def sprite_sheet(frames: np.ndarray) -> np.ndarray:
    """Arrange up to 16 evenly spaced frames in rows of four, uint8 `[h, w, 3]`."""
    count = min(SPRITE_COLUMNS * SPRITE_COLUMNS, len(frames))
    selected = frames[np.linspace(0, len(frames) - 1, count).round().astype(int)]
    columns = min(SPRITE_COLUMNS, count)
    rows = -(-count // columns)
    blank = np.zeros((rows * columns - count, *frames.shape[1:]), np.uint8)
    grid = np.concatenate([selected, blank])
    height, width = frames.shape[1:3]
    return (
        grid.reshape(rows, columns, height, width, 3)
        .transpose(0, 2, 1, 3, 4)
        .reshape(rows * height, columns * width, 3)
    )
