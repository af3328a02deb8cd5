"""`worldmodel info`: what a model is, and what training one would need."""

import importlib
import json
import math
from pathlib import Path
from typing import Any

from worldmodel.cli.parser import Parser
from worldmodel.config import ActionConfig
from worldmodel.errors import InputError, ModelError


def main(argv: list[str]) -> int:
    """Say what a model is: its parts and their sizes, what steers it, what it makes."""
    parser = Parser(
        "worldmodel info",
        "Say what a model is: its parts and their sizes, the actions it takes, the frames it makes.",
        "worldmodel info shapes-tiny\n  worldmodel info runs/shapes-tiny/model --json\n"
        "  worldmodel info --plan pan model.codec.image_size=[240,416]",
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default="shapes-tiny", help="a name or a model folder"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plan",
        action="store_true",
        help="MODEL is a training config instead: estimate the memory of a step on 1, 8 and 64 GPUs",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="--plan: settings that win over the file"
    )
    args = parser.parse_args(argv)
    if args.plan:
        return importlib.import_module("worldmodel.train.memory_estimate").report(
            args.model, args.overrides, args.json
        )
    if args.overrides:
        raise InputError(f"{args.overrides[0]!r} is a setting, which only --plan takes; leave it out.")
    facts = model_facts(args.model)
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    print(f"{facts['name']}  ({facts['folder']})")
    for name, part in facts["components"].items():
        print(f"  {name:10s} {part['parameters'] / 1e6:8.2f} M parameters  {part['bytes'] / 2**20:8.2f} MiB")
    for key in ("actions", "frames", "tasks", "license", "figures"):
        value = facts[key]
        if isinstance(value, dict):
            print(f"{key}:")
            for name, item in value.items():
                print(f"  {name:24s} {', '.join(map(str, item)) if isinstance(item, list) else item}")
        else:
            print(f"{key}: {', '.join(value) if isinstance(value, list) else value or 'not stated'}")
    return 0


def model_facts(name: str) -> dict[str, Any]:
    """Collect what `info` prints, from the files' headers: no weights are loaded.

    Raises:
        ModelError: there is no such model, or its files are damaged.
    """
    from worldmodel import hub

    folder = hub.resolve(name)
    config = hub.read_config(folder)
    components = {part: _size(folder / part) for part in ("backbone", *hub.COMPONENTS)}
    components["tokens"] = _size(folder, "tokens.safetensors")
    components["total"] = {
        key: sum(part[key] for part in components.values()) for key in ("parameters", "bytes")
    }
    training = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("training") or {}
    tasks = {task for stage in training.get("stages", {}).values() for task in stage.get("tasks", {})}
    license_name, figures = read_card(folder / "README.md")
    return {
        "name": folder.name,
        "folder": str(folder),
        "components": components,
        "actions": action_facts(config.action),
        "frames": {
            "image_size": config.codec.image_size,
            "fps": config.fps,
            "chunk_frames": config.chunk_frames,
            "history_rounds": config.history_rounds,
            "num_inference_steps": config.num_inference_steps,
        },
        "tasks": sorted(tasks),
        "license": license_name,
        "figures": figures,
    }


def action_facts(config: ActionConfig) -> dict[str, str | list[str]]:
    """Say what steers a model, kind by kind."""
    numbers = list(config.vector_names)
    if config.vector_low:
        names = numbers or [str(place + 1) for place in range(config.vector_size)]
        bounds = zip(names, config.vector_low, config.vector_high, strict=True)
        numbers = [f"{name} ({low:g} to {high:g})" for name, low, high in bounds]
    told = {
        "text": f"up to {config.max_text_tokens} tokens",
        "keys": list(config.keys),
        "mouse": "right and down, -1 to 1 of the picture",
        "vector": f"{config.vector_size} numbers" + (f": {', '.join(numbers)}" if numbers else ""),
        "camera": "target or velocity: translation [x, y, z], rotation [x, y, z, w]",
    }
    return {kind: told[kind] if taken else "none" for kind, taken in config.takes.items()}


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
    """Read the license and the rows of the tables from a model card."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None, {}
    license_name = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("license:")), None
    )
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]
    # The row above |---| is a header, and the line itself is none.
    rules = {index for index, row in enumerate(rows) if not "".join(row).strip("-: ")}
    bodies = [row for index, row in enumerate(rows) if index not in rules and index + 1 not in rules]
    return license_name, {row[0]: " | ".join(row[1:]) for row in bodies if len(row) > 1}
