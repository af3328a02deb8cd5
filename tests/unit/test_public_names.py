"""The public interface: the names of `worldmodel`, documented one by one; everything else is private."""

import ast
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import worldmodel

ROOT = Path(__file__).parents[2]
PUBLIC = sorted(set(worldmodel.__all__) - {"__version__"})
TRAIN = "train.finetune.train"
"""The function that trains; `worldmodel.train` is a package already, which torchrun starts."""
INTERNALS = {
    "docs/how-to/flow.md",
    "examples/imagination.py",
    # Extension points, each documented on its page.
    "docs/how-to/actions.md",
    "docs/how-to/evaluate.md",
    "docs/how-to/extend-training.md",
}
"""They run flows, measure agents, or extend the library, by its own modules."""


def test_the_documented_names_are_the_exported_ones() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/reference/api").glob("*.md"))
    assert sorted(re.findall(r"^::: worldmodel\.(\S+)$", pages, re.MULTILINE)) == sorted([*PUBLIC, TRAIN])
    overview = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    assert [name for name in PUBLIC if f"[`{name}`](api/" not in overview] == []
    assert len(PUBLIC) <= 40
    with pytest.raises(AttributeError, match="banana"):
        worldmodel.banana  # noqa: B018 -- the access raises


def functions_of(name: str) -> list[tuple[str, Callable[..., object]]]:
    """Return a public function, or the public methods that a public class defines itself."""
    found = getattr(worldmodel, name)
    if not inspect.isclass(found):
        return [(name, inspect.unwrap(found))]
    methods = []
    for method, value in vars(found).items():
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not method.startswith("_") and inspect.isfunction(value):
            methods.append((f"{name}.{method}", inspect.unwrap(value)))
    return methods


def raises_own_errors(function: Callable[..., object]) -> bool:
    """Return whether a function raises an error itself, by its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc]
    return any(re.match(r"\w+Error\(", ast.unparse(each)) for each in raised)


def test_public_names_have_docstrings_types_and_errors() -> None:
    incomplete = []
    for name in PUBLIC:
        text = getattr(worldmodel, name).__doc__ or ""
        if not text or text.startswith(f"{name}("):  # dataclass writes the signature where there is none
            incomplete.append(f"{name} has no docstring")
        for function, value in functions_of(name):
            signature = inspect.signature(value)
            parameters = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
            if any(each.annotation is each.empty for each in parameters):
                incomplete.append(f"{function} has parameters without types")
            if signature.return_annotation is signature.empty:
                incomplete.append(f"{function} has no return type")
            if raises_own_errors(value) and "Raises:" not in (value.__doc__ or ""):
                incomplete.append(f"{function} does not document what it raises")
    assert incomplete == []


def test_every_public_name_is_defined_where_the_package_says() -> None:
    for name, home in worldmodel._HOMES.items():
        module, _, attribute = home.partition(":")
        assert getattr(worldmodel, name) is getattr(importlib.import_module(module), attribute)


def snippets() -> dict[str, str]:
    """Return the Python code of the README, the documentation and the examples, by the name of the file."""
    found = {}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        blocks = re.findall(
            r"^ *```(?:python|text)\n(.*?)^ *```", path.read_text(encoding="utf-8"), re.S | re.M
        )
        found[path.relative_to(ROOT).as_posix()] = "\n".join(blocks)
    for path in sorted((ROOT / "examples").glob("*.py")):
        found[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        found[path.relative_to(ROOT).as_posix()] = "\n".join(code)
    return found


def test_readme_docs_and_examples_use_public_names() -> None:
    private = []
    for name, code in snippets().items():
        if name in INTERNALS:
            continue
        code = code.replace("from worldmodel.train.finetune import train\n", "")
        private += [
            f"{name}: {line}" for line in re.findall(r"^ *(?:from|import) worldmodel\..*", code, re.M)
        ]
        for names in re.findall(r"^ *from worldmodel import (\([^)]*\)|.*)", code, re.MULTILINE):
            used = re.findall(r"\w+", re.sub(r"#.*", "", names))
            private += [f"{name}: {each}" for each in used if each not in PUBLIC]
    assert private == []
