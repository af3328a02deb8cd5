"""`worldmodel config`: configurations as they resolve, every key explained."""

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from worldmodel.cli.parser import Parser


def main(argv: list[str]) -> int:
    """Print a resolved configuration, every key explained; without a file, list the shipped ones."""
    parser = Parser(
        "worldmodel config",
        "Print a configuration as it resolves, every key explained; without a file, list the shipped ones.",
        "worldmodel config shapes_tiny seed=1 stages.state.steps=100 > mine.yaml",
    )
    parser.add_argument("file", nargs="?", metavar="FILE|NAME", help="a YAML file or a shipped name")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    args = parser.parse_args(argv)
    from worldmodel import config as configs

    if args.file is None:
        shipped = files("worldmodel.configs").iterdir()
        print("\n".join(sorted(Path(entry.name).stem for entry in shipped if entry.name.endswith(".yaml"))))
        return 0
    print("\n".join(explained(configs.load(args.file, args.overrides), indent="", told=set())))
    return 0


def explained(settings: Any, indent: str, told: set[type]) -> Iterator[str]:
    """Yield YAML lines of a dataclass; comments come with the first block of each kind."""
    import yaml

    docs = {} if type(settings) in told else field_docs(type(settings))
    told.add(type(settings))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        for line in docs.get(field.name, "").splitlines():
            yield f"{indent}# {line.strip()}"
        blocks = (
            value if isinstance(value, dict) and any(map(dataclasses.is_dataclass, value.values())) else None
        )
        if dataclasses.is_dataclass(value) or blocks:
            yield f"{indent}{field.name}:"
            for name, block in (blocks or {}).items():
                yield f"{indent}  {name}:"
                yield from explained(block, indent + "    ", told)
            if not blocks:
                yield from explained(value, indent + "  ", told)
        else:
            plain = list(value) if isinstance(value, tuple) else value
            text = yaml.safe_dump(plain, default_flow_style=True, width=10_000, sort_keys=False)
            yield f"{indent}{field.name}: {text.partition(chr(10))[0]}"


def field_docs(schema: type) -> dict[str, str]:
    """Read the docstrings below a dataclass's fields from its source."""
    tree = ast.parse(inspect.getsource(schema)).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
        ):
            docs[field.target.id] = inspect.cleandoc(ast.literal_eval(below.value))
    return docs
