"""Server process: loading the model, listening, and graceful shutdown."""

import asyncio
import importlib.util
import logging
import math
import socket
import ssl
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch
import uvicorn
from fastapi import FastAPI

from worldmodel.errors import ConfigError, OutputError, WorldModelError
from worldmodel.models.adapters import Adapters
from worldmodel.models.inference import optimize
from worldmodel.models.loading import model_folder
from worldmodel.models.offload import Offload
from worldmodel.models.world_model import WorldModel
from worldmodel.serving import logs
from worldmodel.serving.app import create_app
from worldmodel.serving.auth import Keys, check_bind
from worldmodel.serving.connections import IdleConnections
from worldmodel.serving.context import ServerContext
from worldmodel.serving.engine import limits as engine_limits
from worldmodel.serving.engine.batching import Compute
from worldmodel.serving.engine.limits import EngineLimits
from worldmodel.serving.engine.local import Engine, InProcessEngine
from worldmodel.serving.settings import EngineOptions, HttpOptions, ServerConfig
from worldmodel.serving.worlds.service import WorldService

LOG = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
SHUTDOWN_TIMEOUT_S = 2
"""Time for responses that are being sent when all other work has finished."""


async def serve(
    name_or_path: str,
    config: ServerConfig,
    host: str = "127.0.0.1",
    port: int = 8000,
    engine: str = "auto",
    device: str | None = None,
    adapters: Mapping[str, Path] | None = None,
    options: EngineOptions | None = None,
) -> None:
    """Load a model and serve it until a signal stops the server.

    Args:
        name_or_path: The model: a shipped name or a folder.
        config: Settings of the server.
        host: Address to listen on.
        port: Port to listen on; 0 picks a free one.
        engine: auto, vllm or in-process.
        device: Device of the model; None takes CUDA where it is available.
        adapters: Folders of LoRA adapters by the name under which requests select them.
        options: Settings of the engine.

    Raises:
        ConfigError: other machines could reach the address and there is no API key, or the engine cannot
            hold the sessions of the model.
        ModelError: the model or an adapter cannot be loaded.
        OutputError: the address, the data folder or the database cannot be used.
        SystemExit: the engine has failed; the exit code is 1, so that a supervisor starts the server again.
    """
    keys = config.keys or Keys()
    check_bind(host, keys)
    check_http(config.http, keys)
    logs.configure(config.http)
    folder = model_folder.resolve(name_or_path)
    config = replace(config, model_name=config.model_name or folder.resolve().name)
    with _bind(host, port) as listener:
        print(f"loading {config.model_name} ...", file=sys.stderr, flush=True)  # this can take minutes
        options = options or EngineOptions()
        model = _load_model(name_or_path, _resolve_device(device), options.offload)
        compute = Compute()
        if engine == "auto":
            engine = "vllm" if importlib.util.find_spec("vllm") is not None else "in-process"
        limits = engine_limits.resolve(options, model, engine)
        LOG.info("starting the %s engine: %s", engine, limits)
        attached = _prepare(model, adapters or {}, options, limits.dtype, engine)
        runner = await _start_engine(engine, folder, model, compute, attached, options, limits)
        service = WorldService(
            model, runner, compute=compute, adapters=attached, max_batch=limits.max_sessions
        )
        try:
            app = create_app(service, config)
        except WorldModelError:
            await service.close()
            raise
        host, port = listener.getsockname()[:2]
        scheme = "https" if config.http.tls_certificate else "http"
        address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        server = Server(app, config)
        server.startup_message = (
            f"serving {config.model_name} on {address} "
            f"(engine: {runner.name}, device: {model.device.type}, "
            f"{f'keys: {len(keys)}' if len(keys) else 'no key: local requests only'})\n"
            f"engine: {limits}\n"
            f"play: {address}/play   schema: {address}/openapi.json   stop: Ctrl-C"
        )
        await server.serve(sockets=[listener])
        if server.engine_failed:
            sys.exit(f"The {runner.name} engine has failed; see the log above, and start the server again.")


def check_http(options: HttpOptions, keys: Keys) -> None:
    """Check the settings of the HTTP server.

    Raises:
        ConfigError: they contradict each other, or the certificate or its key cannot be used.
    """
    if options.cors_origins and not len(keys):
        raise ConfigError(
            f"cors_origins is {', '.join(options.cors_origins)}, but there is no API key, and without one "
            "no other origin is answered; configure a key."
        )
    if options.root_path and not options.root_path.startswith("/"):
        raise ConfigError(f"root_path is {options.root_path!r}; start it with a slash.")
    if (options.tls_certificate is None) != (options.tls_key is None):
        raise ConfigError("TLS needs a certificate and its key; pass --tls-certificate and --tls-key.")
    if options.tls_certificate is not None and options.tls_key is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.tls_certificate, options.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"The certificate {str(options.tls_certificate)!r} and its key cannot be used ({error}); "
                "pass two files in PEM format that belong together."
            ) from None


def _load_model(name_or_path: str, device: torch.device, offload: bool) -> WorldModel:
    if not offload:
        return WorldModel.from_pretrained(name_or_path, device=device)
    if device.type == "cpu":
        raise ConfigError(
            "--offload keeps parts on the CPU instead of a GPU, and the device is cpu; omit it."
        )
    model = WorldModel.from_pretrained(name_or_path)
    Offload(model, device)
    return model


def _prepare(
    model: WorldModel, adapters: Mapping[str, Path], options: EngineOptions, dtype: torch.dtype, engine: str
) -> Adapters:
    """Attach adapters to a model and make it cheaper, as the options say."""
    in_process = engine != "vllm"
    if in_process:
        model.backbone.model.to(dtype)  # type: ignore[arg-type]
    attached = Adapters(model, adapters, elsewhere=() if in_process else ("backbone",))
    if options.offload and (name := attached.replaces("generator", "codec")):
        raise ConfigError(f"An adapter replaces {name!r} as a whole, which --offload cannot move; omit one.")
    optimize(
        model,
        options.cache_threshold,
        options.quantization if in_process else None,
        options.compile,
    )
    return attached


async def _start_engine(
    name: str,
    folder: Path,
    model: WorldModel,
    compute: Compute,
    adapters: Adapters,
    options: EngineOptions,
    limits: EngineLimits,
) -> Engine:
    if name == "vllm":
        from worldmodel.serving.engine.vllm_engine import VllmEngine

        return await VllmEngine.start(
            model_folder.backbone_folder(folder),
            adapters={name: adapters.folders.get("backbone", {}).get(name) for name in adapters.names},
            limits=limits,
            tensor_parallel_size=options.tensor_parallel_size,
            quantization=options.quantization,
            enforce_eager=options.enforce_eager,
        )
    return InProcessEngine(model.backbone, compute, adapters, limits.kv_bytes, limits.max_model_len)


def _resolve_device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise ConfigError(f"The device {name!r} is not available; use cpu, or omit --device.") from None
    return device


def _bind(host: str, port: int) -> socket.socket:
    """Bind the address before the model is loaded; the socket does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or "no such address"
        raise OutputError(f"Cannot listen on {host} port {port} ({reason}); choose another --port.") from None
    return listener


class Server(uvicorn.Server):
    """Uvicorn server with graceful shutdown: refuse new work, finish the rest, then exit.

    A second signal exits immediately.
    """

    startup_message = ""

    def __init__(self, app: FastAPI, settings: ServerConfig) -> None:
        config = uvicorn.Config(
            app,
            lifespan="on",
            log_config=None,  # see `worldmodel.serving.logs`
            access_log=False,
            ssl_certfile=settings.http.tls_certificate,
            ssl_keyfile=settings.http.tls_key,
            server_header=False,
            proxy_headers=False,
            ws_per_message_deflate=False,  # images and videos are already compressed
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        )
        super().__init__(config)
        self._context: ServerContext = app.state.context
        self._drain_timeout_s = settings.drain_timeout_s
        self._stop_requested = False
        self._draining: asyncio.Task[None] | None = None
        self._drain_deadline = math.inf
        self._idle = IdleConnections()
        self._engine = self._context.service.engine
        self.engine_failed = False
        """Whether the server stopped because its engine had failed."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening and print the address."""
        await super().startup(sockets)
        print(self.startup_message, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Record the request to stop; uvicorn's own handler would raise the signal again on exit."""
        if self._stop_requested:
            self.should_exit = self.force_exit = True
        self._stop_requested = True

    async def on_tick(self, counter: int) -> bool:
        """Close idle connections, and exit after a request to stop or without an engine.

        It is called ten times per second.
        """
        self._idle.close_expired(self.server_state.connections)
        if not self._engine.alive and not self._stop_requested:
            self._stop_requested = self.engine_failed = True
        if self._stop_requested and self._draining is None:
            print(
                "stopping: waiting for unfinished work; a second signal stops immediately",
                file=sys.stderr,
                flush=True,
            )
            self._drain_deadline = time.monotonic() + self._drain_timeout_s
            self._draining = asyncio.create_task(self._context.stop(self._drain_timeout_s))
        if self._draining is not None and self._draining.done():
            remaining = self._drain_deadline - time.monotonic()
            self.config.timeout_graceful_shutdown = max(SHUTDOWN_TIMEOUT_S, math.ceil(remaining))
            self.should_exit = True
        return await super().on_tick(counter)
