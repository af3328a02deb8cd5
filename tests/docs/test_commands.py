"""The commands of the README and of the documentation run from the clone's root and print what is shown."""

import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from doc_pages import PAGES, README, ROOT, TUTORIAL, Command, blocks, commands, like_the_clone

from worldmodel.cli import main
from worldmodel.train.run import settings

BIN = Path(sys.executable).parent
INSTALLS = ("git clone ", "cd ", "python3.11 -m venv ", "pip install ")
"""Tested by tests/packaging."""
OWN_TEST = {"own-world.md", "imagination.md", "evening.md"}
"""Pages whose commands take hours as written, and whose results have tests of their own."""
PLAYED = [page for page in TUTORIAL if commands(page) and page.name not in OWN_TEST]
TARGETS = ("demo", "train-tiny")
"""Targets of `make` whose recipe runs commands of the package alone."""
FEWER = {"--episodes": "8", "--max-steps": "8", "--workers": "0", "--num-samples": "4", "--rounds": "2"}
"""Values in place of a page's own, where those take minutes."""
MORE = {"publish": ["--num-samples", "4", "--rounds", "2"], "eval --data": ["--inverse-dynamics-steps", "2"]}
"""Options that shorten commands which do without them on the pages."""


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of the clone, as a folder of its own."""
    monkeypatch.chdir(like_the_clone(tmp_path))
    return tmp_path


def shortened(words: Sequence[str]) -> list[str]:
    """Return the words of `worldmodel` with fewer samples and steps."""
    made = [FEWER.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    if made[0] == "train":
        return ["train", *short_training(made[1:])]
    verb = "eval --data" if made[0] == "eval" and "--data" in made else made[0]
    return made + MORE.get(verb, [])


def short_training(words: Sequence[str]) -> list[str]:
    """Return the config and overrides of a training with two steps of two episodes in every stage."""
    config = settings.load(words[0], words[1:])
    steps = [f"stages.{name}.{key}=2" for name in config.stages for key in ("steps", "batch_size")]
    validation = ["validation.every=2", "validation.batches=1"] if config.validation.source else []
    return [*words, *steps, *validation, "checkpoint_every=2", "precision=fp32"]


def run(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a command of a page and compare what it prints with what the page shows."""
    program, *words = shlex.split(command.line)
    # Nothing that changes the environment of the tests, which a page could ask for by pip or make.
    assert program in ("worldmodel", "torchrun") or (program == "make" and words[0] in TARGETS), command.line
    if program == "make":
        expanded = ["make", "--no-print-directory", "--dry-run", "--old-file", ".venv/ready", *words]
        recipe = subprocess.run(expanded, check=True, capture_output=True, text=True).stdout
        for line in recipe.splitlines():
            run(Command(line.replace(".venv/bin/", "").removeprefix("@"), ""), capsys)
        return
    if program == "worldmodel" and words[0] in ("serve", "demo"):
        start_and_stop(words)
        return
    capsys.readouterr()
    if program == "worldmodel":
        assert main(shortened(words)) == 0, capsys.readouterr().err
        printed = capsys.readouterr().out
    else:
        if "worldmodel.train.finetune" in words:
            split = words.index("worldmodel.train.finetune") + 1
            words = [*words[:split], *short_training(words[split:])]
        printed = subprocess.run(
            [BIN / program, *words], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
    if command.shown:
        expected = ".*".join(map(re.escape, re.split("…", command.shown)))
        assert re.fullmatch(expected, printed.strip(), flags=re.DOTALL), printed


def start_and_stop(words: Sequence[str]) -> None:
    """Start a server of a page on a free port, wait until it answers, and stop it as Ctrl-C does."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/{'health' if words[0] == 'serve' else ''}"
    server = subprocess.Popen([BIN / "worldmodel", *words, "--port", str(port)])
    try:
        until = time.monotonic() + 600
        while True:
            assert server.poll() is None, "it ended"
            assert time.monotonic() < until, "it does not answer"
            try:
                assert urllib.request.urlopen(url, timeout=10).status == 200
                break
            except OSError:
                time.sleep(0.2)
        server.send_signal(signal.SIGINT)
        assert server.wait(60) in (0, 130)
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in TUTORIAL if commands(page) and page.name not in OWN_TEST],
    ids=lambda page: page.stem,
)
def test_commands_of_the_readme_and_the_tutorial(
    page: Path, clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if page == README:
        pytest.importorskip("minigrid", reason="minigrid is not installed: openworldmodel[dev]")
    if page.name == "fine-tune.md":  # "copy the config and change these keys"
        values = yaml.safe_load((ROOT / "configs" / "own_clips.yaml").read_text(encoding="utf-8"))
        values |= yaml.safe_load(blocks("yaml", page)[0])
        (clone / "mine.yaml").write_text(yaml.safe_dump(values))
    for command in commands(page):
        if not command.line.startswith(INSTALLS):
            run(command, capsys)


OTHERS = {
    command.line: command
    for page in PAGES
    if page not in TUTORIAL
    for block in blocks("bash", page)
    for command in commands(page)
    if command.line in block and command.line.startswith("worldmodel ")
}


@pytest.mark.slow
@pytest.mark.parametrize("line", sorted(OTHERS))
def test_commands_of_other_pages(line: str, clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if " clips" in line:
        run(Command("worldmodel record shapes --out clips --episodes 24", ""), capsys)
    run(OTHERS[line], capsys)


def test_pages_have_commands() -> None:
    assert len({command.line for page in TUTORIAL for command in commands(page)}) >= 25
    assert len(OTHERS) >= 3
    assert [command.shown for page in TUTORIAL for command in commands(page) if command.shown]
