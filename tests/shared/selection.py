"""Which long tests may be left out: those that passed with the same files.

`make test-all` runs the long tests (marker `slow`) of each test file in a process of its own
(`record.py`). It stores in `tests/passed.json` what this process, and those that it started, read of
the repository (`reading.py`): modules, configs, pages, models, the tests themselves; and a hash of all
that. `.ci/run` leaves out the long tests of files whose hash is the same; whatever is unclear (no
entry, a path that does not exist) runs.

As a script it answers for whole test files, before their environment is installed: `python selection.py
FILE...` exits with 0 if all may be left out.
"""

import hashlib
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALSO: dict[str, tuple[str, ...]] = {
    "tests/docs/test_commands.py": ("Makefile",),
    "tests/docs/test_replicas_guide.py": ("deploy/replicas",),
    "tests/packaging/test_distributions.py": (
        *("worldmodel/", "train/", "serving/", "demo/", "configs/", "pretrained/"),
        *("pyproject.toml", "pretrained/pyproject.toml", "README.md", "LICENSE"),
        *("worldmodel/__init__.py", "worldmodel/__main__.py", "worldmodel/models/loading/location.py"),
    ),
}
"""What other programs read (make, nginx), and Python without our path (pip).

Of a folder that ends in `/`, only the names of its files count.
"""
PAGES = ("README.md", "docs")
"""Where only the code blocks of Markdown count: long tests run these, and quick tests check the prose."""
MECHANISM = tuple(
    f"tests/shared/{name}.py" for name in ("long_tests", "processor_time", "reading", "record", "selection")
)
"""What chooses and measures tests, on which no result depends."""


class Fingerprints:
    """Hashes of files and folders. Each file is read once."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.digests: dict[Path, bytes] = {}

    def __call__(self, paths: Iterable[str]) -> str:
        """Return the hash of files, of the names in folders that end in `/`, and of the dependencies.

        It depends on names and contents only, not on times, the machine, or the order of a directory.

        Raises:
            OSError: If a path does not exist or cannot be read.
            ValueError: If pyproject.toml cannot be parsed.
        """
        paths = list(paths)
        named = {file for path in paths for file in self.files(self.root / path)}
        read = {file for path in paths if path[-1] != "/" for file in self.files(self.root / path)}
        read.add(self.root / "pyproject.toml")
        found = hashlib.sha256()
        for file in sorted(named | read, key=lambda file: file.relative_to(self.root).as_posix()):
            contents = self.digest(file) if file in read else b""
            found.update(file.relative_to(self.root).as_posix().encode() + b"\0" + contents)
        return found.hexdigest()[:32]

    def digest(self, file: Path) -> bytes:
        if file not in self.digests:
            contents = file.read_bytes()
            if file == self.root / "pyproject.toml":  # of its settings, only the requirements count
                project = tomllib.loads(contents.decode())["project"]
                required = [project["dependencies"], project["optional-dependencies"]]
                contents = json.dumps(required, sort_keys=True).encode()
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
    """`tests/passed.json`: for each test file whose long tests passed, what they read, and the hash of that.

    The file lists each path once; those of a test file are positions in that list.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self.root, self.path = root, root / "tests" / "passed.json"
        self.hash_of = Fingerprints(root)
        self.tests: dict[str, tuple[str, list[str]]] = {}
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            paths = found["paths"]
            for test, (value, numbers) in found["tests"].items():
                self.tests[test] = value, [paths[number] for number in numbers]
        except (OSError, ValueError, LookupError, TypeError):
            self.tests = {}

    def unchanged(self, test: str) -> bool:
        """Return whether nothing that the long tests of a file read has changed since they passed."""
        try:
            value, paths = self.tests[test]
            return self.hash_of(paths) == value
        except (OSError, ValueError, KeyError):
            return False

    def reason(self, test: str) -> str:
        """Say why the long tests of a file are left out."""
        return f"{test}: passed with the same {len(self.tests[test][1])} files"

    def write(self, test: str, paths: Iterable[str] | None) -> None:
        """Store that the long tests of a file passed, and what they read, or that they did not pass."""
        self.tests.pop(test, None)
        if paths is not None:
            paths = sorted({*paths, *ALSO.get(test, ())})
            self.tests[test] = Fingerprints(self.root)(paths), paths
        kept = {test: self.tests[test] for test in sorted(self.tests) if (self.root / test).exists()}
        every = sorted({path for _, paths in kept.values() for path in paths})
        number = {path: index for index, path in enumerate(every)}
        lines = ",\n".join(
            f"  {json.dumps(test)}: {json.dumps([value, [number[path] for path in paths]])}"
            for test, (value, paths) in kept.items()
        )
        text = f'{{\n "paths": {json.dumps(every, indent=2)},\n "tests": {{\n{lines}\n }}\n}}\n'
        self.path.write_text(text, encoding="utf-8")


def has_long_tests(test: str, root: Path = ROOT) -> bool:
    """Return whether a test file may have long tests."""
    return "mark.slow" in (root / test).read_text(encoding="utf-8")


def main(tests: list[str]) -> int:
    """Say why all these files may be left out, or return 1; what has no long tests runs elsewhere anyway."""
    passed = Passed()
    tests = list(filter(has_long_tests, tests))
    if not tests or not all(map(passed.unchanged, tests)):
        return 1
    print(*map(passed.reason, tests), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
