"""Orders of videos: what was requested, and how far it is."""

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from worldmodel.actions import Action
from worldmodel.serving.actions import JsonAction
from worldmodel.serving.protocol import Status, VideoObject
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.videos.storage import new_id
from worldmodel.serving.worlds.service import WorldSettings

SERVER_ERRORS = ("server_restarted", "model_changed", "files_lost", "internal_error")
"""Codes of failures that are not the request's: the same request may be sent again."""


@dataclass(frozen=True)
class VideoPlan:
    """Instructions for a video: the settings of the world, its start and the action of every round."""

    settings: WorldSettings
    actions: tuple[JsonAction, ...]
    text: str | None = None
    """Description of the first frame; None starts from the stored frames."""
    start_frames: int = 0
    """Number of stored frames, the last ones, with which the video begins."""

    @property
    def num_steps(self) -> int:
        """Denoising steps of all rounds."""
        return len(self.actions) * self.settings.num_inference_steps

    def with_prompt(self, prompt: str) -> "VideoPlan":
        """Return the plan with another prompt: the description of the first frame, or the first action."""
        if self.text is not None:
            return replace(self, text=prompt)
        return replace(self, actions=(Action.of(prompt), *self.actions[1:]))


@dataclass
class VideoRecord:
    """A video as stored on disk, from its order until it is deleted."""

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
    plan: VideoPlan
    created_ns: int = field(default_factory=time.time_ns)
    """Time of the order in nanoseconds, which puts orders of one second in sequence."""
    weights: str | None = None
    """Digest of the model and the adapter that the video was ordered from; set when the order is accepted."""
    status: Status = "queued"
    attempts: int = 0
    """Number of attempts at generation that the server did not stop itself."""
    completed_at: int | None = None
    inference_time_s: float | None = None
    error: dict[str, str] | None = None
    idempotency: str | None = None
    """Hash of the owner and the Idempotency-Key."""
    fingerprint: str | None = None
    """Hash of the request."""
    remixed_from_video_id: str | None = None
    """The video that this one is a remix, an edit or an extension of."""

    @property
    def finished(self) -> bool:
        """Whether the video is completed or failed."""
        return self.status in ("completed", "failed")

    @property
    def failed_by_server(self) -> bool:
        """Whether the video failed for a reason that is not in its request."""
        return self.error is not None and self.error["code"] in SERVER_ERRORS

    def fail(self, code: str, message: str) -> None:
        """Mark the video as failed."""
        self.status, self.error = "failed", {"code": code, "message": message}
        self.completed_at = int(time.time())


RECORDS: TypeAdapter[VideoRecord] = TypeAdapter(VideoRecord)
"""Reads and writes records as JSON; fields of newer versions are ignored."""


@dataclass(eq=False)
class VideoJob:
    """A record, how far its video is, and the tasks that generate it if this server does."""

    record: VideoRecord
    steps_done: int = 0
    position: int | None = None
    """Position in the queue, 1 for the next one."""
    generating: asyncio.Task[np.ndarray] | None = None
    """Makes the frames; cancelled to stop the job."""
    task: asyncio.Task[None] | None = None
    """Records what became of it; ends when the job has."""
    deleted: bool = False
    """Whether it is stopped because its owner deleted it; otherwise the server stops."""

    @property
    def progress(self) -> int:
        """Percentage of the denoising steps of all rounds; 100 only when the file is stored."""
        if self.record.status == "completed":
            return 100
        return min(99, 100 * self.steps_done // max(1, self.record.plan.num_steps))


def video_object(job: VideoJob) -> VideoObject:
    """Return the description of a video for its client."""
    shown = {**vars(job.record), "progress": job.progress, "queue_position": job.position}
    return VideoObject.model_validate(shown)  # without what only the server reads


def new_record(owner: str, config: ServerConfig, **values: Any) -> VideoRecord:
    """Return the record of a new video."""
    now = int(time.time())
    return VideoRecord(
        id=new_id(), owner=owner, created_at=now, expires_at=now + int(config.video_lifetime_s), **values
    )


def hashes(
    owner: str, key: str | None, values: Mapping[str, Any], upload: bytes | None = None
) -> tuple[str | None, str]:
    """Return hashes of an Idempotency-Key with its owner, and of a request's fields and upload."""
    named = None if key is None else hashlib.sha256(f"{owner}\0{key}".encode()).hexdigest()
    digest = hashlib.sha256(repr(sorted(values.items())).encode("utf-8", "surrogatepass"))
    digest.update(b"\0" + hashlib.sha256(upload).digest() if upload is not None else b"")
    return named, digest.hexdigest()
