"""Conventions of the source code: imports, sizes, names, docstrings and start-up time."""

import ast
import dataclasses
import inspect
import subprocess
import sys
import tomllib
import typing
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from worldmodel import config, errors
from worldmodel.cli.config import field_docs
from worldmodel.errors import ConfigError, WorldModelError

ROOT = Path(__file__).parents[2]
FOLDERS = ("worldmodel", "train", "serving", "demo", "benchmarks")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
LIBRARY = [path for path in SOURCES if path.is_relative_to(ROOT / "worldmodel")]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

SERVERS = {"fastapi", "starlette", "uvicorn", "gradio", "vllm"}
CLI = "worldmodel/cli/"
"""The command line, which may print and import everything."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))))


@cache
def imports_of(path: Path) -> set[str]:
    """Return the full names of all imports of a file, also those inside functions."""
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def calls_of(path: Path) -> list[str]:
    return [ast.unparse(node.func) for node in nodes_of(path) if isinstance(node, ast.Call)]


def roots_of(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports_of(path)}


def matching(paths: list[Path], predicate: Callable[[Path], object]) -> list[str]:
    return [name_of(path) for path in paths if predicate(path)]


def test_the_checks_find_the_code() -> None:
    assert len(LIBRARY) > 20
    assert {"torch", "torch.nn"} <= imports_of(ROOT / "worldmodel/models/codec/autoencoder.py")
    assert matching(SOURCES, lambda path: "torch" in roots_of(path))


def test_the_library_imports_neither_servers_nor_its_users() -> None:
    above = ("worldmodel.train", "worldmodel.serving", "worldmodel.demo", "worldmodel.cli")
    # The public names of the root are imported when they are used, also the client's.
    users = (CLI, "worldmodel/__main__.py", "worldmodel/__init__.py", "worldmodel/experiments/")
    below = [path for path in LIBRARY if not name_of(path).startswith(users)]
    assert matching(below, lambda path: roots_of(path) & SERVERS) == []
    assert matching(below, lambda path: [name for name in imports_of(path) if name.startswith(above)]) == []


def test_vllm_is_imported_only_by_its_engine() -> None:
    found = matching(SOURCES, lambda path: "vllm" in roots_of(path))
    allowed = ("serving/engine/vllm_", "benchmarks/")
    assert [name for name in found if not name.startswith(allowed)] == []


def test_the_library_does_not_print() -> None:
    reports = "worldmodel/errors.py"  # `exit_code` prints the error of a command
    quiet = [path for path in LIBRARY if not name_of(path).startswith((CLI, reports))]
    assert matching(quiet, lambda path: "print" in calls_of(path)) == []


def test_printed_sizes_name_the_width_first() -> None:
    """As `docs/how-to/platforms.md` says."""
    assert matching(SOURCES, lambda path: "{height} x {width}" in path.read_text(encoding="utf-8")) == []


def test_files_have_specific_names() -> None:
    vague = {"utils", "util", "helpers", "misc", "common", "manager"}
    lines = {path: path.read_text(encoding="utf-8").splitlines() for path in SOURCES + TESTS}
    (figure,) = (path for path in SOURCES if path.name == "world_model.py")
    assert len(lines[figure]) <= 260, "it is read from beginning to end"
    assert matching(SOURCES + TESTS, lambda path: path.stem in vague) == []
    # jaxtyping reads real annotations, not strings.
    assert matching(SOURCES, lambda path: "from __future__ import annotations" in lines[path]) == []


def test_functions_have_return_types() -> None:
    untyped = []
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is None:
                untyped.append(f"{name_of(path)}:{node.lineno} {node.name}")
    assert untyped == []


def test_every_folder_of_code_is_a_package() -> None:
    """setuptools finds packages by `__init__.py`; a folder without one would be missing from the wheel."""
    folders = {path.parent for path in SOURCES if ROOT / "benchmarks" not in path.parents}
    assert [name_of(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_import_is_fast_and_loads_no_heavy_packages() -> None:
    code = (
        "import sys, time; start = time.process_time(); import worldmodel; "
        "print(time.process_time() - start, *sys.modules)"
    )
    seconds, *modules = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).split()
    assert float(seconds) < 3
    assert not SERVERS & set(modules)
    assert "torch" not in modules


def test_help_does_not_import_transformers() -> None:
    verbs = ("rollout", "describe", "eval", "train", "info", "config")
    code = (
        "import sys; from worldmodel.cli import main; "
        f"codes = [main([verb, '--help']) for verb in {verbs}]; "
        "print(codes, 'transformers' in sys.modules)"
    )
    out = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert out.splitlines()[-1] == "[0, 0, 0, 0, 0, 0] False"


def test_shipped_configs_match_the_schema() -> None:
    for path in CONFIGS:
        assert isinstance(config.load(path), config.TrainConfig), path.name
        assert config.load(path.stem) == config.load(path), f"{path.name} differs from the shipped one"


def config_classes(schema: type) -> set[type]:
    """Return a config dataclass and all that its fields contain."""
    hints = typing.get_type_hints(schema).values()
    types = {kind for hint in hints for kind in (hint, *typing.get_args(hint))}
    nested = [config_classes(kind) for kind in types if dataclasses.is_dataclass(kind)]
    return {schema}.union(*nested)


def test_every_config_key_has_a_docstring() -> None:
    classes = config_classes(config.TrainConfig)
    assert len(classes) > 10
    undocumented = [
        f"{schema.__name__}.{field.name}"
        for schema in classes
        for field in dataclasses.fields(schema)
        if not field_docs(schema).get(field.name)
    ]
    assert undocumented == []


def test_an_unknown_key_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: {codec: {imagesize: 64}}")
    with pytest.raises(ConfigError, match="imagesize"):
        config.load(tmp_path / "mine.yaml")


def test_errors_are_documented_subclasses_of_worldmodel_error() -> None:
    found = inspect.getmembers(errors, inspect.isclass)
    own = [kind for _, kind in found if kind.__module__ == errors.__name__]
    assert len(own) >= 5
    for kind in own:
        assert issubclass(kind, WorldModelError)
        assert issubclass(kind, ValueError)
        assert kind.__doc__
        assert kind.__name__ in (errors.__doc__ or "")


def test_core_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert len(project["dependencies"]) <= 13
    extras = {"fastapi", "gradio", "vllm", "flash-attn", "diffusers", "gymnasium", "datasets"}
    assert not [need for need in project["dependencies"] if any(need.startswith(name) for name in extras)]
