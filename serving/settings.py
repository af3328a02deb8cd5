"""Settings of a server: limits, timeouts and paths."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from worldmodel.serving.auth import Keys

MIB = 2**20
MAX_STEPS = 64
"""Maximum number of denoising steps that a client can request."""
MAX_SOCKET_UPLOAD_BYTES = 16 * MIB
"""Limit of one WebSocket message, which is kept in memory; also the default of uvicorn."""


@dataclass(frozen=True)
class HttpOptions:
    """Settings of the HTTP server and of its logs."""

    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may call the server, such as https://app.example; needs API keys."""
    trusted_hosts: tuple[str, ...] = ()
    """Host names under which requests are answered, such as api.example or *.example; empty answers all."""
    root_path: str = ""
    """Path under which a proxy publishes the server, such as /worlds."""
    tls_certificate: Path | None = None
    """Certificate chain in PEM format, to serve HTTPS."""
    tls_key: Path | None = None
    """Private key of the certificate, in PEM format."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Lowest level of messages that are logged to stderr."""
    log_format: Literal["text", "json"] = "text"
    """Whether log lines are plain text or JSON objects."""
    access_log: bool = False
    """Whether every request is logged, with its id, status and duration."""
    allow_root: bool = False
    """Whether root may serve where the kernel cannot filter the system calls of decoders."""
    traces: bool = False
    """Whether requests and the phases of rounds are sent to a collector as OpenTelemetry spans."""
    webhook_url: str | None = None
    """Address to which a signed message is posted when a video has finished, as https://app.example/hook."""
    webhook_secret_file: Path | None = None
    """File with the secret that signs these messages, which begins with whsec_."""
    webhook_allow_private: bool = False
    """Whether that address may be in a private network or on this machine."""


@dataclass(frozen=True)
class ServerConfig:
    """Settings of a server apart from the model."""

    model_name: str
    """Name of the model in requests and responses; empty takes that of its folder."""
    data_dir: Path
    """Folder of videos and their records; used by one server at a time."""
    keys: "Keys | None" = None
    """API keys; None for a server that is reachable only from this machine."""
    http: HttpOptions = HttpOptions()
    """Settings of the HTTP server."""
    database: str | None = None
    """Database in which worlds are stored and that replicas share, as sqlite:///FILE or
    postgresql://USER@HOST/DATABASE; without one, worlds end with the server."""
    adapters_dir: Path | None = None
    """Folder whose folders of adapters an administrator can add while the server runs."""
    models_dir: Path | None = None
    """Folder whose folders of models an administrator can add while the server runs."""
    rounds_per_save: int = 1
    """Rounds after which a world is stored again in the database; those since then are lost with a server."""
    max_worlds: int = 64
    """Live worlds of all keys: worlds with an id and their forks (until they are deleted, or idle for
    `idle_timeout_s`), WebSocket sessions, and running chat and image requests. Videos do not count."""
    max_worlds_per_key: int = 16
    """Live worlds of one key, counted in the same way."""
    max_queued_jobs: int = 32
    """Queued videos; further requests are answered with 429."""
    max_jobs_per_key: int = 8
    """Unfinished videos of one key."""
    max_running_jobs: int = 4
    """Videos generated at the same time; they share batches with each other and with live worlds."""
    max_videos_per_key: int = 1000
    """Stored videos of one key."""
    max_video_frames: int = 1024
    """Frames of one video."""
    job_deadline_s: float = 600.0
    """Time limit for generating one video."""
    step_deadline_s: float = 120.0
    """Time limit for one step, description or image; a single call to the model that takes longer ends the
    server."""
    idle_timeout_s: float = 900.0
    """Time without use after which a world is closed."""
    video_lifetime_s: float = 86_400.0
    """Time after which a video is deleted, from its request."""
    max_upload_bytes: int = 64 * MIB
    """Size of one upload over HTTP."""
    max_rounds: int = 10_000
    """Rounds of one world."""
    requests_per_minute: int = 1200
    """Rate limit of one key."""
    max_requests_per_key: int = 64
    """Concurrent requests of one key."""
    max_sockets_per_key: int = 32
    """Open WebSockets of one key."""
    drain_timeout_s: float = 30.0
    """Time for unfinished work when the server is stopped."""

    def of_key(self, name: str, caller: str) -> int:
        """Return a limit of one key: its own, if the key file has one."""
        own = self.keys.options(caller).limits.get(name) if self.keys is not None else None
        return getattr(self, name) if own is None else own

    def has_room(self, caller: str, used: Mapping[str, int], limit: int) -> bool:
        """Return whether a key may take one more of `limit` places, of which `used` are taken by key.

        Half of the places are divided among the keys, and one that has not taken its own finds them free.
        """
        others = max(len(self.keys or ()), len(used.keys() | {caller})) - 1
        share = limit // (2 * (others + 1))
        kept = share * others - sum(min(share, count) for key, count in used.items() if key != caller)
        return sum(used.values()) + kept < limit


Parallelism = Literal["sequence", "tensor"]
"""What of the generator is divided among processes: tokens or weights."""
OPTIONS: Mapping[Parallelism, str] = {
    "sequence": "--sequence-parallel-size",
    "tensor": "--generator-tensor-parallel-size",
}


@dataclass(frozen=True)
class EngineOptions:
    """Settings of backbone and generator; `engine.limits` derives the backbone's where they are None."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the backbone's weights, keys and values; by default the model's."""
    max_model_len: int | None = None
    """Longest history of a session, in positions; by default the longest that the model can have."""
    kv_cache_memory: int | None = None
    """Memory for keys and values, as 8GiB or 512MiB; by default what `max_sessions` histories need."""
    threads: int | None = None
    """Threads of the model on a CPU; by default as many as make it faster, of those that it may use."""
    max_sessions: int | None = None
    """Sessions whose keys and values are kept, and the largest batch; by default 16, or as many as fit."""
    tensor_parallel_size: int = 1
    """GPUs among which vLLM divides the backbone."""
    sequence_parallel_size: int = 1
    """Processes, on CUDA with a GPU each, among which the tokens of the generator are divided; experimental,
    as no GPUs have run it."""
    generator_tensor_parallel_size: int = 1
    """Processes, on CUDA with a GPU each, among which the weights of the generator are divided; experimental,
    as no GPUs have run it."""
    quantization: str | None = None
    """Weights of backbone and generator in 8 bits: int8 or fp8; with vLLM, a method of its own (backbone)."""
    cache_threshold: float | None = None
    """Relative change below which a denoising step reuses a prediction; by default the model's."""
    compile: bool = False
    """Whether the generator's transformer blocks are compiled."""
    offload: bool = False
    """Whether codec, generator and text encoder wait on the CPU while they are not used."""
    enforce_eager: bool = True
    """Whether vLLM runs without CUDA graphs."""

    @property
    def generator_parallelism(self) -> tuple[Parallelism, int]:
        """What of the generator is divided, and among how many processes."""
        if self.generator_tensor_parallel_size > 1:
            return "tensor", self.generator_tensor_parallel_size
        return "sequence", self.sequence_parallel_size
