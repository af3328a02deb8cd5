"""The tutorial on learning in a world runs as written, with few episodes and steps."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from worldmodel.cli import main

for package in ("minigrid", "stable_baselines3"):
    pytest.importorskip(package)
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial" / "imagination.md"
SMALL = {
    "--episodes": ["6"],
    "--max-steps": ["8"],
    "--workers": ["0"],
    "--model": ["minigrid-doorkey"],
    "--steps": ["64"],
    "--model-free": ["64", "2048"],
    "--plans": ["0"],
}


def small(words: list[str]) -> list[str]:
    """Replace the values of options that take long."""
    made: list[str] = []
    replaced = False
    for word in words:
        if word.startswith("--"):
            replaced = word in SMALL
            made += [word, *SMALL.get(word, [])]
        elif not replaced:
            made.append(word)
    return made


@pytest.mark.slow
def test_commands_of_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    programs = []
    for line in re.findall(r"^\$ (.*)$", text, flags=re.MULTILINE):
        program, *words = small(shlex.split(line, comments=True))
        if program == "worldmodel":
            assert main(words) == 0
        if program == "python":
            script, *options = words
            command = [sys.executable, "-P", str(ROOT / script), *options, "--episodes", "2"]
            made = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900).stdout
            rows = re.findall(r"^(.+?), ([\d,]+) steps +(\d\.\d+) \+- .* of 2$", made, flags=re.MULTILINE)
            assert [row[0] for row in rows] == ["PPO in the model", *["PPO in the real game"] * 2]
            assert [int(row[1].replace(",", "")) for row in rows] == [1024, 1024, 2048]
            assert all(0 <= float(row[2]) <= 1 for row in rows)
        programs.append(program)
    assert programs == ["pip", "worldmodel", "worldmodel", "python"]
