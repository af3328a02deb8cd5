"""Code blocks of the README and of the documentation, and the commands in them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").rglob("*.md")))
TUTORIAL = (README, *sorted((ROOT / "docs" / "tutorial").glob("*.md")))
"""Pages whose every command runs in the tests."""
HIDDEN = {".git", ".venv", ".cache", "runs", "outputs", "clips", "recordings", "build", "dist"}


@dataclass(frozen=True)
class Command:
    """A command of a page."""

    line: str
    """Without its comment, on one line."""
    shown: str
    """What the page says that it prints; empty if it says nothing."""


def blocks(language: str, page: Path) -> list[str]:
    """Return the code blocks of one language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[Command]:
    """Return the commands of a page in their order.

    Every line of a `bash` block is one. In a `console` block they begin with `$`, and their output follows.
    """
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    found: list[Command] = []
    for kind, block in re.findall(r"^```(bash|console)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        entries = block.splitlines() if kind == "bash" else re.split(r"^\$ ", block, flags=re.MULTILINE)
        for entry in filter(str.strip, entries):
            line, _, shown = entry.partition("\n")
            found.append(Command(re.sub(r"\s+#.*$", "", line).strip(), shown.strip()))
    return found


def like_the_clone(folder: Path) -> Path:
    """Fill a folder with links to what is in the clone, so that commands write nothing into it."""
    for path in ROOT.iterdir():
        if path.name not in HIDDEN:
            (folder / path.name).symlink_to(path)
    return folder
