"""Video jobs: a bounded queue in the database, progress, and cancellation within one denoising step.

An order is stored before its request is answered, and a video before its record says `completed`. Other
servers on the database generate the videos that this one leaves unfinished, however it ends.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from worldmodel.errors import InputError, OutputError
from worldmodel.media.encoding import encode_jpeg, encode_video
from worldmodel.serving.errors import NotFoundError, UnavailableError
from worldmodel.serving.metrics import Metrics
from worldmodel.serving.replicas.lease import Lease
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.videos.orders import Order, Orders, clean
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


@dataclass(eq=False)
class VideoJob:
    """A record, and the task that generates its video if that is on this server."""

    record: VideoRecord
    steps_done: int = 0
    position: int | None = None
    """Position in the queue, 1 for the next one."""
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
    """The videos of all replicas, of which this one generates some at a time."""

    def __init__(
        self, service: WorldService, config: ServerConfig, metrics: Metrics, storage: Storage, lease: Lease
    ) -> None:
        """Delete what earlier servers left half-written.

        Raises:
            DatabaseError: the database does not answer.
        """
        self.service, self.config, self.metrics = service, config, metrics
        self.storage, self.orders = storage, Orders(lease, config)
        self.draining = False
        self._running: dict[str, VideoJob] = {}
        self._wake = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._num_queued = 0
        self._mean_run_s = 5.0
        self.storage.delete_orphans(*lease.database.run_now(clean))
        lease.after_heartbeats(self._report)
        metrics.queued_jobs.set_function(lambda: self._num_queued)
        metrics.running_jobs.set_function(lambda: len(self._running))

    def start(self) -> None:
        """Start to generate videos, also those that other servers left."""
        self._worker = asyncio.create_task(self._claim_queued())

    # ---- requests --------------------------------------------------------------------------------------

    async def submit(self, record: VideoRecord, frames: np.ndarray | None) -> VideoJob:
        """Store and queue an order, or return the video with the same Idempotency-Key.

        Raises:
            IdempotencyKeyReusedError: the key was used for a different request.
            RateLimitError: the queue is full, or the owner has the maximum number of videos.
            UnavailableError: the server is stopping, its disk is full or its database does not answer.
        """
        self._require_running()
        record.weights = self.service.identity.of(record.plan.settings.adapter)
        try:
            if frames is not None:
                await _run_to_end(self.storage.write_input, record.id, frames)
            found = await self.orders.submit(record, self._wait_s, self._usable)
        except BaseException as error:
            await asyncio.to_thread(self.storage.remove, record.id)
            if isinstance(error, OSError | OutputError):
                LOG.exception("The input of an order cannot be written.")
                raise UnavailableError(STORAGE_FAILED) from None
            raise
        if found is not None:
            await asyncio.to_thread(self.storage.remove, record.id)
        self._wake.set()
        return await self._now(found or Order(record))

    async def find_duplicate(self, idempotency: str | None, fingerprint: str | None) -> VideoJob | None:
        """Return the job with the same Idempotency-Key, if any; a new one may follow one the server failed.

        Both arguments are hashes, as in `VideoRecord`.

        Raises:
            IdempotencyKeyReusedError: the key was used for a different request.
        """
        found = await self.orders.duplicate(idempotency, fingerprint)
        return await self._now(found) if found is not None and self._usable(found.record) else None

    def _usable(self, record: VideoRecord) -> bool:
        """Return whether a repeated request gets this video, and not a new one."""
        return not (record.failed_by_server or self._lost(record))

    def _lost(self, record: VideoRecord) -> bool:
        return record.status == "completed" and not self.storage.complete(record.id)

    async def admit(self, owner: str) -> None:
        """Check whether an owner may order one more video.

        Raises:
            RateLimitError: the queue is full, or the owner has the maximum number of videos.
            UnavailableError: the server is stopping, or its database does not answer.
        """
        self._require_running()
        await self.orders.admit(owner, self._wait_s)

    async def get(self, owner: str, video_id: str) -> VideoJob:
        """Return a video of its owner.

        Raises:
            NotFoundError: there is no such video, or another key owns it.
        """
        found = await self.orders.get(video_id)
        if found is None or found.record.owner != owner:
            raise NotFoundError("There is no video with this id; GET /v1/videos lists yours.")
        return self._view(found)

    async def owned_by(self, owner: str) -> list[VideoJob]:
        """Return an owner's videos, oldest first."""
        return [self._view(order) for order in await self.orders.owned_by(owner)]

    async def delete(self, job: VideoJob) -> None:
        """Stop a job within one denoising step, and delete its record and files."""
        video_id = job.record.id
        running = self._running.get(video_id)
        if running is not None:
            running.deleted = True
            await self._stop(running)
        elif not job.record.finished:
            self.metrics.jobs.labels(outcome="cancelled").inc()
        await self.orders.remove(video_id)
        await asyncio.to_thread(self.storage.remove, video_id)

    async def sweep(self) -> None:
        """Delete finished videos that have expired."""
        for video_id in await self.orders.expired():
            await self.orders.remove(video_id)
            await asyncio.to_thread(self.storage.remove, video_id)

    async def full(self) -> bool:
        """Whether the queue is full."""
        return await self.orders.num_queued() >= self.config.max_queued_jobs

    @property
    def _wait_s(self) -> float:
        return min(60.0, self._mean_run_s)

    def _require_running(self) -> None:
        if self.draining:
            raise UnavailableError("The server is stopping and takes no more videos; try again later.")

    async def _now(self, order: Order) -> VideoJob:
        """Return an order with its position in the queue."""
        return self._view(await self.orders.get(order.record.id) or order)

    def _view(self, order: Order) -> VideoJob:
        """Return an order for its client, with the progress of this moment if it runs here."""
        record = order.record
        if (running := self._running.get(record.id)) is not None:
            return running
        if self._lost(record):
            record.fail("files_lost", "The files of the video are gone; request it again.")
        return VideoJob(record, order.steps_done, order.position)

    # ---- shutdown --------------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> None:
        """Start no more videos, wait for those in progress, and leave the rest to other servers."""
        self.draining = True
        running = list(self._running.values())
        if running:
            waits = [asyncio.ensure_future(job.ended.wait()) for job in running]
            _, late = await asyncio.wait(waits, timeout=timeout_s)
            for wait in late:
                wait.cancel()
        for job in running:
            if not job.ended.is_set():
                await self._stop(job)

    async def close(self) -> None:
        """Stop all jobs."""
        self.draining = True
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait({self._worker})
        await self.drain(0)

    async def _stop(self, job: VideoJob) -> None:
        self._cancel(job)
        await job.ended.wait()

    @staticmethod
    def _cancel(job: VideoJob) -> None:
        if not job.stopping and job.task is not None:
            job.stopping = True
            job.task.cancel()

    # ---- execution --------------------------------------------------------------------------------------

    async def _claim_queued(self) -> None:
        """Claim orders whenever there may be some and this server has room for them."""
        while True:
            self._wake.clear()
            try:
                while len(self._running) < self.config.max_running_jobs and not self.draining:
                    if (record := await self.orders.claim()) is None:
                        break
                    await self._begin(VideoJob(record))
            except UnavailableError:
                LOG.warning("The database does not answer; no video is begun.")
            except Exception:  # nothing awaits this task
                LOG.exception("An order cannot be begun.")
            await self._wake.wait()

    async def _begin(self, job: VideoJob) -> None:
        if (obstacle := self._obstacle(job.record)) is not None:
            await self._fail(job, *obstacle)
            return
        self._running[job.record.id] = job
        job.task = asyncio.create_task(self._run(job))
        job.task.add_done_callback(partial(self._finished, job))

    def _finished(self, job: VideoJob, _: asyncio.Task[None]) -> None:
        if not job.ended.is_set():  # cancelled before it started to run
            job.task = asyncio.create_task(self._cancelled(job))
            job.task.add_done_callback(partial(self._finished, job))
            return
        self._running.pop(job.record.id, None)
        self._wake.set()

    async def _report(self) -> None:
        """Store the progress of videos, and stop those that were deleted or taken elsewhere."""
        running = dict(self._running)
        kept, self._num_queued = await self.orders.report(
            {video_id: job.steps_done for video_id, job in running.items()}
        )
        for video_id, job in running.items():
            if video_id not in kept and not job.ended.is_set():
                job.deleted = True
                self._cancel(job)
        self._wake.set()

    async def _run(self, job: VideoJob) -> None:
        """Generate a video and record the outcome, also after errors and cancellation."""
        began = time.monotonic()
        try:
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
        if await self.orders.write(done):
            job.record = done
            self.metrics.jobs.labels(outcome="ok").inc()
        elif await self.orders.get(done.id) is None:  # deleted at another replica
            await asyncio.to_thread(self.storage.remove, done.id)

    def _store(self, record: VideoRecord, frames: np.ndarray) -> None:
        self.storage.write(record.id, "video", encode_video(frames, record.fps))
        self.storage.write(record.id, "thumbnail", encode_jpeg(frames[0]))
        self.storage.write(record.id, "spritesheet", encode_jpeg(sprite_sheet(frames)))

    async def _cancelled(self, job: VideoJob) -> None:
        """Record that a job was deleted, or leave it to other servers."""
        if job.deleted:
            await self._fail(job, *CANCELLED)
            return
        job.record.status = "queued"
        job.record.attempts -= 1  # it was not this video that ended the server
        await self._write(job, release=True)

    async def _fail(self, job: VideoJob, code: str, message: str) -> None:
        job.record.fail(code, message)
        self.metrics.jobs.labels(outcome="cancelled" if job.deleted else "failed").inc()
        await self._write(job)

    async def _write(self, job: VideoJob, release: bool = False) -> None:
        try:
            await self.orders.write(job.record, release)
        except UnavailableError:  # another server finds it in progress and generates it again
            LOG.warning("The record %s cannot be written.", job.record.id)
        finally:
            job.ended.set()

    def _obstacle(self, record: VideoRecord) -> tuple[str, str] | None:
        """Return why an order cannot be generated, as error code and message."""
        storage, service = self.storage, self.service
        if record.attempts > MAX_ATTEMPTS:
            return (
                "server_restarted",
                f"The server was killed {MAX_ATTEMPTS} times while it generated this video; "
                "request a shorter one.",
            )
        if record.plan.text is None and not storage.has_input(record.id):
            return "files_lost", "The upload of this video is gone; request it again."
        served = record.model in (self.config.model_name, *service.engine.adapters)
        served &= record.weights in (None, service.identity.of(record.plan.settings.adapter))
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
