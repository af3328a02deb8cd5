"""Which long tests may be left out: those whose covered files are as they were when these tests last passed.

`covers.py` says which files the long tests (marker `slow`) of a test file cover. `make test-all` writes
a hash of them into `tests/passed.json` for each test file whose long tests passed (`long_tests.py`).
`.ci/run` leaves out the long tests of files whose hash is the same; whatever is unclear (no entry, a path
that does not exist) runs.

As a script it answers for whole test files, before their environment is installed:
`python selection.py FILE...` exits with 0 if all may be left out.
"""

import hashlib
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from covers import COVERS, EVERYTHING

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs")
"""Where only the code blocks of Markdown count: long tests run these, and quick tests check the prose."""
USE = r"""\b(?:from|import|-m) +(?P<imported>\w+)|["'/](?P<run>\w+)(?:\.py|:)|\(["'](?P<loaded>\w+)["']\)"""
"""How code refers to a module: an import, a program, a function of it by name, or a plugin."""
MECHANISM = {"covers", "long_tests", "processor_time", "selection"}
"""Modules of tests/shared that choose and measure tests, on which no result depends."""


def covers_of(test: str, table: Mapping[str, tuple[str, ...]] = COVERS) -> tuple[str, ...]:
    """Return the paths that a test file covers: those of the nearest entry of the table, else everything."""
    for path in (test, *(parent.as_posix() for parent in Path(test).parents)):
        if path in table:
            return table[path]
    return EVERYTHING


class Fingerprints:
    """Hashes of what test files cover. Each file is read once."""

    def __init__(self, root: Path = ROOT, table: Mapping[str, tuple[str, ...]] = COVERS) -> None:
        self.root, self.table = root, table
        self.digests: dict[Path, bytes] = {}

    def __call__(self, test: str) -> str:
        """Return the hash of a test file, its fixtures and helpers, the dependencies, and what it covers.

        It depends on names and contents only, not on times, the machine, or the order of a directory.

        Raises:
            OSError: If a path does not exist or cannot be read.
            ValueError: If pyproject.toml cannot be parsed.
        """
        parents = [parent for parent in Path(test).parents if parent.parts]
        fixtures = [self.root / parent / "conftest.py" for parent in parents]
        code = [self.root / test, *filter(Path.exists, fixtures)]
        covered = covers_of(test, self.table)
        named = {file for path in covered for file in self.files(self.root / path)}
        read = {file for path in covered if path[-1] != "/" for file in self.files(self.root / path)}
        read.update(code, self.helpers(code))
        found = hashlib.sha256(self.dependencies())
        for file in sorted(named | read, key=lambda file: file.relative_to(self.root).as_posix()):
            contents = self.digest(file) if file in read else b""
            found.update(file.relative_to(self.root).as_posix().encode() + b"\0" + contents)
        return found.hexdigest()[:32]

    def dependencies(self) -> bytes:
        """Return the requirements of pyproject.toml; its other settings do not count."""
        project = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return json.dumps(
            [project["dependencies"], project["optional-dependencies"]], sort_keys=True
        ).encode()

    def helpers(self, code: Iterable[Path]) -> set[Path]:
        """Return the modules of tests/shared that files use, and those that these use in turn."""
        modules = {path.stem: path for path in (self.root / "tests" / "shared").glob("*.py")}
        found: set[Path] = set()
        left = list(code)
        while left:
            uses = re.finditer(USE, left.pop().read_text(encoding="utf-8"))
            names = {use[use.lastgroup or 0] for use in uses} - MECHANISM
            used = {modules[name] for name in names & modules.keys()} - found
            found |= used
            left += used
        return found

    def digest(self, file: Path) -> bytes:
        if file not in self.digests:
            contents = file.read_bytes()
            if file.suffix == ".md" and file.relative_to(self.root).parts[0] in PAGES:
                contents = b"".join(re.findall(rb"^ *```.*?^ *```", contents, flags=re.DOTALL | re.MULTILINE))
            self.digests[file] = hashlib.sha256(contents).digest()
        return self.digests[file]

    def files(self, path: Path) -> Iterator[Path]:
        """Yield the file, or those of the folder, except hidden ones, bytecode and links to folders."""
        if not path.is_dir():
            path.stat()  # raises if there is no such file
            yield path
            return
        for folder, subfolders, names in os.walk(path):
            subfolders[:] = [
                name for name in subfolders if name != "__pycache__" and not name.startswith(".")
            ]
            yield from (Path(folder, name) for name in names if not name.startswith("."))


class Passed:
    """`tests/passed.json`: the hash of each test file at the time when its long tests last passed."""

    def __init__(self, root: Path = ROOT, table: Mapping[str, tuple[str, ...]] = COVERS) -> None:
        self.path = root / "tests" / "passed.json"
        self.fingerprints = partial(Fingerprints, root, table)
        self.current = self.fingerprints()

    def read(self) -> dict[str, str]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def unchanged(self, test: str) -> bool:
        """Return whether nothing that a test file covers has changed since its long tests passed."""
        try:
            return self.current(test) == self.read().get(test)
        except (OSError, ValueError, KeyError):
            return False

    def write(self, passed: set[str], failed: set[str]) -> None:
        """Store the hashes of files that passed and were not edited meanwhile; drop those that failed."""
        now, stored = self.fingerprints(), self.read()
        for test in failed:
            stored.pop(test, None)
        for test in passed - failed:
            if self.current(test) == now(test):
                stored[test] = now(test)
        stored = {
            test: value for test, value in sorted(stored.items()) if (self.path.parents[1] / test).exists()
        }
        self.path.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def reason(test: str) -> str:
    """Say why the long tests of a file are left out."""
    return f"{test}: passed with the same {', '.join(covers_of(test))}"


def main(tests: list[str]) -> int:
    """Say why all these files may be left out, or return 1; what has no long tests runs elsewhere anyway."""
    passed = Passed()
    tests = [test for test in tests if "mark.slow" in (ROOT / test).read_text(encoding="utf-8")]
    if not tests or not all(map(passed.unchanged, tests)):
        return 1
    print(*map(reason, tests), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
