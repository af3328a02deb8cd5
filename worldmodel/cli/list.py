"""`worldmodel list`: worlds, base models, configs and policies by name."""

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from worldmodel.cli.parser import Parser
from worldmodel.models.loading import location
from worldmodel.worlds.gallery import gallery

POLICIES = {
    "random": "random actions",
    "sticky": "random actions, each repeated for a while",
    "worldmodel.games.minigrid:explore": "walks, fetches keys and opens doors in MiniGrid",
    "worldmodel.games.minigrid:Missions": "follows a board's mission in BabyAI",
    "worldmodel.games.minigrid:Player": "solves a MiniGrid board from its frame, for `worldmodel rank`",
    "worldmodel.games.coinrun:Run": "runs and jumps to the right in CoinRun",
    "worldmodel.games.pusht:Push": "pushes the block of PushT towards its goal",
    "worldmodel.games.vizdoom:Walk": "walks through the maze of ViZDoom",
    "sb3:ALGORITHM:FILE": "a policy of Stable-Baselines3",
}
"""Policies that `worldmodel record` takes, and what they do."""


def main(argv: list[str]) -> None:
    """Print what can be named on the command line."""
    parser = Parser(
        "worldmodel list",
        "List the worlds that are here (shipped ones, and models in runs/), base language models, training\n"
        "configs, and policies to record with.",
        "worldmodel list\n  worldmodel list worlds --json",
    )
    parser.add_argument(
        "what", nargs="?", choices=("worlds", "base-models", "configs", "policies"), help="one part alone"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    parts = {"worlds": worlds, "base-models": base_models, "configs": shipped_configs, "policies": policies}
    found = {name: list(part()) for name, part in parts.items() if args.what in (None, name)}
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n\n".join(_as_text(name, rows) for name, rows in found.items()))


def worlds() -> Iterator[dict[str, Any]]:
    """Yield the models that can be played, as the gallery of `worldmodel demo` shows them."""
    for card in gallery():
        height, width = card.size
        yield {
            "name": card.name,
            "size": f"{width} x {height}",
            "takes": ", ".join(card.takes),
            "about": card.about,
        }


def base_models() -> Iterator[dict[str, Any]]:
    """Yield the base language models that can be downloaded."""
    for name in location.BASE_MODELS:
        here = (location.cache_folder() / name / location.CHECKSUMS).is_file()
        yield {"name": name, "about": "downloaded" if here else f"not here: worldmodel download {name}"}


def shipped_configs() -> Iterator[dict[str, Any]]:
    """Yield the training configs, and the first sentence that each begins with."""
    for entry in sorted(files("worldmodel.configs").iterdir(), key=lambda each: each.name):
        if entry.name.endswith(".yaml"):
            yield {"name": Path(entry.name).stem, "about": _first_sentence(entry.read_text(encoding="utf-8"))}


def _first_sentence(config: str) -> str:
    """Return the first sentence of the comment that a config begins with."""
    comment = []
    for line in config.splitlines():
        if not line.startswith("# "):
            break
        comment.append(line.lstrip("# ").strip())
    return re.split(r"(?<=\.) ", " ".join(comment))[0]


def policies() -> Iterator[dict[str, Any]]:
    """Yield the policies to record with."""
    for name, about in POLICIES.items():
        yield {"name": name, "about": about}


COMMANDS = {
    "worlds": "worldmodel demo NAME",
    "base-models": "backbone.pretrained in a config",
    "configs": "worldmodel train NAME",
    "policies": "worldmodel record ENV_ID --policy NAME",
}


def _as_text(part: str, rows: list[dict[str, Any]]) -> str:
    columns = list(rows[0]) if rows else []
    widths = {column: max(len(row[column]) for row in rows) for column in columns}
    lines = [f"{part}  ({COMMANDS[part]})"]
    for row in rows:
        lines.append("  " + "  ".join(row[column].ljust(widths[column]) for column in columns).rstrip())
    return "\n".join(lines)
