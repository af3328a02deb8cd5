"""Names of the distributions and of their extras, which are written in several places."""

import re
import subprocess
import tomllib
from pathlib import Path

import worldmodel
from worldmodel.errors import DISTRIBUTION, pip_install

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORLDS = tomllib.loads((ROOT / "pretrained" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEXTS = [
    path
    for folder in ("worldmodel", "train", "serving", "demo", "configs", "docs", "examples", "deploy", "tests")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".md", ".yaml") and path != Path(__file__)
]


def test_messages_and_metadata_name_the_same_distributions() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert pip_install("gym", "data") == f"pip install '{DISTRIBUTION}[gym,data]'"
    (worlds,) = PROJECT["optional-dependencies"]["worlds"]
    assert worlds == f"{WORLDS['name']}==0.1.*"
    assert WORLDS["version"].startswith("0.1.")
    assert worldmodel.__version__.startswith("0.1.")


def test_every_extra_that_is_named_exists() -> None:
    extras = set(PROJECT["optional-dependencies"])
    named: dict[str, Path] = {}
    for path in (ROOT / "README.md", ROOT / "pyproject.toml", *TEXTS):
        text = path.read_text(encoding="utf-8")
        for group in re.findall(rf"{DISTRIBUTION}\[([a-z0-9,-]+)\]", text):
            named |= dict.fromkeys(group.split(","), path)
        named |= dict.fromkeys(re.findall(r"pip_install\('([a-z0-9-]+)'\)", text), path)
    assert len(named) > 20
    assert {extra: path for extra, path in named.items() if extra not in extras} == {}


def test_nothing_is_installed_by_the_name_that_is_taken() -> None:
    """`pip install worldmodel` would bring nothing, or another project."""
    wrong = re.compile(r"pip install (-\S+ )*['\"]?worldmodel\b|\bworldmodel\[[a-z]")
    found = [path for path in (ROOT / "README.md", *TEXTS) if wrong.search(path.read_text(encoding="utf-8"))]
    assert found == []


def test_the_folders_beside_the_package_are_parts_of_it() -> None:
    for name in ("configs", "demo", "serving", "train"):
        link = ROOT / "worldmodel" / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / name
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-s", "worldmodel/train"], cwd=ROOT, capture_output=True)
        assert listed.stdout.startswith(b"120000"), "git must keep the link, not a copy"
