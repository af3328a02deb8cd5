"""Bodies of requests as clients send them: what is read of a refused one, kinds of media, names of files."""

import base64
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from served import KEYS, bearer, error_of

from worldmodel.models.world_model import WorldModel
from worldmodel.serving.app import create_app
from worldmodel.serving.auth import Keys
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.worlds.service import WorldService

MIB = 2**20


@pytest.fixture(scope="module")
def url(
    model: WorldModel,
    listening: Callable[[Any], AbstractContextManager[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    config = ServerConfig("tiny", tmp_path_factory.mktemp("bodies"), Keys(KEYS))
    with listening(create_app(WorldService(model), config)) as address:
        yield address


def send(url: str, path: str, num_bytes: int, key: str = KEYS[0], start: bytes = b"") -> tuple[int, int]:
    """Send a JSON body until the server takes no more; returns how much of it and the status."""
    address, sent, chunk = urlsplit(url), 0, b" " * (MIB // 4)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {num_bytes}\r\n\r\n"
    )
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(head.encode() + start)
        sent += len(start)
        with suppress(ConnectionError):
            while sent < num_bytes:
                sent += connection.send(chunk[: num_bytes - sent])
        return sent, int(connection.recv(64).split()[1])


def test_little_is_read_of_a_body_that_was_refused(url: str) -> None:
    for path, num_bytes, key, status in (
        ("/v1/worlds", 50 * MIB, "a-wrong-key-for-this", 401),
        ("/v1/chat/completions", 400 * MIB, KEYS[0], 413),
        ("/v1/nothing", 50 * MIB, KEYS[0], 404),
    ):
        sent, answered = send(url, path, num_bytes, key)
        assert answered == status
        assert sent < 16 * MIB, path  # what the buffers of both sides take


def test_a_connection_outlives_a_small_body_that_was_refused(url: str) -> None:
    with httpx.Client(base_url=url) as client:
        for _ in range(2):
            refused = client.post("/v1/worlds", json={"text": "x" * 1000})
            assert (refused.status_code, refused.headers.get("connection")) == (401, None)


def test_json_with_an_image_is_limited_as_images_are(url: str) -> None:
    start = {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    }
    text = json.dumps(start)[:-6].encode() + b"image/png;base64,"
    sent, status = send(url, "/v1/chat/completions", 80 * MIB, start=text)
    assert (status, sent < 60 * MIB) == (413, True)
    film = base64.b64encode(bytes(28 * MIB)).decode()
    for kind, expected in (("image/png", 413), ("video/mp4", 415)):  # zeros are not a video
        part = {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{film}"}}
        body = {"messages": [{"role": "user", "content": [part]}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=bearer(KEYS[0]), timeout=60)
        error_of(answer, expected)


def test_a_file_may_have_its_name_in_the_extended_form_alone(url: str, png: bytes) -> None:
    named = b"name=\"observation\"; filename*=UTF-8''d%C3%A9but.png"
    head = b"--x\r\nContent-Disposition: form-data; " + named + b"\r\n\r\n"
    headers = bearer(KEYS[0]) | {"content-type": "multipart/form-data; boundary=x"}
    made = httpx.post(f"{url}/v1/worlds", content=head + png + b"\r\n--x--\r\n", headers=headers, timeout=60)
    assert made.status_code == 200, made.text


def test_allow_names_the_methods_of_the_path_alone(url: str) -> None:
    for path, allowed in (("/v1/videos/edits", "POST"), ("/v1/videos/some-id", "DELETE, GET, HEAD")):
        refused = httpx.put(f"{url}{path}", headers=bearer(KEYS[0]))
        assert error_of(refused, 405)["code"] == "method_not_allowed"
        assert refused.headers["allow"] == allowed
