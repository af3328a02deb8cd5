"""A server of a tiny model, the page of the demo, and a browser."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from worldmodel.models.world_model import WorldModel

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Playwright's Chromium, or else that of the system.

    Its scope is the module, because its event loop prevents other tests from running theirs.
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        found = own if Path(own).exists() else next(filter(None, map(shutil.which, BROWSERS)), None)
        if found is None:
            pytest.skip("Chromium is not installed (`apt-get install chromium`)")
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(make_model: Callable[..., WorldModel], serve: Callable[..., str]) -> str:
    """The address of a server of a tiny model with the frames and start images of the shapes world."""
    model = make_model(image_size=64, world="shapes", outcomes=True)
    assert model.state is not None and model.state.outcome is not None
    model.state.outcome.out.bias[-1] = -10  # its random weights end an episode at any time
    return serve(model, requests_per_minute=60_000)


@pytest.fixture(scope="module")
def demo(server: str) -> Iterator[str]:
    """The address of the demo's page."""
    pytest.importorskip("gradio", reason="gradio is not installed: openworldmodel[demo]")
    from worldmodel.demo import app, page

    blocks = app.build(server, world="shapes")
    yield page.launch(blocks, None)
    blocks.close(verbose=False)
