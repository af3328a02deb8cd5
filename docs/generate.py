"""mkdocs hook that generates reference pages from the code."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the placeholders of a page."""
    if "<!-- endpoints -->" in markdown:
        markdown = markdown.replace("<!-- endpoints -->", endpoints())
    if "<!-- command line -->" in markdown:
        markdown = markdown.replace("<!-- command line -->", command_line())
    return markdown


def endpoints() -> str:
    """Return a table of the server's endpoints, from its OpenAPI document."""
    from worldmodel import WorldModel
    from worldmodel.serving.app import create_app
    from worldmodel.serving.settings import ServerConfig
    from worldmodel.serving.worlds.service import WorldService

    with tempfile.TemporaryDirectory() as folder:
        service = WorldService(WorldModel.from_pretrained("shapes-tiny"))
        app = create_app(service, ServerConfig(model_name="shapes-tiny", data_dir=Path(folder)))
        paths = app.openapi()["paths"]
    rows = ["| Endpoint | Description |", "|---|---|"]
    for path, methods in sorted(paths.items()):
        for method, operation in methods.items():
            text = (operation.get("description") or operation.get("summary") or "").split("\n\n")[0]
            rows.append(f"| `{method.upper()} {path}` | {' '.join(text.split())} |")
    return "\n".join(rows)


def command_line() -> str:
    """Return the help of every verb."""
    run = [sys.executable, "-P", "-m", "worldmodel"]  # -P: the installed package, not the clone
    overview = subprocess.run([*run, "--help"], capture_output=True, text=True, check=True).stdout
    parts = [f"```text\n{overview}```\n"]
    listed = overview.split("verbs:", 1)[1].split("\n\n", 1)[0]
    for verb in (line.split()[0] for line in listed.splitlines() if line.strip()):
        shown = subprocess.run([*run, verb, "--help"], capture_output=True, text=True, check=True).stdout
        parts.append(f"## worldmodel {verb}\n\n```text\n{shown}```\n")
    return "\n".join(parts)
