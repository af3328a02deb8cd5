"""The runner of benchmarks/."""

import re
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CITED = r"benchmarks/(\w+)\.py([^`]*`[^`]{0,20})"
SCRIPTS = {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_it_lists_every_script() -> None:
    listed = run("--list")
    assert listed.returncode == 0
    assert {line.split()[0] for line in listed.stdout.splitlines()} == SCRIPTS
    assert all(len(line.split()) > 3 for line in listed.stdout.splitlines()), "each says what it measures"


def test_an_unknown_name_is_an_error() -> None:
    unknown = run("no-such-benchmark")
    assert unknown.returncode == 2
    assert "no-such-benchmark" in unknown.stderr and "server" in unknown.stderr


def test_arguments_reach_the_script() -> None:
    shown = run("flow", "--help")
    assert shown.returncode == 0
    assert "--kilobytes-s" in shown.stdout


def test_every_script_is_behind_a_published_figure() -> None:
    table = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", table, re.MULTILINE)
    assert {name for name, _ in rows} == SCRIPTS
    for name, where in rows:
        pages = re.findall(r"docs/[\w/-]+\.md", where)
        assert pages and all((ROOT / page).is_file() for page in pages), name
        assert any(name in (ROOT / page).read_text(encoding="utf-8") for page in pages), name


def test_pages_name_scripts_that_exist_or_the_commit_that_had_them() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "docs").rglob("*.md")
        for name, rest in re.findall(CITED, path.read_text(encoding="utf-8"))
        if name not in SCRIPTS and "of commit" not in " ".join(rest.split())
    ]
    assert not wrong


def test_a_soak_is_judged_by_its_errors_and_the_slope_of_its_memory() -> None:
    pytest.importorskip("fastapi", reason="openworldmodel[serve] is not installed")
    server: Any = SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "server.py")))

    def record(*resident: float, **outcomes: int) -> Any:
        made = server.Record(None, 600.0)  # a minute each part
        made.resident, made.outcomes = list(resident), Counter(outcomes)
        made.finished = [10] * server.PARTS
        return made

    level = record(400, *[800.0] * 10, **{"2xx": 100, "429": 3, "videos completed": 1})
    assert (round(level.slope_mib, 6), level.faults) == (0.0, [])
    assert "no errors, memory judged" in str(level)
    moment = record(400, *[800.0] * 8, 900, 800)
    assert moment.faults == []
    (grows,) = record(*range(400, 422, 2), **{"2xx": 100}).faults
    assert "2.00 MiB a minute" in grows
    (failed,) = record(*[800.0] * 11, **{"2xx": 100, "5xx": 2}).faults
    assert failed == "2 x 5xx"
