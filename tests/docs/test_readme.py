"""The README's code runs as it stands."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from worldmodel.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith(("worldmodel ", "python -m "))]


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the clone to the README's paths."""
    shutil.copytree(ROOT / "demo", tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_blocks_run_one_after_the_other(clone: Path) -> None:
    names: dict[str, object] = {}
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), names)
    assert (clone / "outputs" / "out.mp4").stat().st_size > 1000


OWN = next(place for place, command in enumerate(commands()) if "record" in command)
"""Where the commands begin that need what the one before made."""


def run(command: str) -> None:
    # Figures with few samples and models after few steps say nothing, but the command takes the same road.
    words = shlex.split(re.sub(r"--num-samples \d+", "--num-samples 4", command))
    words = [re.sub(r"(steps|batch_size|num-clips)=\d+", r"\1=2", word) for word in words]
    words = [
        re.sub(r"^10$", "2", word) if before == "--rounds" else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    if words[0] == "python":
        subprocess.run([sys.executable, "-P", *words[1:]], check=True)
    else:
        assert main(words[1:]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", commands()[:OWN])
def test_commands_run(command: str, clone: Path) -> None:
    run(command)


@pytest.mark.slow
def test_training_on_own_clips(clone: Path) -> None:
    for command in commands()[OWN:]:
        run(command)
    assert list((clone / "outputs" / "own").iterdir())


@pytest.mark.slow
def test_the_client_of_a_running_server(clone: Path) -> None:
    pytest.importorskip("fastapi")
    from worldmodel.demo.app import served

    (code,) = blocks("py")
    with served("shapes-tiny") as url:
        exec(compile(code.replace("http://127.0.0.1:8000", url), "README.md", "exec"), {})


def test_there_is_something_to_run() -> None:
    assert len(blocks("python")) >= 2
    assert len(commands()) >= 6


def test_links_point_at_files() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    for link in links:
        assert link.startswith("https://") or (ROOT / link).exists(), link
