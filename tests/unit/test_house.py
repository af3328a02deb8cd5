"""House rules that a reviewer could check by hand: what is never imported, is short, starts fast."""

import ast
import inspect
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from worldmodel import config, errors
from worldmodel.errors import ConfigError, WorldModelError

ROOT = Path(__file__).parents[2]
ROOMS = ("worldmodel", "train", "serving", "demo", "benchmarks")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
LIBRARY = [path for path in SOURCES if path.is_relative_to(ROOT / "worldmodel")]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
"""Modules whose reading runs what a file says."""
SERVERS = {"fastapi", "starlette", "uvicorn", "gradio", "vllm"}
CLI = "worldmodel/cli/"
"""The command line, which prints and may import everything."""
TOP_TO_BOTTOM = {"run_stage"}
"""The training loop: a reader follows it better in one piece."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))))


@cache
def imports_of(path: Path) -> set[str]:
    """Full names of what a file imports, at its top or later."""
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


def offenders(paths: list[Path], breaks: Callable[[Path], object]) -> list[str]:
    return [name_of(path) for path in paths if breaks(path)]


def test_the_rules_see_the_code() -> None:
    assert len(LIBRARY) > 20
    assert {"torch", "torch.nn"} <= imports_of(ROOT / "worldmodel/models/codec/autoencoder.py")
    assert offenders(SOURCES, lambda path: "torch" in roots_of(path))


def test_nothing_unpickles() -> None:
    loads = {"torch.load", "np.load", "numpy.load"}
    own_line = "worldmodel/data/worker.py"  # between a training and its workers: nobody else holds an end
    assert offenders(SOURCES, lambda path: roots_of(path) & UNPICKLERS) == [own_line]
    assert offenders(SOURCES, lambda path: loads & {*calls_of(path), *imports_of(path)}) == []


def test_the_library_needs_no_server_and_stays_below_its_users() -> None:
    above = ("worldmodel.train", "worldmodel.serving", "worldmodel.demo", "worldmodel.cli")
    below = [path for path in LIBRARY if not name_of(path).startswith((CLI, "worldmodel/__main__.py"))]
    assert offenders(below, lambda path: roots_of(path) & SERVERS) == []
    assert offenders(below, lambda path: [name for name in imports_of(path) if name.startswith(above)]) == []


def test_only_files_named_for_it_import_vllm() -> None:
    found = offenders(SOURCES, lambda path: "vllm" in roots_of(path))
    allowed = ("serving/engine/vllm_", "benchmarks/")
    assert [name for name in found if not name.startswith(allowed)] == []


def test_the_library_does_not_print() -> None:
    quiet = [path for path in LIBRARY if not name_of(path).startswith(CLI)]
    assert offenders(quiet, lambda path: "print" in calls_of(path)) == []


def test_files_are_short_and_named_for_what_they_hold() -> None:
    vague = {"utils", "util", "helpers", "misc", "common", "manager"}
    lines = {path: path.read_text(encoding="utf-8").splitlines() for path in SOURCES + TESTS}
    assert offenders(SOURCES + TESTS, lambda path: len(lines[path]) > 500) == []
    assert offenders(SOURCES + TESTS, lambda path: path.stem in vague) == []
    # jaxtyping reads real annotations, not strings.
    assert offenders(SOURCES, lambda path: "from __future__ import annotations" in lines[path]) == []


def test_functions_fit_on_a_screen_and_say_what_they_return() -> None:
    long, silent = [], []
    for path in SOURCES:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
                lines = (node.end_lineno or 0) - body[0].lineno + 1
                place = f"{name_of(path)}:{node.lineno} {node.name}"
                limit = 70 if node.name in TOP_TO_BOTTOM else 60
                long += [f"{place} ({lines} lines)"] if lines > limit else []
                silent += [place] if node.returns is None else []
    assert long == []
    assert silent == []


def test_every_folder_of_code_is_a_package() -> None:
    """setup.py finds packages by `__init__.py`; a folder without one would be missing from the wheel."""
    folders = {path.parent for path in SOURCES if ROOT / "benchmarks" not in path.parents}
    assert [name_of(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_importing_is_fast_and_light() -> None:
    code = (
        "import sys, time; start = time.process_time(); import worldmodel; "
        "print(time.process_time() - start, *sys.modules)"
    )
    seconds, *modules = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).split()
    assert float(seconds) < 3
    assert not SERVERS & set(modules)
    assert "torch" not in modules


@pytest.mark.parametrize("verb", ["rollout", "describe", "eval", "train", "info", "config"])
def test_help_needs_no_model(verb: str) -> None:
    code = (
        "import sys; from worldmodel.cli import main; "
        f"code = main([{verb!r}, '--help']); print(code, 'transformers' in sys.modules)"
    )
    out = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert out.splitlines()[-1] == "0 False"


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_every_key_of_every_config_is_in_the_schema(path: Path) -> None:
    assert isinstance(config.load(path), config.TrainConfig)
    assert config.load(path.stem) == config.load(path), "the shipped config differs from the one in configs/"


def test_a_key_that_is_not_in_the_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: {codec: {imagesize: 64}}")
    with pytest.raises(ConfigError, match="imagesize"):
        config.load(tmp_path / "mine.yaml")


def test_every_error_is_one_a_user_can_mend() -> None:
    own = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    assert len(own) >= 5
    for kind in own:
        assert issubclass(kind, WorldModelError)
        assert issubclass(kind, ValueError)
        assert kind.__doc__
        assert kind.__name__ in (errors.__doc__ or "")


def test_the_core_stays_small() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert len(project["dependencies"]) <= 13
    extras = {"fastapi", "gradio", "vllm", "flash-attn", "diffusers", "gymnasium", "datasets"}
    assert not [need for need in project["dependencies"] if any(need.startswith(name) for name in extras)]
