"""Who may open a live session, the page to play on, and the description of the events."""

import importlib.resources
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic.json_schema import models_json_schema
from starlette.testclient import WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect

from worldmodel.models.world_model import WorldModel
from worldmodel.serving.auth import KeyLimits, Keys, Limiter
from worldmodel.serving.metrics import Metrics
from worldmodel.serving.realtime import events
from worldmodel.serving.realtime.connection import ROUTE
from worldmodel.serving.routes.realtime import router
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.worlds.service import WorldService

KEY = "a-key-for-these-tests"


@pytest.fixture
def open_door(model: WorldModel) -> Iterator[Callable[..., TestClient]]:
    services = []

    def make(*keys: str, max_worlds: int = 8, max_upload_bytes: int = 1000, **limits: Any) -> TestClient:
        app = FastAPI()
        app.include_router(router)
        app.state.service, app.state.metrics, app.state.draining = WorldService(model), Metrics(), False
        app.state.keys, app.state.limiter = Keys(keys), Limiter(KeyLimits(**limits))
        app.state.config = ServerConfig(
            model_name="tiny", data_dir=Path("."), max_worlds=max_worlds, max_upload_bytes=max_upload_bytes
        )
        services.append(app.state.service)
        return TestClient(app)

    yield make
    for service in services:
        service.compute.close()


@contextmanager
def refused(client: TestClient, status: int, code: str, **options: Any) -> Iterator[None]:
    with pytest.raises(WebSocketDenialResponse) as denial:
        client.websocket_connect(ROUTE, **options).__enter__()
    assert denial.value.status_code == status
    assert denial.value.json()["error"]["code"] == code
    yield


def test_a_socket_needs_a_key_where_the_server_has_one(open_door: Callable[..., TestClient]) -> None:
    client = open_door(KEY)
    for options in (
        {},
        {"headers": {"Authorization": "Bearer a-wrong-key-for-this"}},
        {"subprotocols": ["worldmodel.v1", "worldmodel.key.a-wrong-key-for-this"]},
        {"headers": {"Sec-WebSocket-Protocol": f"worldmodel.v1, {KEY}"}},
    ):
        with refused(client, 401, "invalid_api_key", **options):
            pass
    with client.websocket_connect(ROUTE, headers={"Authorization": f"Bearer {KEY}"}) as socket:
        assert socket.receive_json()["type"] == "session.created"
    offers = ["worldmodel.v1", f"worldmodel.key.{KEY}"]
    with client.websocket_connect(ROUTE, subprotocols=offers) as socket:
        assert socket.accepted_subprotocol == "worldmodel.v1"
        assert socket.receive_json()["type"] == "session.created"


def test_other_sites_and_a_stopping_server_are_no_door(open_door: Callable[..., TestClient]) -> None:
    client = open_door()
    with refused(client, 403, "forbidden", headers={"Origin": "https://elsewhere.example"}):
        pass
    client.app.state.draining = True  # type: ignore[attr-defined]
    with refused(client, 503, "unavailable"):
        pass


def test_sockets_are_counted_and_so_are_handshakes(
    open_door: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worldmodel.serving.routes.realtime.MAX_SOCKETS_PER_CALLER", 2)
    client = open_door()
    with client.websocket_connect(ROUTE) as one, client.websocket_connect(ROUTE) as two:
        assert one.receive_json()["type"] == two.receive_json()["type"] == "session.created"
        with refused(client, 429, "too_many_requests"):
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
    hasty = open_door(burst=1, requests_per_s=0.001)
    with hasty.websocket_connect(ROUTE):
        pass
    with refused(hasty, 429, "too_many_requests"):
        pass
    assert 'rejects_total{reason="too_many_requests"} 1.0' in hasty.app.state.metrics.text().decode()  # type: ignore[attr-defined]


def test_the_server_has_so_many_worlds_and_no_more(open_door: Callable[..., TestClient]) -> None:
    client = open_door(max_worlds=1)
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


@pytest.mark.parametrize("message", ["x" * 2**17, "é" * 2**15, b"x" * 2000])
def test_a_message_above_the_limit_ends_the_session(
    open_door: Callable[..., TestClient], message: str | bytes
) -> None:
    with open_door().websocket_connect(ROUTE) as socket:
        assert socket.receive_json()["type"] == "session.created"
        socket.send_bytes(message) if isinstance(message, bytes) else socket.send_text(message)
        assert socket.receive_json()["error"]["code"] == "message_too_large"
        with pytest.raises(WebSocketDisconnect) as closed:
            socket.receive_json()
        assert closed.value.code == 1009


def test_the_description_is_true() -> None:
    text = importlib.resources.files("worldmodel.serving").joinpath("asyncapi.yaml").read_text("utf-8")
    described = yaml.safe_load(text)
    clients, servers = events.client_events(), events.server_events()
    kinds: list[tuple[Any, Any]] = [(kind, "validation") for kind in clients]
    kinds += [(kind, "serialization") for kind in servers]
    names, schemas = models_json_schema(kinds, ref_template="#/components/schemas/{model}")
    assert described["components"]["schemas"] == plain(schemas["$defs"])
    messages = described["components"]["messages"]
    name_of = {kind: kind.model_fields["type"].annotation.__args__[0] for kind, _ in kinds}
    assert set(messages) == set(name_of.values()) | {"upload", "media"}
    for kind in kinds:
        assert messages[name_of[kind[0]]]["payload"] == names[kind]
    for action, group, binary in (("receive", clients, "upload"), ("send", servers, "media")):
        told = [each["$ref"].rsplit("/", 1)[1] for each in described["operations"][action]["messages"]]
        assert sorted(told) == sorted([*(name_of[kind] for kind in group), binary])
    for message in messages.values():
        for example in message.get("examples", ()):
            events.read_event(json.dumps(example["payload"]))
    assert described["channels"]["realtime"]["address"] == ROUTE


def plain(schema: Any) -> Any:
    """A schema without titles, its descriptions on one line."""
    if isinstance(schema, dict):
        kept = {key: value for key, value in schema.items() if not (key == "title" and type(value) is str)}
        return {
            key: " ".join(value.split()) if key == "description" and type(value) is str else plain(value)
            for key, value in kept.items()
        }
    return [plain(value) for value in schema] if isinstance(schema, list) else schema


def test_the_play_page_loads_nothing_from_elsewhere(open_door: Callable[..., TestClient]) -> None:
    client = open_door(KEY)  # the page itself needs no key: it asks for one
    page = client.get("/play")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<style|<script>|\son\w+=|\sstyle=|https?://", page.text)
    for name in ("play.js", "play.css"):
        assert f'"play/{name}"' in page.text
        assert client.get(f"/play/{name}").status_code == 200
    assert client.get("/asyncapi.yaml").text.startswith("#")
    # The server's app answers 404 here; this bare one knows no such errors.
    for name in ("app.py", "..%2fapp.py", "__init__.py", "play.html"):
        bare = TestClient(client.app, raise_server_exceptions=False)
        assert bare.get(f"/play/{name}").status_code >= 400
