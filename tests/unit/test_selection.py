"""Long tests are left out only while the files that they read are as they were when these tests passed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from record import paths_of
from selection import ALSO, ROOT, Fingerprints, Passed

TEST = """
import pytest

def test_quick():
    pass

@pytest.mark.slow
def test_long():
    import library.one
    assert {passes}
"""
DEMO = """
import os
import subprocess
import sys
from pathlib import Path

import pytest

@pytest.mark.slow
def test_what_processes_read():
    code = "import os; import library.two; print(os.listdir('configs'), open('docs/page.md').read())"
    path = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    subprocess.run([sys.executable, "-c", code], check=True, env=path, cwd=Path(__file__).parents[1])
    subprocess.run(["cat", Path(__file__).parents[1] / "demo" / "page.js"], check=True)
"""
ONE, READS = "tests/other/test_one.py", "tests/test_reads.py"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with two folders of code, whose test files use this mechanism."""
    files = {
        "pyproject.toml": '[project]\ndependencies = ["torch==1"]\noptional-dependencies = {}\n'
        '[tool.pytest.ini_options]\ntestpaths = ["tests"]\npythonpath = ["tests/shared"]\n'
        'markers = ["slow", "gpu"]\n'
        'addopts = ["--import-mode=importlib", "-p", "no:cacheprovider"]\n',
        ".gitignore": "ignored.txt\n__pycache__\n",
        "demo/page.js": "1",
        "library/one.py": "import library.constants\n",
        "library/constants.py": "ONE = 1\n",
        "library/two.py": "print(3)\n",
        "library/three.py": "",
        "configs/tiny.yaml": "",
        "tests/conftest.py": 'pytest_plugins = ["long_tests"]\n',
        READS: DEMO,
        ONE: "import helper\n" + TEST.format(passes=True),
        "tests/test_quick.py": "def test_quick():\n    pass\n",
        "tests/shared/helper.py": "",
        "tests/shared/strange.py": "",
        "docs/page.md": "Prose.\n\n```bash\ncommand\n```\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for module in ("selection.py", "long_tests.py", "record.py", "reading.py"):
        shutil.copy(ROOT / "tests/shared" / module, tmp_path / "tests/shared" / module)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def start(project: Path, *command: str) -> subprocess.CompletedProcess[str]:
    path = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(project)}
    return subprocess.run(
        [sys.executable, *command],
        cwd=project,
        env=os.environ | path,
        capture_output=True,
        text=True,
        timeout=600,
    )


def run(project: Path, *arguments: str) -> tuple[dict[str, int], str]:
    """Run the project's tests; return how many passed, failed and were deselected, and the output."""
    out = start(project, "-m", "pytest", "-p", "xdist", "--only-changed", *arguments).stdout
    return {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|deselected)", out)}, out


def record(project: Path, *arguments: str) -> int:
    return start(project, "tests/shared/record.py", *arguments).returncode


def change(path: Path) -> None:
    path.write_text(path.read_text() + "# changed\n")
    os.utime(path, (0, 0))  # as if it had been long ago


def test_a_change_runs_the_long_tests_that_read_the_file(project: Path) -> None:
    assert run(project)[0] == {"passed": 4}, "nothing is recorded yet"
    assert not (project / "tests/passed.json").exists()
    assert record(project) == 0
    read = {test: set(paths) for test, (_, paths) in Passed(project).tests.items()}
    everywhere = {"pyproject.toml", "tests/conftest.py"}
    assert read == {
        ONE: everywhere | {ONE, "tests/shared/helper.py", "library/one.py", "library/constants.py"},
        READS: everywhere | {READS, "library/two.py", "configs/", "docs/page.md", "demo/page.js"},
    }
    assert run(project)[0] == {"passed": 2, "deselected": 2}

    for changed, test in (("library/constants.py", ONE), ("demo/page.js", READS)):
        change(project / changed)
        counts, out = run(project, "--numprocesses", "1")
        assert counts["passed"] == 3
        (other,) = {ONE, READS} - {test}
        assert "1 long tests left out" in out
        assert f"{other}: passed with the same {len(read[other])} files (1)" in out
        assert record(project, test) == 0


def test_a_test_that_fails_or_whose_files_are_edited_is_not_recorded(project: Path) -> None:
    assert record(project) == 0
    (project / ONE).write_text(TEST.format(passes=False))
    edits = "Path(__file__).parents[1].joinpath('library', 'two.py').touch()"
    (project / READS).write_text(f"{DEMO}    {edits}\n")
    assert record(project) == 1
    passed = Passed(project)
    assert ONE not in passed.tests and not passed.unchanged(READS)


def test_the_hash_depends_on_contents_only(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    def hash_now(root: Path = project) -> str:
        return Fingerprints(root)(["library/one.py", "library/", "docs/page.md", "configs"])

    before = hash_now()
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(project, elsewhere, copy_function=shutil.copy)
    assert hash_now(elsewhere) == before
    (project / "library/__pycache__").mkdir()
    (project / "library/__pycache__/one.pyc").write_bytes(b"1")
    change(project / "library/two.py")
    change(project / "pyproject.toml")  # a comment
    change(project / "docs/page.md")  # prose
    assert hash_now() == before

    seen = {before}
    for name in ("library/one.py", "configs/tiny.yaml"):
        change(project / name)
        seen.add(hash_now())
    for name, old, new in (("pyproject.toml", "torch==1", "torch==2"), ("docs/page.md", "command", "other")):
        text = (project / name).read_text()
        (project / name).write_text(text.replace(old, new))
        seen.add(hash_now())
    for name in ("library/four.py", "configs/other.yaml"):  # of the folder of code, names count
        (project / name).write_text("")
        seen.add(hash_now())
    assert len(seen) == 7


def test_what_is_unclear_runs(project: Path) -> None:
    record(project, ONE)
    assert Passed(project).unchanged(ONE)
    assert not Passed(project).unchanged("tests/test_gone.py")
    script = ["tests/shared/selection.py", ONE]
    assert start(project, *script).returncode == 0
    script.append("tests/test_quick.py")  # it has no long tests, so nothing is recorded of it
    assert start(project, *script).returncode == 0
    script.append(READS)
    assert start(project, *script).returncode == 1

    (project / "library/constants.py").rename(project / "library/others.py")
    assert not Passed(project).unchanged(ONE), "a file is gone"
    for text in ("{", "[]", json.dumps({"paths": [], "tests": {ONE: ["0", [0]]}})):
        (project / "tests/passed.json").write_text(text)
        assert not Passed(project).unchanged(ONE)


def test_weights_count_where_a_config_is_read(tmp_path: Path) -> None:
    files = {"models/a/config.json", "models/a/codec/model.safetensors", "models/b/config.json", "a.py"}
    (tmp_path / "part").mkdir()
    (tmp_path / "link").symlink_to("part")
    notes = [
        f"{tmp_path}/models/a/config.json",
        f"{tmp_path}/__pycache__/a.cpython-311.pyc",
        f"{tmp_path}/ignored.txt",
        f"{tmp_path}/link/b.py",
        f"{tmp_path}/",
        "/elsewhere/a.py",
    ]
    expected = {"models/a/config.json", "models/a/codec/model.safetensors", "a.py", "part/b.py"}
    assert paths_of(notes, tmp_path, files | {"part/b.py"}) == expected


def test_what_other_programs_read_exists() -> None:
    paths = {*ALSO, *(path for paths in ALSO.values() for path in paths)}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
