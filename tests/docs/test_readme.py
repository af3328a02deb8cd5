"""The Python code of the README and of the documentation runs as written, and links point at files."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from doc_pages import PAGES, ROOT, blocks, like_the_clone

from worldmodel.actions import registry
from worldmodel.media import open_video


@pytest.fixture(autouse=True)
def kinds_of_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that registers a kind of action does so for itself alone."""
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks("python", page)], ids=lambda page: page.stem
)
def test_python_blocks_run_one_after_the_other(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a page shows in quotes beside a `print` is what it prints."""
    monkeypatch.chdir(like_the_clone(tmp_path))
    names: dict[str, object] = {}
    for code in blocks("python", page):
        exec(compile(code, page.name, "exec"), names)
    printed = iter(capsys.readouterr().out.splitlines())
    shown = re.findall(r'^ *print\(.*\)  # "(.+)"$', "".join(blocks("python", page)), flags=re.MULTILINE)
    for line in shown:
        assert line in printed, f"{line!r} is not printed, or not in this order"


@pytest.mark.slow
def test_the_clients_of_a_running_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    from worldmodel.demo.local_server import served
    from worldmodel.serving.client import Client

    monkeypatch.chdir(like_the_clone(tmp_path))
    page = ROOT / "docs" / "tutorial" / "serve.md"
    (code,), (script,) = blocks("py", page), blocks("sh", page)
    with served("shapes-tiny") as server:
        url = server.url
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_point_at_files(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (page.parent / link).exists(), link
