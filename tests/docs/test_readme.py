"""The code of the README and of the tutorial runs as written."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from worldmodel.cli import main
from worldmodel.media import open_video

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").rglob("*.md")))


def blocks(language: str, page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Every distinct command, those that record and read own clips last."""
    lines = [
        line.split("#")[0].strip()
        for page in PAGES
        for block in blocks("bash", page)
        for line in block.splitlines()
    ]
    found = dict.fromkeys(line for line in lines if line.startswith(("worldmodel ", "python -m ")))
    return sorted(found, key=lambda line: line in blocks_of_own_clips() or " clips" in line)


def blocks_of_own_clips() -> list[str]:
    (block,) = [block for block in blocks("bash", README) if " record " in block]
    return block.strip().splitlines()


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the clone to the README's paths."""
    shutil.copytree(ROOT / "demo", tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks("python", page)], ids=lambda page: page.stem
)
def test_python_blocks_run_one_after_the_other(page: Path, clone: Path) -> None:
    names: dict[str, object] = {}
    for code in blocks("python", page):
        exec(compile(code, page.name, "exec"), names)


OWN = next(index for index, command in enumerate(commands()) if " record " in command)
"""Start of the commands that need the output of the one before."""


def run(command: str) -> None:
    # Few samples and steps: the command is tested, not its figures.
    words = shlex.split(re.sub(r"--num-samples \d+", "--num-samples 4", command))
    words = [re.sub(r"(steps|batch_size)=\d+", r"\1=2", word) for word in words]
    words = [
        "2" if before in ("--rounds", "--episodes") else word
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
def test_the_clients_of_a_running_server(clone: Path) -> None:
    pytest.importorskip("fastapi")
    from worldmodel.demo.app import served
    from worldmodel.serving.client import Client

    page = ROOT / "docs" / "tutorial" / "serve.md"
    (code,), (script,) = blocks("py", page), blocks("sh", page)
    with served("shapes-tiny") as url:
        exec(compile(code.replace("http://127.0.0.1:8000", url), "serve.md", "exec"), {})
        with Client(url) as client:
            assert client.worlds.list() == []  # the example leaves none behind
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        subprocess.run(["bash", "-euc", script.replace("localhost:8000", url)], check=True)
    with open_video("video.mp4") as video:
        assert len(video.read(64, None, 100)) == 8


def test_pages_have_code_blocks() -> None:
    assert sum(len(blocks("python", page)) for page in PAGES) >= 4
    assert len(commands()) >= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_point_at_files(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (page.parent / link).exists(), link
