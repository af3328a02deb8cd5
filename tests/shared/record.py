"""Run the long tests of each file in a process of its own, and store what those that pass read.

`python tests/shared/record.py [FILE...] [OPTION...]` writes `tests/passed.json`. Without files, it runs
all. Options go to pytest. A process of its own, because a module counts for the tests that import it,
and Python imports it once.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from selection import MECHANISM, ROOT, Passed, has_long_tests

WEIGHTS = (".safetensors", ".gguf")


def listed(root: Path) -> set[str]:
    """Return the files of a repository, except those that git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return set(filter(None, found.split("\0")))


def paths_of(notes: Iterable[str], root: Path, files: set[str]) -> set[str]:
    """Return the files and folders of the repository that processes noted."""
    root = root.resolve()
    found = set()
    for line in notes:
        folder, name = os.path.split(line)
        if name.endswith(".pyc"):  # of `a.py`, or of the test file `a.py`
            name, folder = f"{name.partition('.')[0]}.py", folder.removesuffix("__pycache__")
        path = Path(folder).resolve() / name  # parts of the package are links
        if not path.is_relative_to(root):
            continue
        relative = path.relative_to(root).as_posix()
        if name and relative in files:
            found.add(relative)
        # Python and pytest list folders only to find modules and tests.
        elif not name and relative != "." and Path(relative).parts[0] != "tests":
            found.update([f"{relative}/"] if any(file.startswith(f"{relative}/") for file in files) else [])
    # Libraries read weights and tokenizers without Python: where a config is read, the whole model counts.
    for config in [path for path in found if path.endswith("/config.json")]:
        model = {file for file in files if file.startswith(config.removesuffix("config.json"))}
        if any(file.endswith(WEIGHTS) for file in model):
            found |= model
    return found - set(MECHANISM)


class Recorder:
    """Runs the long tests of one file after another; usable in several threads."""

    def __init__(self, options: list[str], root: Path = ROOT) -> None:
        self.options, self.root = options, root
        self.passed, self.files = Passed(root), listed(root)
        self.lock = threading.Lock()

    def __call__(self, test: str) -> bool:
        """Run the long tests of a file and store what they read; return whether none failed."""
        started = time.time()
        with tempfile.TemporaryDirectory(prefix="reading-") as name:
            folder = Path(name)
            shutil.copy(Path(__file__).with_name("reading.py"), folder / "sitecustomize.py")
            (folder / "root").write_text(str(self.root), encoding="utf-8")
            (folder / "read").touch()
            path = os.pathsep.join(filter(None, [name, os.environ.get("PYTHONPATH")]))
            coverage = self.root / ".cache" / f"long.{test.replace('/', '.')}"
            options = ["-m", "slow", "--record-passed", str(folder / "outcome"), *self.options]
            run = subprocess.run(
                [sys.executable, "-m", "pytest", test, *options],
                cwd=self.root,
                env=os.environ | {"PYTHONPATH": path, "COVERAGE_FILE": str(coverage)},
                capture_output=True,
                text=True,
                check=False,
            )
            outcome = folder / "outcome"
            passed = outcome.exists() and outcome.read_text(encoding="utf-8") == "passed"
            notes = (folder / "read").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        paths = paths_of(notes, self.root, self.files)
        assert not passed or test in paths, f"what the processes of {test} read was not noted"
        with self.lock:
            summary = (run.stdout.splitlines() or [f"exit {run.returncode}"])[-1].strip("= ")
            print(f"{test}: {summary}; {len(paths)} files", flush=True)
            if run.returncode not in (0, 5):  # 5: no long tests, or their package is not installed
                print(run.stdout, run.stderr, flush=True)
                self.passed.write(test, None)
            # What is edited while the tests run has not passed.
            elif passed and all((self.root / file).stat().st_mtime <= started for file in paths):
                self.passed.write(test, paths)
        return run.returncode in (0, 5)


def main(arguments: list[str]) -> int:
    tests = [argument for argument in arguments if argument.endswith(".py")]
    if not tests:
        every = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
        tests = list(filter(has_long_tests, every))
    recorder = Recorder([argument for argument in arguments if not argument.endswith(".py")])
    with ThreadPoolExecutor((os.cpu_count() or 1) + 1) as pool:  # many tests wait, as in the Makefile
        results = dict(zip(tests, pool.map(recorder, tests), strict=True))
    failed = [test for test, passed in results.items() if not passed]
    print(f"{len(tests) - len(failed)} files passed, {len(failed)} failed", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
