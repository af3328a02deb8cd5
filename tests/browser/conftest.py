"""A server, the demo's page over it, and a browser that looks at the page; all real, the model tiny."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from worldmodel.models.world_model import WorldModel

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Playwright's own Chromium, or else the machine's.

    It ends with its module: while it is there, its event loop keeps other tests from running theirs.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        found = own if Path(own).exists() else next(filter(None, map(shutil.which, BROWSERS)), None)
        if found is None:
            pytest.skip("there is no Chromium; install one (`apt-get install chromium`)")
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(make_model: Callable[..., WorldModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a tiny model with the frames of the shapes world; its address."""
    uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed: worldmodel[serve]")
    from worldmodel.serving.app import create_app
    from worldmodel.serving.settings import ServerConfig
    from worldmodel.serving.worlds import WorldService

    config = ServerConfig("tiny", tmp_path_factory.mktemp("data"), requests_per_minute=60_000)
    app = create_app(WorldService(make_model(image_size=64)), config)
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server ended before it had begun"
            thread.join(0.05)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def demo(server: str) -> Iterator[str]:
    """The demo's page over the server; its address."""
    pytest.importorskip("gradio", reason="gradio is not installed: worldmodel[demo]")
    from worldmodel.demo import app, page

    blocks = app.build(server)
    yield page.launch(blocks, None, block=False)
    blocks.close(verbose=False)
