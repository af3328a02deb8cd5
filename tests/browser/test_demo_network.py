"""`worldmodel demo --host`: its key, a phone of the same network, and the gallery that changes the model."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from worldmodel.errors import ConfigError

pytestmark = pytest.mark.slow
PATIENCE_MS = 120_000
OWN = "runs/mine/model"


@pytest.fixture(scope="module")
def address(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address that the command prints, with a model of one's own in the folder where it runs."""
    pytest.importorskip("gradio", reason="gradio is not installed: openworldmodel[demo]")
    pytest.importorskip("segno", reason="segno is not installed: openworldmodel[demo]")
    folder = tmp_path_factory.mktemp("work")
    shutil.copytree(model_folder, folder / OWN)
    command = [sys.executable, "-P", "-m", "worldmodel", "demo", "minigrid-doorkey", "--host", "0.0.0.0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=folder, env=os.environ | {"COLUMNS": "200"}
    ) as demo:
        assert demo.stdout is not None
        try:
            printed = []
            for line in demo.stdout:
                printed.append(line)
                if line.startswith("Open "):
                    break
            found = re.search(r"http://[\d.]+:\d+/\?key=[\w-]{16,}", printed[-1])
            assert found is not None, printed
            code = [line for line in printed if "█" in line]
            assert len(code) >= 15, "the QR code is not printed"
            yield found[0]
        finally:
            demo.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                demo.wait(90)
            demo.kill()


def test_without_the_key_nothing_is_answered(address: str) -> None:
    page, _, key = address.partition("/?key=")
    with httpx.Client(base_url=page, trust_env=False) as client:
        for path in ("/", "/config", "/?key=", "/?key=" + "x" * 22, "/gradio_api/info", "/theme.css"):
            refused = client.get(path)
            assert refused.status_code == 401, path
            assert "needs its key" in refused.text
        assert client.post("/gradio_api/queue/join", json={}).status_code == 401
        client.cookies.set("worldmodel_key", "x" * 22)
        assert client.get("/").status_code == 401
        client.cookies.clear()
        opened = client.get(f"/?key={key}")
        assert (opened.status_code, opened.headers["location"]) == (303, "/")
        assert "HttpOnly" in opened.headers["set-cookie"]
        assert client.get("/").status_code == 200


def test_a_phone_plays_live_and_changes_the_world(browser: Any, address: str, tmp_path: Path) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    other = browser.new_context()
    try:
        page, neighbour = context.new_page(), other.new_page()
        for each in (page, neighbour):
            each.set_default_timeout(PATIENCE_MS)
            each.goto(address)
            each.wait_for_selector(".wm-tile")
            assert "key" not in each.url
        card = '.wm-card[data-name="{}"]'
        assert page.get_attribute(card.format("minigrid-doorkey"), "aria-pressed") == "true"
        assert {"shapes-tiny", "shapes-memory", OWN} <= {
            each.get_attribute("data-name") for each in page.locator(".wm-card").all()
        }
        assert "takes keys" in page.inner_text(card.format("minigrid-doorkey"))
        assert page.locator(card.format("shapes-tiny") + " img").count() == 1
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")

        # The frame comes from the server at the address by which the phone reached the page.
        page.get_by_role("tab", name="Play live").click()
        frame = page.frame_locator("#wm-live iframe")
        frame.locator("#tiles button").first.click()
        frame.locator("#pad button").first.click()
        frame.locator("#screen[data-frame]").wait_for()
        server = page.get_attribute("#wm-live iframe", "src") or ""
        refused = httpx.get(re.sub(r"/play.*", "/v1/models", server), trust_env=False)
        assert refused.status_code == 401

        neighbour.click(".wm-tile >> nth=0")
        neighbour.wait_for_selector("#wm-stage img")
        page.get_by_role("tab", name="Steer").click()
        page.click(card.format(OWN))
        page.wait_for_selector(card.format(OWN) + '[aria-pressed="true"]')
        page.wait_for_selector('.wm-tile[data-model="model"], .wm-none')

        # The world of the other visitor has ended, and the page says so.
        neighbour.click("#wm-undo, .wm-chip >> nth=0")
        said = neighbour.locator(".wm-note:visible").last
        said.wait_for()
        assert "changed to" in said.inner_text()
        assert neighbour.locator("#wm-play").is_hidden()
        assert neighbour.get_attribute(card.format(OWN), "aria-pressed") == "true"
    finally:
        context.close()
        other.close()


def test_a_world_that_cannot_be_loaded_leaves_the_one_before(model_folder: Path, tmp_path: Path) -> None:
    from worldmodel.demo.local_server import served
    from worldmodel.errors import ModelError

    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    for weights in broken.rglob("*.safetensors"):
        weights.unlink()
    with served(str(model_folder)) as server:
        before = httpx.get(f"{server.url}/v1/models", trust_env=False).json()
        with pytest.raises(ModelError):
            server.switch(str(broken))
        assert server.model == str(model_folder)
        assert (
            httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"][0]["id"]
            == (before["data"][0]["id"])
        )


def test_a_key_that_can_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from worldmodel.demo.access import KEY_VARIABLE, address_of, is_reachable, new_key

    assert new_key() != new_key()
    monkeypatch.setenv(KEY_VARIABLE, "a-key-of-mine-123")
    assert new_key() == "a-key-of-mine-123"
    for wrong in ("secret", "sixteen letters?"):
        monkeypatch.setenv(KEY_VARIABLE, wrong)
        with pytest.raises(ConfigError, match=KEY_VARIABLE):
            new_key()
    assert all(map(is_reachable, ("0.0.0.0", "::", "192.0.2.7")))
    assert not any(map(is_reachable, ("127.0.0.1", "::1", "localhost")))
    assert address_of("192.0.2.7", 7860, "k") == "http://192.0.2.7:7860/?key=k"
