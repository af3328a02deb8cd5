"""Starlette's test client, as a client on the server's own machine."""

from typing import Any
from urllib.parse import urljoin

from starlette.testclient import TestClient, WebSocketTestSession


class LocalClient(TestClient):
    """Sends `Host: 127.0.0.1`, which a server without keys requires, also for WebSockets."""

    def __init__(self, app: Any, base_url: str = "http://127.0.0.1", **options: Any) -> None:
        super().__init__(app, base_url=base_url, **options)

    def websocket_connect(self, url: str, *args: Any, **options: Any) -> WebSocketTestSession:
        return super().websocket_connect(urljoin("ws://127.0.0.1", url), *args, **options)
