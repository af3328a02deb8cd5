"""Server process: loading the model, listening, and graceful shutdown."""

import asyncio
import importlib.util
import logging
import math
import os
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

from worldmodel import allocator
from worldmodel.errors import ConfigError, OutputError, WorldModelError
from worldmodel.models.loading import model_folder
from worldmodel.serving import loading, logs
from worldmodel.serving.app import create_app
from worldmodel.serving.auth import Keys, check_bind
from worldmodel.serving.connections import KEEP_ALIVE_S, IdleConnections, SmallBuffers, check_protocol
from worldmodel.serving.context import ServerContext
from worldmodel.serving.engine import threads
from worldmodel.serving.engine.batching import Compute
from worldmodel.serving.engine.limits import EngineLimits
from worldmodel.serving.media import system_calls
from worldmodel.serving.settings import EngineOptions, HttpOptions, ServerConfig
from worldmodel.serving.videos.webhooks import check_webhooks
from worldmodel.serving.watchdog import end_process_in, keep_process

LOG = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
SHUTDOWN_TIMEOUT_S = 2
"""Time for responses that are being sent when all other work has finished."""
CLOSE_S = 20.0
"""Time after `drain_timeout_s` within which the process ends in any case."""
TICKS_PER_CHECK = 10


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
        OutputError: the address or the data folder cannot be used, or servers of another model use the
            database.
        DatabaseError: the database cannot be used.
        SystemExit: the model computes no more; the exit code is 1, so that a supervisor starts the server
            again.
    """
    keys = config.keys or Keys()
    check_bind(host, keys)
    with _bind(host, port) as listener:
        app, limits = await load_app(name_or_path, config, engine, device, adapters, options)
        service, config = app.state.context.models.first, app.state.context.config
        runner = service.engine
        host, port = listener.getsockname()[:2]
        scheme = "https" if config.http.tls_certificate else "http"
        address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        server = Server(app, config)
        server.startup_message = (
            f"serving {config.model_name} on {address} "
            f"(engine: {runner.name}, device: {service.model.device.type}, "
            f"{f'keys: {len(keys)}' if len(keys) else 'no key: local requests only'})\n"
            f"engine: {limits}\n"
            f"play: {address}/play   schema: {address}/openapi.json   stop: Ctrl-C"
        )
        server.ends_process = True
        try:
            await server.serve(sockets=[listener])
        finally:
            keep_process()
        fault = app.state.context.watchdog.fault
        if fault is not None:
            part = "engine" if not runner.alive else "model" if service.alive else "generator"
            print(f"The {part} is {fault}; see the log above, and start the server again.", file=sys.stderr)
        if service.compute.running_s:  # a call that does not return would keep the interpreter from exiting
            logging.shutdown()
            sys.stderr.flush()
            os._exit(1)
        if fault is not None:
            sys.exit(1)


async def load_app(
    name_or_path: str,
    config: ServerConfig,
    engine: str = "auto",
    device: str | None = None,
    adapters: Mapping[str, Path] | None = None,
    options: EngineOptions | None = None,
) -> tuple[FastAPI, EngineLimits]:
    """Load a model, start its engine, and create the app; returns also what the engine can hold.

    Arguments and errors as for `serve`.
    """
    check_http(config.http, config.keys or Keys())
    check_protocol()
    logs.configure(config.http)
    allocator.limit_arenas()
    folder, options = model_folder.resolve(name_or_path), options or EngineOptions()
    config = replace(config, model_name=config.model_name or folder.resolve().name)
    print(f"loading {config.model_name} ...", file=sys.stderr, flush=True)  # this can take minutes
    if engine == "auto":
        engine = "vllm" if importlib.util.find_spec("vllm") is not None else "in-process"
    loading.check_options(options, engine, config)
    best = "cuda" if torch.cuda.is_available() else "cpu"
    compute, where = Compute(), model_folder.available_device(device or best)
    if where.type == "cpu":
        LOG.info("PyTorch uses %d threads", await compute.run(threads.choose, options.threads))
    # In the thread that runs the model later. With a second thread OpenMP would have more threads than cores,
    # and those would sleep between operations: a round took 1.6 times as long.
    loaded = await compute.run(loading.load, name_or_path, where, options, engine, adapters or {})
    LOG.info("starting the %s engine: %s", engine, loaded.limits)
    service = await loading.start(loaded, compute, options, engine)
    try:
        return create_app(service, config, options), loaded.limits
    except WorldModelError:
        await service.close()
        raise


def check_http(options: HttpOptions, keys: Keys) -> None:
    """Raise `ConfigError` for settings that contradict each other, or a certificate that cannot be used."""
    if options.cors_origins and not len(keys):
        raise ConfigError(
            f"cors_origins is {', '.join(options.cors_origins)}, but there is no API key, and without one "
            "no other origin is answered; configure a key."
        )
    check_webhooks(options)
    if os.geteuid() == 0 and not (options.allow_root or system_calls.supported()):
        raise ConfigError(
            "This kernel cannot filter the system calls of decoders, so one that an upload has taken over "
            "would be root; serve as another user, or pass --allow-root."
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
            ws=SmallBuffers,
            ws_per_message_deflate=False,  # images and videos are already compressed
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        )
        super().__init__(config)
        self._context: ServerContext = app.state.context
        self._stop_requested = False
        self._draining: asyncio.Task[None] | None = None
        self._drain_deadline = math.inf
        self._idle = IdleConnections()
        self.ends_process = False
        """Whether the process may be ended if the event loop hangs, or the server does not stop in time."""

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
        """Close idle connections, and exit after a request to stop or if the model computes no more.

        It is called ten times per second.
        """
        config = self._context.config
        self._idle.close_expired(self.server_state.connections)
        if self._context.watchdog.fault is not None:
            self._stop_requested = True
        if self.ends_process and self._draining is None and counter % TICKS_PER_CHECK == 0:
            end_process_in(config.step_deadline_s + config.drain_timeout_s)
        if self._stop_requested and self._draining is None:
            sys.stderr.write("stopping: waiting for unfinished work; a second signal stops immediately\n")
            sys.stderr.flush()
            self._drain_deadline = time.monotonic() + config.drain_timeout_s
            if self.ends_process:
                end_process_in(config.drain_timeout_s + CLOSE_S)
            self._draining = asyncio.create_task(self._context.stop(config.drain_timeout_s))
        if self._draining is not None and self._draining.done():
            remaining = self._drain_deadline - time.monotonic()
            self.config.timeout_graceful_shutdown = max(SHUTDOWN_TIMEOUT_S, math.ceil(remaining))
            self.should_exit = True
        return await super().on_tick(counter)
