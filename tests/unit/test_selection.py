"""Long tests are left out only while the files that they cover are as they were when these tests passed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from covers import COVERS, EVERYTHING
from selection import ROOT, Fingerprints, Passed, covers_of

TABLE = {"tests/test_demo.py": ("demo",), "tests/other": ("library/one.py", "library/", "docs")}
TEST = """
import pytest

def test_quick():
    pass

@pytest.mark.slow
def test_long():
    assert {passes}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with two folders of code, whose test files use this mechanism."""
    files = {
        "pyproject.toml": '[project]\ndependencies = ["torch==1"]\noptional-dependencies = {}\n'
        '[tool.pytest.ini_options]\ntestpaths = ["tests"]\npythonpath = ["tests/shared"]\n'
        'markers = ["slow", "gpu"]\n'
        'addopts = ["--import-mode=importlib", "-p", "no:cacheprovider"]\n',
        "demo/page.py": "print(1)\n",
        "library/one.py": "print(2)\n",
        "library/two.py": "print(3)\n",
        "tests/conftest.py": 'pytest_plugins = ["long_tests"]\n',
        "tests/test_demo.py": TEST.format(passes=True),
        "tests/other/test_one.py": "import helper\n" + TEST.format(passes=True),
        "tests/shared/covers.py": f'EVERYTHING = ("demo", "library")\nCOVERS = {TABLE!r}\n',
        "tests/shared/helper.py": 'PROGRAM = "program.py"\n',
        "tests/shared/program.py": "",
        "tests/shared/strange.py": "",
        "docs/page.md": "Prose.\n\n```bash\ncommand\n```\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for module in ("selection.py", "long_tests.py"):
        shutil.copy(ROOT / "tests/shared" / module, tmp_path / "tests/shared" / module)
    return tmp_path


def run(project: Path, *arguments: str) -> tuple[dict[str, int], str]:
    """Run the project's tests; return how many passed, failed and were deselected, and the output."""
    command = [sys.executable, "-m", "pytest", "-p", "xdist", *arguments]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    out = subprocess.run(command, cwd=project, env=alone, capture_output=True, text=True, timeout=120).stdout
    return {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|deselected)", out)}, out


def change(path: Path) -> None:
    path.write_text(path.read_text() + "# changed\n")


def test_a_change_runs_the_long_tests_that_cover_it(project: Path) -> None:
    assert run(project, "--only-changed")[0] == {"passed": 4}, "nothing is recorded yet"
    assert not (project / "tests/passed.json").exists()
    assert run(project, "--record-passed")[0] == {"passed": 4}
    assert set(json.loads((project / "tests/passed.json").read_text())) == {
        "tests/test_demo.py",
        "tests/other/test_one.py",
    }
    assert run(project, "--only-changed")[0] == {"passed": 2, "deselected": 2}

    change(project / "demo/page.py")
    counts, out = run(project, "--only-changed", "--numprocesses", "1")
    assert counts["passed"] == 3
    assert "1 long tests left out" in out
    assert "tests/other/test_one.py: passed with the same library/one.py, library/, docs (1)" in out


def test_a_test_that_fails_is_no_longer_recorded(project: Path) -> None:
    run(project, "--record-passed")
    (project / "tests/test_demo.py").write_text(TEST.format(passes=False))
    counts, _ = run(project, "--record-passed")
    assert (counts["passed"], counts["failed"]) == (3, 1)
    assert set(json.loads((project / "tests/passed.json").read_text())) == {"tests/other/test_one.py"}
    assert run(project, "--record-passed", "-k", "demo")[0] == {}, "part of a file proves nothing"


def test_the_hash_depends_on_contents_only(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    def hash_of(test: str, root: Path = project) -> str:
        return Fingerprints(root, TABLE)(test)

    before = hash_of("tests/other/test_one.py")
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(project, elsewhere, copy_function=shutil.copy)
    assert hash_of("tests/other/test_one.py", elsewhere) == before
    (project / "library/__pycache__").mkdir()
    (project / "library/__pycache__/one.pyc").write_bytes(b"1")
    change(project / "library/two.py")
    change(project / "demo/page.py")
    change(project / "pyproject.toml")  # a comment
    change(project / "docs/page.md")  # prose
    change(project / "tests/shared/strange.py")
    change(project / "tests/shared/covers.py")  # a comment
    assert hash_of("tests/other/test_one.py") == before

    seen = {before}
    for name in ("library/one.py", "tests/other/test_one.py", "tests/conftest.py"):
        change(project / name)
        seen.add(hash_of("tests/other/test_one.py"))
    for name in ("helper.py", "program.py"):  # one is imported, the other is named by that one
        change(project / "tests/shared" / name)
        seen.add(hash_of("tests/other/test_one.py"))
    for name, old, new in (("pyproject.toml", "torch==1", "torch==2"), ("docs/page.md", "command", "other")):
        text = (project / name).read_text()
        (project / name).write_text(text.replace(old, new))
        seen.add(hash_of("tests/other/test_one.py"))
    (project / "library/three.py").write_text("")  # of this folder, names count
    seen.add(hash_of("tests/other/test_one.py"))
    assert len(seen) == 9


def test_what_is_unclear_runs(project: Path) -> None:
    test = "tests/test_demo.py"
    run(project, "--record-passed")
    assert Passed(project, TABLE).unchanged(test)
    assert not Passed(project, {test: ("demo", "gone")}).unchanged(test)
    assert not Passed(project, TABLE).unchanged("tests/test_gone.py")
    (project / "tests/passed.json").write_text("{")
    assert not Passed(project, TABLE).unchanged(test)
    (project / "tests/passed.json").write_text("[]")
    assert not Passed(project, TABLE).unchanged(test)

    script = [sys.executable, "tests/shared/selection.py", test]
    assert subprocess.run(script, cwd=project, timeout=60).returncode == 1
    run(project, "--record-passed")
    assert subprocess.run(script, cwd=project, timeout=60).returncode == 0
    (project / "tests/test_quick.py").write_text("def test_quick():\n    pass\n")
    script.append("tests/test_quick.py")  # it has no long tests, so nothing is recorded of it
    assert subprocess.run(script, cwd=project, timeout=60).returncode == 0


def test_what_long_tests_cover_exists() -> None:
    tests = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    folders = {parent.as_posix() for test in tests for parent in Path(test).parents}
    assert [name for name in COVERS if name not in tests | folders] == []
    paths = {*EVERYTHING, *(path for paths in COVERS.values() for path in paths)}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_the_nearest_entry_counts() -> None:
    table = {"tests/serving": ("serving",), "tests/serving/test_pan.py": ("worldmodel",)}
    assert covers_of("tests/serving/test_pan.py", table) == ("worldmodel",)
    assert covers_of("tests/serving/test_http.py", table) == ("serving",)
    assert covers_of("tests/unit/test_http.py", table) == EVERYTHING
