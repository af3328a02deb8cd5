"""`worldmodel config`: resolved configurations with a comment for every key."""

import ast
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from worldmodel.actions import ActionConfig, ActionSpec, action_kinds
from worldmodel.cli.parser import OVERRIDES_HELP, Parser


def main(argv: list[str]) -> None:
    """Print a resolved configuration, or the names of the shipped ones."""
    parser = Parser(
        "worldmodel config",
        "Print a training configuration with all defaults filled in and a comment for every key. Without an\n"
        "argument, list the shipped configurations.",
        "worldmodel config\n  worldmodel config shapes_tiny seed=1 stages.state.steps=100 > mine.yaml",
    )
    parser.add_argument(
        "config", nargs="?", metavar="CONFIG", help="a YAML file, or the name of a shipped config"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES_HELP)
    args = parser.parse_args(argv)

    from worldmodel import config as configs

    if args.config is None:
        shipped = files("worldmodel.configs").iterdir()
        print("\n".join(sorted(Path(entry.name).stem for entry in shipped if entry.name.endswith(".yaml"))))
        return
    config = configs.load(args.config, args.overrides)
    if isinstance(config.init_from, str):  # the settings of the model are those of the model that it names
        from worldmodel.train.run.settings import load

        config = load(args.config, args.overrides)
    print("\n".join(yaml_lines(config, indent="", explained=set())))


def yaml_lines(settings: Any, indent: str, explained: set[type]) -> Iterator[str]:
    """Yield the YAML lines of a dataclass; its keys are explained unless its type is in `explained`."""
    docs = {} if type(settings) in explained else field_docs(type(settings))
    explained.add(type(settings))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(settings, ActionConfig) and field.name == "kinds":
            yield from _kind_lines(settings, indent, docs)
            continue
        for line in docs.get(field.name, "").splitlines():
            yield f"{indent}# {line.strip()}"
        blocks = (
            value if isinstance(value, dict) and any(map(dataclasses.is_dataclass, value.values())) else None
        )
        if dataclasses.is_dataclass(value) or blocks:
            yield f"{indent}{field.name}:"
            for name, block in (blocks or {}).items():
                yield f"{indent}  {name}:"
                yield from yaml_lines(block, indent + "    ", explained)
            if not blocks:
                yield from yaml_lines(value, indent + "  ", explained)
        else:
            plain = value
            if isinstance(value, tuple):
                plain = [each.as_dict() if isinstance(each, ActionSpec) else each for each in value]
            yield _setting_line(indent, field.name, plain)


def _kind_lines(settings: ActionConfig, indent: str, docs: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for every kind of action, explained if `docs` is not empty."""
    for kind in action_kinds():
        if docs:
            yield f"{indent}# {kind.setting}"
        value = [] if kind.untaken == () else kind.untaken
        if kind.name in settings.kinds:
            value = kind.setting_of(settings.kinds[kind.name])
        yield _setting_line(indent, kind.name, value)


def _setting_line(indent: str, name: str, value: Any) -> str:
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
    return f"{indent}{name}: {text.partition(chr(10))[0]}"


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
