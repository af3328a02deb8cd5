"""What the pages on sharing and troubleshooting say is true of the source."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from doc_pages import ROOT, blocks

from worldmodel.models.world_model import WorldModel

SOURCES = ("worldmodel", "train", "serving", "demo")


def source_text() -> str:
    """Return the strings of the source as they are printed: pieces joined, placeholders as an ellipsis."""
    files = {path.resolve() for folder in SOURCES for path in (ROOT / folder).rglob("*.py")}
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(files))
    joined = re.sub(r'"\s*\n\s*(?:f?)"', "", text)
    return re.sub(r"\{[^{}]*\}", "…", joined)


def messages() -> list[str]:
    page = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^- `(.+?)`  $", page, flags=re.MULTILINE)


def test_messages_of_the_troubleshooting_page_are_in_the_source() -> None:
    text = source_text()
    assert len(messages()) >= 12
    for message in messages():
        for part in message.removeprefix("error: ").split("…"):
            part = part.strip()
            assert part in text, f"{part!r} of {message!r} is not in the source"


def test_a_model_is_shared_as_the_page_says(
    model: WorldModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: dict[str, str] = {}

    class Api:
        def __init__(self, token: str | None = None) -> None: ...

        def create_repo(self, repo_id: str, **_: Any) -> Any:
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, repo_id: str, folder_path: Path, **_: Any) -> str:
            pushed[repo_id] = (folder_path / "README.md").read_text(encoding="utf-8")
            return "https://hub/commit"

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("runs/mine/model")
    (code,) = blocks("py", ROOT / "docs" / "how-to" / "share.md")
    exec(compile(code, "share.md", "exec"), {})
    assert list(pushed) == ["someone/flappy-world"] and "worldmodel" in pushed["someone/flappy-world"]


def test_every_page_is_in_the_navigation() -> None:
    """So that previous and next lead through all of them."""

    class Loader(yaml.SafeLoader): ...

    Loader.add_multi_constructor("tag:", lambda *_: None)
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    listed = set(re.findall(r"[\w/.-]+\.md", json.dumps(config["nav"])))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert listed == pages
    assert "navigation.footer" in config["theme"]["features"]
