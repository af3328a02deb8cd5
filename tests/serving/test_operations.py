"""What operators need: request ids, access log, CORS, trusted hosts, root path, HEAD, TLS."""

import asyncio
import datetime
import io
import ipaddress
import json
import logging
import os
import shutil
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from local_client import LocalClient
from starlette.testclient import TestClient

from worldmodel.cli.serve import main
from worldmodel.errors import ConfigError, ModelError
from worldmodel.models.world_model import WorldModel
from worldmodel.serving import logs, server
from worldmodel.serving.app import create_app
from worldmodel.serving.auth import Keys
from worldmodel.serving.connections import SmallBuffers, check_protocol
from worldmodel.serving.engine import threads
from worldmodel.serving.media import system_calls
from worldmodel.serving.realtime.connection import ROUTE
from worldmodel.serving.server import Server, check_http, serve
from worldmodel.serving.settings import HttpOptions, ServerConfig
from worldmodel.serving.videos.orders import Orders
from worldmodel.serving.worlds.service import WorldService

KEY = "a-key-for-these-tests"
BEARER = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def make_app(model: WorldModel, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    contexts = []

    def make(*keys: str, lifespan: bool = False, **http: Any) -> Any:
        folder = tmp_path / str(len(contexts))
        config = ServerConfig("tiny", folder, Keys(keys), HttpOptions(**http))
        app = create_app(WorldService(model), config)
        if not lifespan:  # which closes them
            contexts.append(app.state.context)
        return app

    yield make
    for context in contexts:
        context.compute.close()
        context.database.close()


@pytest.fixture
def logged() -> Iterator[Callable[..., io.StringIO]]:
    """Configures the logs of a server; returns what they hold."""
    names = ("worldmodel", "uvicorn", logs.ACCESS.name)
    before = [(name, (it := logging.getLogger(name)).handlers, it.level, it.propagate) for name in names]

    def start(**options: Any) -> io.StringIO:
        logs.configure(HttpOptions(**options))
        (handler,) = logging.getLogger("worldmodel").handlers
        assert isinstance(handler, logging.StreamHandler)
        handler.setStream(stream := io.StringIO())
        return stream

    yield start
    for name, handlers, level, propagate in before:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_the_database_is_in_the_data_folder_whatever_its_name(model: WorldModel, tmp_path: Path) -> None:
    folder = tmp_path / "is it? a%41b"
    with TestClient(create_app(WorldService(model), ServerConfig("tiny", folder))) as client:
        assert client.get("/health").status_code == 200
    assert (folder / "server.db").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {folder.name}


def test_requests_have_ids_and_are_logged(make_app: Any, logged: Any) -> None:
    client, lines = LocalClient(make_app()), logged(access_log=True, log_format="json")
    assert client.get("/v1/models", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = client.get("/v1/worlds/none", headers={"x-request-id": "a\tb"}).headers["x-request-id"]
    assert len(made) == 16
    first, second = map(json.loads, lines.getvalue().splitlines())
    assert (first["request_id"], first["method"], first["path"], first["status"]) == (
        *("mine-1", "GET", "/v1/models", 200),
    )
    assert (second["request_id"], second["status"]) == (made, 404)
    assert second["duration_ms"] >= 0


def test_levels_and_the_access_log_are_options(make_app: Any, logged: Any) -> None:
    client, lines = LocalClient(make_app()), logged()
    client.get("/v1/models")
    logging.getLogger("worldmodel.serving.server").info("loading")
    assert lines.getvalue() == ""
    lines = logged(log_level="info")
    logging.getLogger("worldmodel.serving.server").info("loading %s", "tiny")
    assert "INFO worldmodel.serving.server [None] loading tiny" in lines.getvalue()


def test_a_refused_websocket_is_one_line(make_app: Any, logged: Any, listening: Any) -> None:
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    app = make_app(KEY, lifespan=True)
    with listening(app) as url:
        lines = logged(access_log=True)
        with pytest.raises(InvalidStatus):
            connect(url.replace("http", "ws") + ROUTE)
    (line,) = lines.getvalue().splitlines()
    assert f"WEBSOCKET '{ROUTE}' 401" in line


def test_cors_lets_listed_origins_in(make_app: Any) -> None:
    client = TestClient(make_app(KEY, cors_origins=("https://app.example",)))
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allowed = client.options("/v1/worlds", headers={"origin": "https://app.example", **asked})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert (
        client.options("/v1/worlds", headers={"origin": "https://evil.example", **asked}).status_code == 400
    )
    answer = client.get("/v1/models", headers={"origin": "https://app.example", **BEARER})
    assert answer.headers["access-control-allow-origin"] == "https://app.example"


def test_head_is_get_without_a_body(make_app: Any) -> None:
    client = LocalClient(make_app())
    for path, status in (("/v1/models", 200), ("/health", 200), ("/v1/worlds/none", 404), ("/play", 200)):
        head, get = client.head(path), client.get(path)
        assert (head.status_code, head.content) == (status, b"")
        assert head.headers["content-length"] == get.headers["content-length"]


def test_trusted_hosts_and_root_path(make_app: Any) -> None:
    client = TestClient(make_app(KEY, trusted_hosts=("api.example",), root_path="/worlds"))
    assert client.get("/health", headers={"host": "evil.example"}).status_code == 400
    assert client.get("/health", headers={"host": "api.example"}).status_code == 200
    schema = client.get("/openapi.json", headers={"host": "api.example"}).json()
    assert schema["servers"] == [{"url": "/worlds"}]


def test_http_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("no certificate", encoding="utf-8")
    for options, named in (
        (HttpOptions(cors_origins=("https://app.example",)), "app.example"),
        (HttpOptions(root_path="worlds"), "'worlds'"),
        (HttpOptions(tls_key=tmp_path / "bad.pem"), "--tls-certificate"),
        (HttpOptions(tls_certificate=tmp_path / "bad.pem", tls_key=tmp_path / "bad.pem"), "bad.pem"),
    ):
        with pytest.raises(ConfigError, match=named):
            check_http(options, Keys())


def test_https_is_served_with_the_certificate(model: WorldModel, tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="cryptography is not installed: it makes a certificate")
    certificate, key = self_signed(tmp_path)
    http = HttpOptions(tls_certificate=certificate, tls_key=key)
    check_http(http, Keys())
    config = ServerConfig("tiny", tmp_path / "data", http=http)
    server = Server(create_app(WorldService(model), config), config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server ended before it started"
                thread.join(0.05)
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            trusted = ssl.create_default_context(cafile=str(certificate))
            assert httpx.get(f"https://{address}/health", verify=trusted).json() == {"status": "ok"}
            with pytest.raises(httpx.TransportError):
                httpx.get(f"http://{address}/health")
        finally:
            server.handle_exit(signal.SIGTERM, None)
            thread.join(60)


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_threads_are_those_that_the_container_may_use(
    files: dict[str, str], most: int | None, tmp_path: Path
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n", "ascii")
    assert threads.available(tmp_path) == (most or len(os.sched_getaffinity(0)))


def test_root_is_refused_where_decoders_cannot_be_confined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(system_calls, "supported", lambda: False)
    with pytest.raises(ConfigError, match="--allow-root"):
        check_http(HttpOptions(), Keys())
    check_http(HttpOptions(allow_root=True), Keys())
    monkeypatch.setattr(system_calls, "supported", lambda: True)
    check_http(HttpOptions(), Keys())


def test_a_uvicorn_that_hides_its_connections_is_refused() -> None:
    check_protocol()

    class Renamed:
        def __init__(self) -> None:
            self.request = self.keep_alive = None

    with pytest.raises(ConfigError, match="uvicorn"):
        check_protocol(Renamed)


def test_probes_ask_the_database_once_a_second(make_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client, asked = LocalClient(make_app()), []
    count = Orders.num_queued
    monkeypatch.setattr(Orders, "num_queued", lambda self: (asked.append(0), count(self))[1])
    assert {client.get("/ready").status_code for _ in range(20)} == {200}
    assert len(asked) <= 2


def test_a_socket_that_is_not_read_holds_few_frames() -> None:
    """Otherwise rounds are played for half a minute for a client that is gone."""
    num_sent, frame = 0, bytes(16 * 2**10)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_sent
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            while True:
                await send({"type": "websocket.send", "bytes": frame})
                num_sent += 1

    server = uvicorn.Server(uvicorn.Config(app, ws=SmallBuffers, lifespan="off", log_level="error"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        with socket.create_connection(listener.getsockname()) as deaf:
            deaf.sendall(
                b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            )
            assert b" 101 " in deaf.recv(64)
            while (before := num_sent) == 0 or (time.sleep(0.3), num_sent != before)[1]:
                continue
        server.should_exit = server.force_exit = True
        thread.join(10)
    assert 0 < num_sent * len(frame) < 2**20


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Write a certificate of 127.0.0.1 and its key; returns their paths."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .sign(key, hashes.SHA256())
    )
    pem, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(pem))
    paths[1].write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_password))
    return paths


def test_processes_that_the_server_starts_do_not_see_its_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[int, bool]] = []

    async def serve(config: ServerConfig, **_: Any) -> None:
        seen.append((len(config.keys or ()), "WORLDMODEL_API_KEYS" in os.environ))

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setenv("WORLDMODEL_API_KEYS", KEY)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    main(["shapes-tiny", "--data-dir", str(tmp_path)])
    assert seen == [(1, False)]


def test_server_says_what_it_loads(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loading can take minutes; a model that cannot be loaded ends the server after the message."""
    folder = shutil.copytree(model_folder, tmp_path / "damaged")
    for weights in folder.rglob("*.safetensors"):
        weights.write_bytes(b"")
    with pytest.raises(ModelError):
        asyncio.run(serve(str(folder), ServerConfig("tiny", tmp_path / "data"), port=0))
    assert "loading tiny" in capsys.readouterr().err
