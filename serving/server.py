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
from worldmodel.models.adapters import Adapters
from worldmodel.models.inference import optimize
from worldmodel.models.loading import model_folder
from worldmodel.models.offload import Offload
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.saved import identify
from worldmodel.serving import logs
from worldmodel.serving.app import create_app
from worldmodel.serving.auth import Keys, check_bind
from worldmodel.serving.connections import KEEP_ALIVE_S, IdleConnections, SmallBuffers, check_protocol
from worldmodel.serving.context import ServerContext
from worldmodel.serving.engine import limits as engine_limits
from worldmodel.serving.engine import threads
from worldmodel.serving.engine.batching import Compute
from worldmodel.serving.engine.generator_processes import GeneratorProcesses, keep_part
from worldmodel.serving.engine.limits import EngineLimits
from worldmodel.serving.engine.local import Engine, InProcessEngine
from worldmodel.serving.media import system_calls
from worldmodel.serving.settings import OPTIONS, EngineOptions, HttpOptions, ServerConfig
from worldmodel.serving.videos.webhooks import check_webhooks
from worldmodel.serving.watchdog import end_process_in, keep_process
from worldmodel.serving.worlds.service import WorldService

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
        service, config = app.state.context.service, app.state.context.config
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
    folder, options, adapters = model_folder.resolve(name_or_path), options or EngineOptions(), adapters or {}
    config = replace(config, model_name=config.model_name or folder.resolve().name)
    print(f"loading {config.model_name} ...", file=sys.stderr, flush=True)  # this can take minutes
    if engine == "auto":
        engine = "vllm" if importlib.util.find_spec("vllm") is not None else "in-process"
    _check_sharing(options, engine)
    _check_adapters_dir(config.adapters_dir, options, engine)
    best = "cuda" if torch.cuda.is_available() else "cpu"
    compute, where = Compute(), model_folder.available_device(device or best)

    def load() -> tuple[WorldModel, Adapters, EngineLimits, str | None, GeneratorProcesses | None]:
        if where.type == "cpu":
            LOG.info("PyTorch uses %d threads", threads.choose(options.threads))
        model = _load_model(name_or_path, where, options)
        attached = _attach(model, adapters, options, engine)
        parallelism, size = options.generator_parallelism
        digest = None
        if parallelism == "tensor" and size > 1:
            digest = identify(model)  # of the whole model, of which this process keeps a part
            keep_part(model, 0, size, where)
        limits = engine_limits.resolve(options, model, engine)
        quantization = options.quantization if engine != "vllm" else None
        optimize(model, options.cache_threshold, quantization, options.compile)
        processes = None
        if size > 1:
            processes = GeneratorProcesses.start(
                folder, model, size, adapters, quantization, options.compile, parallelism
            )
        return model, attached, limits, digest, processes

    # In the thread that runs the model later. With a second thread OpenMP would have more threads than cores,
    # and those would sleep between operations: a round took 1.6 times as long.
    model, attached, limits, digest, processes = await compute.run(load)
    LOG.info("starting the %s engine: %s", engine, limits)
    runner: Engine
    if engine == "vllm":
        from worldmodel.serving.engine.vllm_engine import VllmEngine

        runner = await VllmEngine.start(
            model_folder.backbone_folder(folder),
            adapters={name: attached.folders.get("backbone", {}).get(name) for name in attached.names},
            limits=limits,
            tensor_parallel_size=options.tensor_parallel_size,
            quantization=options.quantization,
            enforce_eager=options.enforce_eager,
        )
    else:
        runner = InProcessEngine(model.backbone, compute, attached, limits.kv_bytes, limits.max_model_len)
    service = WorldService(
        model,
        runner,
        compute=compute,
        adapters=attached,
        processes=processes,
        digest=digest,
        max_batch=limits.max_sessions,
    )
    try:
        return create_app(service, config), limits
    except WorldModelError:
        await service.close()
        raise


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


def _load_model(name_or_path: str, device: torch.device, options: EngineOptions) -> WorldModel:
    if options.offload and device.type == "cpu":
        raise ConfigError(
            "--offload keeps parts on the CPU instead of a GPU, and the device is cpu; omit it."
        )
    divided = options.generator_tensor_parallel_size > 1
    if not (options.offload or divided):
        return WorldModel.from_pretrained(name_or_path, device=device)
    model = WorldModel.from_pretrained(name_or_path)
    if divided:  # the generator stays on the CPU until it is divided
        for name, module in model.named_children():
            if name != "generator":
                module.to(device)
        for parameter in model.parameters(recurse=False):
            parameter.data = parameter.data.to(device)
    else:
        Offload(model, device)
    return model


def _attach(model: WorldModel, adapters: Mapping[str, Path], options: EngineOptions, engine: str) -> Adapters:
    """Convert the backbone to the dtype of the options, and attach adapters to the model."""
    in_process = engine != "vllm"
    if in_process and options.dtype:
        model.backbone.model.to(getattr(torch, options.dtype))  # type: ignore[arg-type]
    attached = Adapters(model, adapters, elsewhere=() if in_process else ("backbone",))
    if options.offload and (name := attached.replaces("generator", "codec")):
        raise ConfigError(f"An adapter replaces {name!r} as a whole, which --offload cannot move; omit one.")
    if options.generator_tensor_parallel_size > 1 and (name := attached.replaces("generator")):
        raise ConfigError(
            f"An adapter replaces {name!r} as a whole, which --generator-tensor-parallel-size cannot divide; "
            "omit one."
        )
    return attached


def _check_sharing(options: EngineOptions, engine: str) -> None:
    """Check the options with which processes share the generator.

    Raises:
        ConfigError: they exclude each other.
    """
    parallelism, size = options.generator_parallelism
    if parallelism == "tensor" and options.sequence_parallel_size > 1:
        raise ConfigError(
            f"--sequence-parallel-size is {options.sequence_parallel_size} and "
            f"{OPTIONS[parallelism]} is {size}; processes divide tokens or weights, so set one of them."
        )
    used = f"{OPTIONS[parallelism]} is {size}"
    if size > 1 and options.offload:
        raise ConfigError(f"{used}, whose processes keep the generator on their devices; omit --offload.")
    if parallelism == "tensor" and options.quantization and engine != "vllm":
        raise ConfigError(f"{used}, which does not divide quantized weights; omit --quantization.")


def _check_adapters_dir(folder: Path | None, options: EngineOptions, engine: str) -> None:
    """Check that adapters can be added while the server runs, if they are to be.

    Raises:
        ConfigError: there is no such folder, or another option excludes it.
    """
    if folder is None:
        return
    if not folder.is_dir():
        raise ConfigError(f"--adapters-dir is {str(folder)!r}, which is not a folder; make it first.")
    excluding = {
        "--engine vllm": engine == "vllm",
        "--quantization": options.quantization is not None,
        "--compile": options.compile,
        "--offload": options.offload,
        OPTIONS[options.generator_parallelism[0]]: options.generator_parallelism[1] > 1,
    }
    if used := [name for name, set_ in excluding.items() if set_]:
        raise ConfigError(
            f"--adapters-dir adds adapters to layers as they are in this process, which {used[0]} changes; "
            "omit one of them, or name the adapters at the start by --adapter."
        )


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
