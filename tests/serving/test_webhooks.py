"""Webhooks to a real receiver: signatures, repeated attempts, addresses that are refused."""

import base64
import hashlib
import hmac
import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from served import local, wait_for

from worldmodel.errors import ConfigError
from worldmodel.models.world_model import WorldModel
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
