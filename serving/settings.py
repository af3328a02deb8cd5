"""What one server allows: limits, times and places, filled by the command line or by a test."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worldmodel.serving.auth import Keys

MIB = 2**20


@dataclass(frozen=True)
class ServerConfig:
    """Everything about a server that is not the model; times are in seconds."""

    model_name: str
    """The name by which clients ask for the model."""
    data_dir: Path
    """Where videos and their records live; one server at a time."""
    keys: "Keys | None" = None
    """Who may call; None is for a server that only this machine can reach."""
    max_worlds: int = 64
    """Live worlds in all; each holds memory until it is deleted or idle for `idle_timeout_s`."""
    max_worlds_per_key: int = 16
    max_queued_jobs: int = 32
    """Videos that may wait; above it requests are answered 429."""
    max_jobs_per_key: int = 8
    """Unfinished videos of one key."""
    max_running_jobs: int = 4
    """Videos that are made at once: they share batches with each other and with live worlds."""
    max_videos_per_key: int = 1000
    """Videos that are kept for one key."""
    max_video_frames: int = 1024
    """Frames of one video."""
    job_deadline_s: float = 600.0
    """A video that takes longer, counted from when it is begun, is failed."""
    step_deadline_s: float = 120.0
    """The same for work whose client waits: steps, answers, pictures."""
    idle_timeout_s: float = 900.0
    """Worlds that nobody uses for so long are closed."""
    video_lifetime_s: float = 86_400.0
    """Videos are deleted so long after they were asked for."""
    max_upload_bytes: int = 64 * MIB
    max_rounds: int = 10_000
    """Rounds of one world."""
    requests_per_minute: int = 1200
    """Requests of one key."""
    max_requests_per_key: int = 64
    """Requests of one key that are in flight."""
    drain_timeout_s: float = 30.0
    """Time that unfinished work has when the server is told to stop."""
