"""Video jobs: a bounded queue, progress, cancellation within one denoising step, and records on disk.

A record is on disk before its request is answered, and a video before its record says `completed`. Jobs that
a killed server left unfinished are marked as failed at the next start.
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
from worldmodel.media.encoding import encode_jpeg, encode_video
from worldmodel.serving.errors import ConflictError, NotFoundError, RateLimitError, UnavailableError
from worldmodel.serving.metrics import Metrics
from worldmodel.serving.protocol import Status
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.videos.storage import Storage, new_id
from worldmodel.serving.worlds.service import WorldService, WorldSettings
from worldmodel.types import Action

LOG = logging.getLogger(__name__)

SPRITE_COLUMNS = 4
"""Columns and maximum number of rows of a sprite sheet."""
CANCELLED = ("cancelled", "The video was deleted before it was completed.")
STORAGE_FAILED = "The server cannot store videos at the moment; try again later."


class IdempotencyKeyReusedError(ConflictError):
    """An Idempotency-Key was already used for a different request."""

    code = "idempotency_key_reused"


@dataclass(frozen=True)
class VideoPlan:
    """Input of a video: an observation or a text to start from, and the action of every round."""

    settings: WorldSettings
    actions: tuple[Action, ...]
    num_frames: int
    frames: np.ndarray | None = None
    text: str | None = None


@dataclass
class VideoRecord:
    """Metadata of a video, as stored on disk."""

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
    """Hash of the owner and the Idempotency-Key."""
    fingerprint: str | None = None
    """Hash of the request."""

    @property
    def finished(self) -> bool:
        """Whether the video is completed or failed."""
        return self.status in ("completed", "failed")


@dataclass(eq=False)
class VideoJob:
    """A record and, until it is finished, its plan and its task."""

    record: VideoRecord
    plan: VideoPlan | None = None
    steps_done: int = 0
    task: asyncio.Task[None] | None = None
    stop_reason: tuple[str, str] | None = None
    """Error code and message of a job that is being stopped."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def progress(self) -> int:
        """Percentage of the denoising steps of all rounds; 100 only when the file is stored."""
        if self.record.status == "completed":
            return 100
        if self.plan is None:
            return 0
        total = len(self.plan.actions) * self.plan.settings.num_inference_steps
        return min(99, 100 * self.steps_done // total)


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
        self._load_records()
        metrics.queued_jobs.set_function(lambda: len(self._queue))
        metrics.running_jobs.set_function(lambda: len(self._running))

    # ---- requests --------------------------------------------------------------------------------------

    async def submit(self, record: VideoRecord, plan: VideoPlan) -> VideoJob:
        """Queue a video, or return the one with the same Idempotency-Key.

        Raises:
            IdempotencyKeyReusedError: the key was used for a different request.
            RateLimitError: the queue is full, or the owner has the maximum number of videos.
            UnavailableError: the server is stopping or its disk is full.
        """
        async with self._submitting:
            if (duplicate := self.find_duplicate(record)) is not None:
                return duplicate
            self._admit(record.owner)
            try:
                await asyncio.to_thread(self.storage.write_record, asdict(record))
            except (OSError, OutputError):
                LOG.exception("A record cannot be written.")
                raise UnavailableError(STORAGE_FAILED) from None
            job = VideoJob(record, plan)
            self._jobs[record.id] = job
            self._queue.append(job)
        self._start_queued()
        return job

    def find_duplicate(self, record: VideoRecord) -> VideoJob | None:
        """Return the job with the same Idempotency-Key, if any.

        Raises:
            IdempotencyKeyReusedError: the key was used for a different request.
        """
        if record.idempotency is None:
            return None
        for job in self._jobs.values():
            if job.record.idempotency == record.idempotency:
                if job.record.fingerprint != record.fingerprint:
                    raise IdempotencyKeyReusedError(
                        "This Idempotency-Key was used for a different request; use a new one."
                    )
                return job
        return None

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
        if not job.record.finished:
            await self._stop(job, *CANCELLED)
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
        """Refuse new jobs, wait for the others, and fail those that are unfinished after the timeout."""
        self.draining = True
        unfinished = [job for job in self._jobs.values() if not job.record.finished]
        if unfinished:
            waits = [asyncio.ensure_future(job.ended.wait()) for job in unfinished]
            _, late = await asyncio.wait(waits, timeout=timeout_s)
            for wait in late:
                wait.cancel()
        for job in unfinished:
            if not job.record.finished:
                await self._stop(job, "server_stopped", "The server stopped before the video was completed.")

    async def close(self) -> None:
        """Fail unfinished jobs and unlock the data folder."""
        await self.drain(0)
        self.storage.close()

    async def _stop(self, job: VideoJob, code: str, message: str) -> None:
        if job.stop_reason is None:
            job.stop_reason = (code, message)
            if job in self._queue:
                self._queue.remove(job)
                await self._fail(job, code, message)
            elif job.task is not None:
                job.task.cancel()
        await job.ended.wait()

    # ---- execution --------------------------------------------------------------------------------------

    def _admit(self, owner: str) -> None:
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

    def _start_queued(self) -> None:
        while self._queue and len(self._running) < self.config.max_running_jobs:
            job = self._queue.popleft()
            self._running.add(job)
            job.record.status = "in_progress"
            job.task = asyncio.create_task(self._run(job))
            job.task.add_done_callback(partial(self._finished, job))

    def _finished(self, job: VideoJob, _: asyncio.Task[None]) -> None:
        self._running.discard(job)
        if not job.ended.is_set():  # cancelled before it started to run
            job.task = asyncio.create_task(self._fail(job, *(job.stop_reason or CANCELLED)))
        self._start_queued()

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
            await self._fail(job, *(job.stop_reason or CANCELLED))
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
        plan = job.plan
        assert plan is not None
        settings = plan.settings
        world = await self.service.start(plan.frames, text=plan.text, **asdict(settings))
        try:
            clips = []
            for index, action in enumerate(plan.actions):

                def on_progress(
                    step: int, _: int, before: int = index * settings.num_inference_steps
                ) -> None:
                    job.steps_done = before + step

                clips.append(await world.step(action, on_progress))
        finally:
            world.close()
        return np.concatenate(clips)[: plan.num_frames]

    async def _complete(self, job: VideoJob, frames: np.ndarray, duration_s: float) -> None:
        now = int(time.time())
        done = replace(
            job.record,
            status="completed",
            completed_at=now,
            inference_time_s=round(duration_s, 3),
            error=None,
        )
        # A thread cannot be cancelled: stopping the job at this point waits for its files.
        storing = asyncio.ensure_future(asyncio.to_thread(self._store, done, frames))
        try:
            await asyncio.shield(storing)
        except asyncio.CancelledError:
            await storing
        job.record, job.plan = done, None
        self.metrics.jobs.labels(outcome="ok").inc()

    def _store(self, record: VideoRecord, frames: np.ndarray) -> None:
        self.storage.write(record.id, "video", encode_video(frames, record.fps))
        self.storage.write(record.id, "thumbnail", encode_jpeg(frames[0]))
        self.storage.write(record.id, "spritesheet", encode_jpeg(sprite_sheet(frames)))
        self.storage.write_record(asdict(record))

    async def _fail(self, job: VideoJob, code: str, message: str) -> None:
        record, job.plan = job.record, None
        record.status, record.error = "failed", {"code": code, "message": message}
        record.completed_at = int(time.time())
        stopped = code in ("cancelled", "server_stopped")
        self.metrics.jobs.labels(outcome="cancelled" if stopped else "failed").inc()
        try:
            await asyncio.to_thread(self.storage.write_record, asdict(record))
        except (OSError, OutputError):  # the next server finds it unfinished and marks it as failed
            LOG.exception("The record %s cannot be written.", record.id)
        finally:
            job.ended.set()

    def _load_records(self) -> None:
        """Load the records on disk; mark unfinished videos and those without files as failed."""
        known = {each.name for each in fields(VideoRecord)}
        for values in self.storage.records():
            try:
                record = VideoRecord(**{name: value for name, value in values.items() if name in known})
            except TypeError:
                LOG.warning("The record %s lacks fields and is ignored.", values["id"])
                continue
            lost = record.status == "completed" and not self.storage.complete(record.id)
            if lost or not record.finished:
                code = "files_lost" if lost else "server_restarted"
                record.status = "failed"
                record.error = {"code": code, "message": "The server stopped before the video was completed."}
                record.completed_at = int(time.time())
                self.storage.write_record(asdict(record))
            self._jobs[record.id] = VideoJob(record)
        self._jobs = dict(sorted(self._jobs.items(), key=lambda item: item[1].record.created_at))
        self.storage.delete_orphans(
            name for name, job in self._jobs.items() if job.record.status == "completed"
        )


def new_record(owner: str, config: ServerConfig, **values: Any) -> VideoRecord:
    """Return the record of a new video."""
    now = int(time.time())
    return VideoRecord(
        id=new_id(), owner=owner, created_at=now, expires_at=now + int(config.video_lifetime_s), **values
    )


def hash_request(values: Mapping[str, Any], upload: bytes | None) -> str:
    """Return a hash of a request's fields and upload."""
    digest = hashlib.sha256(repr(sorted(values.items())).encode("utf-8", "surrogatepass"))
    digest.update(b"\0" + hashlib.sha256(upload).digest() if upload is not None else b"")
    return digest.hexdigest()


def hash_idempotency_key(owner: str, key: str | None) -> str | None:
    """Return a hash of an Idempotency-Key and its owner."""
    return None if key is None else hashlib.sha256(f"{owner}\0{key}".encode()).hexdigest()


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
