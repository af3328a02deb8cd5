"""`worldmodel info`: facts about a model, or a memory estimate for a config."""

import itertools
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worldmodel import config as configs
from worldmodel.cli.model import check_model
from worldmodel.cli.parser import Parser, option
from worldmodel.errors import InputError, ModelError

if TYPE_CHECKING:
    from worldmodel.config import ActionConfig


def main(argv: list[str]) -> None:
    """Print the components and sizes of a model, the actions it takes and the frames it generates."""
    args = _parser().parse_args(argv)
    # `--gpus 8 pan` gives it all words that follow; what is not a number is the config and its settings.
    behind = list(itertools.dropwhile(str.isdecimal, args.gpus))
    args.gpus = [int(number) for number in args.gpus[: len(args.gpus) - len(behind)]]
    args.model, *behind = [*filter(None, [args.model]), *behind] or ["shapes-tiny"]
    args.overrides = [*behind, *args.overrides]
    if args.plan:
        configs.load(args.model, args.overrides)  # before PyTorch is imported, which takes seconds
        from worldmodel.train.memory.report import report

        if min(args.gpus or [1]) < 1 or (args.memory_gib or 1) <= 0:
            raise InputError(
                f"--gpus is {args.gpus} and --memory-gib {args.memory_gib}; use 1 or more GPUs, and a memory "
                "above 0."
            )
        report(args.model, args.overrides, args.json, args.gpus, args.stage, args.memory_gib)
        return
    if args.overrides:
        raise InputError(f"{args.overrides[0]!r} is a setting, which needs --plan; leave it out.")
    check_model(args.model)
    facts = model_facts(args.model)
    print(json.dumps(facts, indent=2) if args.json else _as_text(facts, args.figures))


def _parser() -> Parser:
    parser = Parser(
        "worldmodel info",
        "Show the components of a model and their sizes, the actions it takes, the frames it generates and\n"
        "the figures of its model card. With --plan, estimate the memory that a config needs instead.",
        "worldmodel info shapes-tiny\n  worldmodel info runs/shapes-tiny/model --json\n"
        "  worldmodel info --plan pan --gpus 8 64 --memory-gib 80\n"
        "  worldmodel info --plan --stage generator pan model.codec.image_size=[240,416]",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="name or folder of a model (default: shapes-tiny); with --plan, a training config",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with all figures")
    parser.add_argument("--figures", action="store_true", help="also print the figures of the model card")
    parser.add_argument(
        "--plan",
        action="store_true",
        help="estimate the memory of a GPU in a training step of a config; says what does not fit, and what "
        "would",
    )
    parser.add_argument(
        "--gpus",
        nargs="+",
        default=[],
        metavar="N",
        help="with --plan: numbers of GPUs of the run (default: 1 8 64, as far as the stage runs on them)",
    )
    option(
        parser,
        "--memory-gib",
        "with --plan: memory of a GPU (default: that of the visible one, else 80)",
        kind=float,
        metavar="GIB",
    )
    option(parser, "--stage", "with --plan: a stage of the config (default: the last)", metavar="NAME")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="with --plan: settings that override the config"
    )
    return parser


def _as_text(facts: dict[str, Any], figures: bool) -> str:
    lines = [f"{facts['name']}  ({facts['folder']})"]
    for name, size in facts["components"].items():
        lines.append(
            f"  {name:17s} {size['parameters'] / 1e6:8.2f} M parameters  {size['bytes'] / 2**20:8.2f} MiB"
        )
    if facts["base_model"]:
        lines.append(f"base model: {facts['base_model']}, to which the weights of the backbone are added")
    used = ", ".join(facts["experiments"]) or "none"
    lines.append(f"experiments: {used} (what is not an experiment is the stable surface)")
    for key in ("about", "actions", "frames", "tasks", "license"):
        value = facts[key]
        if isinstance(value, dict):
            lines.append(f"{key}:")
            for name, item in value.items():
                lines.append(f"  {name:24s} {', '.join(map(str, item)) if isinstance(item, list) else item}")
        else:
            lines.append(f"{key}: {', '.join(value) if isinstance(value, list) else value or 'not stated'}")
    if not figures:
        return "\n".join(
            [*lines, f"figures: {len(facts['figures'])} in the model card (--figures prints them)"]
        )
    lines.append("figures:")
    width = max(map(len, facts["figures"]), default=0)
    for name, row in facts["figures"].items():
        first, *others = [cell for cell in row.split(" | ") if cell]
        lines.append(f"  {name:{width}s}  {first:22s}  {'  '.join(others)}".rstrip())
    return "\n".join(lines)


def model_facts(name: str) -> dict[str, Any]:
    """Collect facts from the config, the model card and the headers of the weight files; loads no weights.

    Raises:
        ModelError: there is no such model, or a file is damaged.
    """
    from worldmodel.models.backbone import reference
    from worldmodel.models.loading import model_folder

    folder = model_folder.resolve(name)
    config = model_folder.read_config(folder)
    components = {part: _size(folder / part) for part in ("backbone", *model_folder.components(config))}
    components["tokens"] = _size(folder, "tokens.safetensors")
    base = reference.read(folder / "backbone")
    components["total"] = {
        key: sum(part[key] for part in components.values()) for key in ("parameters", "bytes")
    }
    license_name, figures = read_card(folder / "README.md")
    return {
        "name": folder.name,
        "folder": str(folder),
        "components": components,
        "base_model": base and f"{base.title}, {base.num_layers or 'all'} layers",
        "about": config.about,
        "actions": action_facts(config.action),
        "frames": {
            "image_size": config.codec.image_size,
            "fps": config.fps,
            "chunk_frames": config.chunk_frames,
            "history_rounds": config.history_rounds,
            "num_inference_steps": config.num_inference_steps,
        },
        "experiments": config.experiments,
        "tasks": sorted(model_folder.read_tasks(folder) or ()),
        "license": license_name,
        "figures": figures,
    }


def action_facts(config: "ActionConfig") -> dict[str, str | list[str]]:
    """Describe the actions that a model takes, by kind."""
    from worldmodel.actions import action_kinds

    return {
        kind.name: kind.describe(config.kinds[kind.name]) if kind.name in config.kinds else "none"
        for kind in action_kinds()
    }


def _size(folder: Path, pattern: str = "*.safetensors") -> dict[str, int]:
    """Count the parameters and bytes of a folder's safetensors files."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.rglob(pattern))
    if not files:
        raise ModelError(f"{folder} has no {pattern}; fetch the model again.")
    parameters = 0
    for path in files:
        try:
            with safe_open(path, framework="pt") as tensors:
                parameters += sum(math.prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118
        except (OSError, SafetensorError):
            raise ModelError(f"{path} is damaged; fetch the model again.") from None
    return {"parameters": parameters, "bytes": sum(path.stat().st_size for path in files)}


def read_card(path: Path) -> tuple[str | None, dict[str, str]]:
    """Read the license and the rows of the tables from a model card; nothing if it cannot be read."""
    import yaml
    from huggingface_hub import metadata_load

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        stated = (metadata_load(path) or {}).get("license")
    except (OSError, ValueError, yaml.YAMLError):
        return None, {}
    license_name = stated if isinstance(stated, str) else None
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]
    # The row above |---| is the header.
    rules = {index for index, row in enumerate(rows) if not "".join(row).strip("-: ")}
    bodies = [row for index, row in enumerate(rows) if index not in rules and index + 1 not in rules]
    return license_name, {row[0]: " | ".join(row[1:]) for row in bodies if len(row) > 1}
