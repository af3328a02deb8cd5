"""Authentication and limits of WebSockets, and the play page."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from local_client import LocalClient
from starlette.testclient import WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect

from worldmodel.models.world_model import WorldModel
from worldmodel.serving.app import create_app
from worldmodel.serving.auth import Keys
from worldmodel.serving.realtime.connection import ROUTE
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.worlds.service import WorldService

KEY = "a-key-for-these-tests"


@pytest.fixture
def make_client(model: WorldModel, tmp_path: Path) -> Iterator[Callable[..., LocalClient]]:
    contexts = []

    def make(*keys: str, max_upload_bytes: int = 1000, **config: Any) -> LocalClient:
        app = create_app(
            WorldService(model),
            ServerConfig(
                model_name="tiny",
                data_dir=tmp_path / str(len(contexts)),
                keys=Keys(keys),
                max_upload_bytes=max_upload_bytes,
                **config,
            ),
        )
        contexts.append(app.state.context)
        return LocalClient(app)

    yield make
    for context in contexts:
        context.compute.close()
        context.database.close()


@contextmanager
def rejected(client: LocalClient, status: int, code: str, **options: Any) -> Iterator[None]:
    with pytest.raises(WebSocketDenialResponse) as denial:
        client.websocket_connect(ROUTE, **options).__enter__()
    assert denial.value.status_code == status
    assert denial.value.json()["error"]["code"] == code
    yield


def test_websocket_requires_a_key(make_client: Callable[..., LocalClient]) -> None:
    client = make_client(KEY)
    for options in (
        {},
        {"headers": {"Authorization": "Bearer a-wrong-key-for-this"}},
        {"subprotocols": ["worldmodel.v1", "worldmodel.key.a-wrong-key-for-this"]},
        {"headers": {"Sec-WebSocket-Protocol": f"worldmodel.v1, {KEY}"}},
    ):
        with rejected(client, 401, "invalid_api_key", **options):
            pass
    with client.websocket_connect(ROUTE, headers={"Authorization": f"Bearer {KEY}"}) as socket:
        assert socket.receive_json()["type"] == "session.created"
    offers = ["worldmodel.v1", f"worldmodel.key.{KEY}"]
    with client.websocket_connect(ROUTE, subprotocols=offers) as socket:
        assert socket.accepted_subprotocol == "worldmodel.v1"
        assert socket.receive_json()["type"] == "session.created"


def test_websocket_rejects_cross_origin_requests_and_shutdown(
    make_client: Callable[..., LocalClient],
) -> None:
    client = make_client()
    with rejected(client, 403, "forbidden", headers={"Origin": "https://elsewhere.example"}):
        pass
    client.app.state.context.jobs.draining = True  # type: ignore[attr-defined]
    with rejected(client, 503, "unavailable"):
        pass


def test_sockets_and_handshakes_are_limited(make_client: Callable[..., LocalClient]) -> None:
    client = make_client(max_sockets_per_key=2)
    with client.websocket_connect(ROUTE) as one, client.websocket_connect(ROUTE) as two:
        assert one.receive_json()["type"] == two.receive_json()["type"] == "session.created"
        with rejected(client, 429, "too_many_requests"):
            pass
        for socket in (one, two):
            socket.send_json({"type": "session.stop"})
            assert socket.receive_json() == {
                "type": "session.done",
                "rounds": 0,
                "frames": 0,
                "reason": "stopped",
            }
    with client.websocket_connect(ROUTE) as again:
        assert again.receive_json()["type"] == "session.created"
    limited = make_client(requests_per_minute=1)
    with limited.websocket_connect(ROUTE):
        pass
    with rejected(limited, 429, "too_many_requests"):
        pass
    text = limited.app.state.context.metrics.text().decode()  # type: ignore[attr-defined]
    assert 'rejects_total{reason="too_many_requests"} 1.0' in text


def test_the_number_of_live_worlds_is_limited(make_client: Callable[..., LocalClient]) -> None:
    client = make_client(max_worlds=1)
    with client.websocket_connect(ROUTE) as one, client.websocket_connect(ROUTE) as two:
        for socket in (one, two):
            assert socket.receive_json()["type"] == "session.created"
            socket.send_json({"type": "session.start", "text": "a ball", "pace": "on_action"})
            event = socket.receive_json()
            if socket is one:
                assert event["type"] == "video.start"
        assert event["error"]["type"] == "rate_limit_error"
        assert "live worlds" in event["error"]["message"]
        assert event["fatal"]
        with pytest.raises(WebSocketDisconnect) as closed:
            two.receive_json()
        assert closed.value.code == 1013


def test_worlds_of_sockets_and_of_http_share_one_limit(make_client: Callable[..., LocalClient]) -> None:
    client = make_client(max_worlds=1)
    with client.websocket_connect(ROUTE) as socket:
        assert socket.receive_json()["type"] == "session.created"
        socket.send_json({"type": "session.start", "text": "a ball", "pace": "on_action"})
        assert socket.receive_json()["type"] == "video.start"
        assert client.post("/v1/worlds", json={"text": "a ball"}).status_code == 429
        assert client.get("/v1/worlds").json()["data"] == []  # a session's world has no id over HTTP


@pytest.mark.parametrize("message", ["x" * 2**17, "é" * 2**15, b"x" * 2000])
def test_message_above_the_limit_closes_the_socket(
    make_client: Callable[..., LocalClient], message: str | bytes
) -> None:
    with make_client().websocket_connect(ROUTE) as socket:
        assert socket.receive_json()["type"] == "session.created"
        socket.send_bytes(message) if isinstance(message, bytes) else socket.send_text(message)
        assert socket.receive_json()["error"]["code"] == "message_too_large"
        with pytest.raises(WebSocketDisconnect) as closed:
            socket.receive_json()
        assert closed.value.code == 1009


def test_play_page_loads_nothing_from_other_origins(make_client: Callable[..., LocalClient]) -> None:
    client = make_client(KEY)  # the page needs no key
    page = client.get("/play")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<style|<script>|\son\w+=|\sstyle=|https?://", page.text)
    for name in ("play.js", "controls.js", "play.css"):
        assert f'"play/{name}"' in page.text
        assert client.get(f"/play/{name}").status_code == 200
    for name in ("app.py", "..%2fapp.py", "__init__.py", "play.html"):
        assert client.get(f"/play/{name}").status_code == 404
