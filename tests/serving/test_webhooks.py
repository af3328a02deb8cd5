"""Webhooks to a real receiver: signatures, repeated attempts, addresses that are refused."""

import base64
import hashlib
import hmac
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from local_client import LocalClient
from served import PATIENCE_S, Processes, local, wait_for

from worldmodel.errors import ConfigError
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.replicas import database
from worldmodel.serving.settings import HttpOptions
from worldmodel.serving.videos import webhooks

SECRET = bytes(range(32))


class Receiver(ThreadingHTTPServer):
    """Answers 503 at first; `got` lists the headers and bodies of all attempts."""

    def __init__(self, failures: int) -> None:
        super().__init__(("127.0.0.1", 0), Exchange)
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.failures = failures
        self.options = HttpOptions(webhook_url=f"http://127.0.0.1:{self.server_address[1]}/hook?a=1")


class Exchange(BaseHTTPRequestHandler):
    server: Receiver  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
        assert self.path == "/hook?a=1"
        self.send_response(503 if len(self.server.got) <= self.server.failures else 204)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver(failures=2) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text(f"whsec_{base64.b64encode(SECRET).decode()}\n", "ascii")
    file.chmod(0o600)
    return file


def test_the_signature_is_that_of_standard_webhooks() -> None:
    """With the example of its specification."""
    known = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    made = webhooks.signed(known, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert made["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_receiver_learns_of_a_video_and_is_asked_again(
    model: WorldModel, tmp_path: Path, receiver: Receiver, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "FIRST_PAUSE_S", 0.05)
    http = HttpOptions(
        webhook_url=receiver.options.webhook_url, webhook_secret_file=secret, webhook_allow_private=True
    )
    with local(model, tmp_path / "data", http=http) as api:
        order = {"prompt": "a ball", "num_inference_steps": 1}
        video = wait_for(api, api.post("/v1/videos", json=order).json()["id"])
        until = time.monotonic() + 30
        while len(receiver.got) < 3:
            assert time.monotonic() < until
            time.sleep(0.02)
        time.sleep(0.3)
    assert len(receiver.got) == 3  # two failures, and none after it was taken
    assert {headers["webhook-id"] for headers, _ in receiver.got} == {f"msg_{video['id']}_completed"}
    for headers, body in receiver.got:
        assert abs(time.time() - int(headers["webhook-timestamp"])) < 60
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        digest = base64.b64encode(hmac.new(SECRET, signed, hashlib.sha256).digest()).decode()
        assert headers["webhook-signature"] == f"v1,{digest}"
        message = json.loads(body)
        assert (message["type"], message["data"]) == ("video.completed", video)


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def stored(api: LocalClient) -> int:
    app: Any = api.app
    count = sa.select(sa.func.count()).select_from(database.webhooks)
    return app.state.context.database.run_now(lambda db: db.scalar(count))


@pytest.mark.parametrize("kind", ["alone", "sqlite", "postgresql"])
def test_what_was_not_taken_is_sent_by_the_next_server(
    kind: str,
    model: WorldModel,
    tmp_path: Path,
    receiver: Receiver,
    secret: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhooks, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(webhooks, "LONGEST_PAUSE_S", 0.2)
    receiver.failures = 10**6
    http = HttpOptions(
        webhook_url=receiver.options.webhook_url, webhook_secret_file=secret, webhook_allow_private=True
    )
    urls = {"sqlite": f"sqlite:///{tmp_path / 'shared.db'}"}
    url = request.getfixturevalue("postgres").database() if kind == "postgresql" else urls.get(kind)
    with local(model, tmp_path / "data", http=http, database=url) as api:
        order = {"prompt": "a ball", "num_inference_steps": 1}
        video = wait_for(api, api.post("/v1/videos", json=order).json()["id"])
        wait_until(lambda: len(receiver.got) >= 3)
        assert stored(api) == 1
    before = len(receiver.got)
    receiver.failures = 0
    with local(model, tmp_path / "data", http=http, database=url) as api:
        wait_until(lambda: len(receiver.got) > before)
        wait_until(lambda: not stored(api))
        time.sleep(0.3)
        assert len(receiver.got) == before + 1
    assert {headers["webhook-id"] for headers, _ in receiver.got} == {f"msg_{video['id']}_completed"}
    assert {body for _, body in receiver.got} == {receiver.got[0][1]}


@pytest.mark.slow
def test_a_killed_server_loses_no_message(
    servers: Processes, model_folder: Path, receiver: Receiver, secret: Path
) -> None:
    receiver.failures = 10**6
    options = ["--webhook-url", receiver.options.webhook_url, "--webhook-secret-file", str(secret)]
    server, client = servers.start(model_folder, *options, "--webhook-allow-private")
    order = {"prompt": "a ball", "num_inference_steps": 1}
    made = [client.post("/v1/videos", json=order).json()["id"] for _ in range(3)]
    for video in made:
        assert wait_for(client, video)["status"] == "completed"
    server.kill()
    server.wait()
    before = len(receiver.got)
    receiver.failures = 0
    servers.start(model_folder, *options, "--webhook-allow-private")
    wait_until(lambda: len(receiver.got) >= before + 3)
    taken = {headers["webhook-id"] for headers, _ in receiver.got[before:]}
    assert taken == {f"msg_{video}_completed" for video in made}


def test_a_message_that_nobody_takes_is_given_up(
    model: WorldModel,
    tmp_path: Path,
    receiver: Receiver,
    secret: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("worldmodel"), "propagate", True)
    monkeypatch.setattr(webhooks, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(webhooks, "PATIENCE_S", 0.4)
    receiver.failures = 10**6
    http = HttpOptions(
        webhook_url=receiver.options.webhook_url, webhook_secret_file=secret, webhook_allow_private=True
    )
    with local(model, tmp_path / "data", http=http) as api, caplog.at_level("ERROR"):
        order = {"prompt": "a ball", "num_inference_steps": 1}
        assert wait_for(api, api.post("/v1/videos", json=order).json()["id"])["status"] == "completed"
        wait_until(lambda: "is not sent again" in caplog.text)
        assert stored(api) == 0
    assert len(receiver.got) > 1
    assert "status 503" in caplog.text


def test_no_private_address_is_reached_unless_allowed(
    model: WorldModel,
    tmp_path: Path,
    receiver: Receiver,
    secret: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("worldmodel"), "propagate", True)
    http = HttpOptions(webhook_url=receiver.options.webhook_url, webhook_secret_file=secret)
    with local(model, tmp_path / "data", http=http) as api, caplog.at_level("ERROR"):
        order = {"prompt": "a ball", "num_inference_steps": 1}
        assert wait_for(api, api.post("/v1/videos", json=order).json()["id"])["status"] == "completed"
        time.sleep(0.3)
        named = api.post("/v1/videos", json=order | {"webhook_url": http.webhook_url})
        assert named.status_code == 400  # clients name no address
    assert receiver.got == []
    assert "not a public address" in caplog.text


def test_options_that_cannot_work_are_refused(tmp_path: Path, secret: Path) -> None:
    weak = tmp_path / "weak"
    weak.write_text("whsec_" + base64.b64encode(b"short").decode())
    weak.chmod(0o600)
    for options, named in (
        (HttpOptions(webhook_url="https://app.example/hook"), "--webhook-secret-file"),
        (HttpOptions(webhook_url="ftp://app.example", webhook_secret_file=secret), "ftp://app.example"),
        (HttpOptions(webhook_url="https://app.example", webhook_secret_file=weak), "weak"),
        (HttpOptions(webhook_url="https://app.example", webhook_secret_file=tmp_path / "none"), "none"),
    ):
        with pytest.raises(ConfigError, match=named):
            webhooks.check_webhooks(options)
    assert webhooks.read_secret(secret) == SECRET
