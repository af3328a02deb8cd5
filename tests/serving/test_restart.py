"""The server as a process: kill, graceful stop, command line errors."""

import json
import os
import re
import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import KEYS, PATIENCE_S, Process, Processes, bearer, wait_for
from websockets.sync.client import connect

from worldmodel.cli import main
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.saved import identify
from worldmodel.serving.connections import HEAD_TIMEOUT_S
from worldmodel.serving.replicas.database import Database
from worldmodel.serving.replicas.replica import Replica
from worldmodel.serving.videos.storage import Storage

# Long enough to be under way when it is looked at, short enough to show progress at once.
LONG = {"prompt": "a red ball", "num_frames": 512, "num_inference_steps": 64}
SHORT = {"prompt": "a red ball", "num_frames": 8}
DIVIDED = ["--generator-tensor-parallel-size", "2", "--engine", "in-process"]

Start = Callable[..., Process]


@pytest.fixture
def start(servers: Processes, model_folder: Path) -> Start:
    """Starts servers on one data folder."""
    return partial(servers.start, model_folder, key=KEYS[0])


@pytest.mark.slow
def test_killed_server_loses_no_video(start: Start, tmp_path: Path) -> None:
    """Kills under load, each while a video is in progress; orders come in between all of them."""
    data, orders = tmp_path / "data", 0
    accepted: dict[str, dict[str, Any]] = {}
    for kill in range(4):
        server, client = start("--max-running-jobs", "1")
        for _ in range(2):
            body = {**SHORT, "num_frames": 32, "num_inference_steps": 16, "seed": orders}
            key = f"order {orders}"
            accepted[key] = client.post("/v1/videos", json=body, headers={"idempotency-key": key}).json()
            orders += 1
        before, interrupted = list(accepted.values())[max(0, kill - 1)], list(accepted.values())[kill]
        if kill:
            wait_for(client, before["id"], "completed")  # it was in progress when the last server was killed
        wait_for(client, interrupted["id"], "in_progress", "completed", progress=1)
        server.send_signal(signal.SIGKILL)
        server.wait()
        half = data / ".writing-0123456789abcdef"
        half.write_bytes(b"half a film")
        os.utime(half, (0, 0))

    _, client = start()
    for key, video in accepted.items():
        now = wait_for(client, video["id"], "completed", "failed")
        assert (now["status"], now["seed"], now["error"]) == ("completed", video["seed"], None)
        body = {**SHORT, "num_frames": 32, "num_inference_steps": 16, "seed": video["seed"]}
        again = client.post("/v1/videos", json=body, headers={"idempotency-key": key}).json()
        assert (again["id"], again["status"]) == (video["id"], "completed")
        assert client.get(f"/v1/videos/{video['id']}/content").status_code == 200
    assert [each["id"] for each in client.get("/v1/videos", params={"order": "asc"}).json()["data"]] == [
        video["id"] for video in accepted.values()
    ]
    assert not list(data.glob(".writing-*"))


@pytest.mark.slow
def test_stop_ends_sessions_and_leaves_the_queue_to_the_next_server(start: Start) -> None:
    server, client = start("--max-running-jobs", "1", "--drain-timeout-s", "0.5")
    running = client.post("/v1/videos", json=LONG).json()
    queued = client.post("/v1/videos", json=SHORT).json()
    wait_for(client, running["id"], "in_progress", progress=1)
    address = f"ws://127.0.0.1:{client.base_url.port}/v1/realtime/video"
    with connect(address, additional_headers=bearer(KEYS[0])) as session:
        assert json.loads(session.recv())["type"] == "session.created"
        server.send_signal(signal.SIGTERM)
        done = json.loads(session.recv(timeout=PATIENCE_S))
        assert (done["type"], done["reason"]) == ("session.done", "server_stopping")
    assert server.wait(timeout=PATIENCE_S) == 0
    _, client = start()
    wait_for(client, running["id"], "in_progress", progress=1)
    wait_for(client, queued["id"], "completed")


@pytest.mark.slow
def test_stop_waits_for_unfinished_videos(start: Start) -> None:
    server, client = start("--max-running-jobs", "1", "--drain-timeout-s", "600")
    video = client.post("/v1/videos", json={**SHORT, "num_frames": 128, "num_inference_steps": 32}).json()
    wait_for(client, video["id"], "in_progress", progress=1)
    server.send_signal(signal.SIGTERM)
    until = time.monotonic() + PATIENCE_S
    while client.get("/ready").status_code == 200 and time.monotonic() < until:
        time.sleep(0.02)
    assert (client.get("/ready").status_code, client.get("/health").status_code) == (503, 200)
    refused = client.post("/v1/videos", json=SHORT)
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert client.get(f"/v1/videos/{video['id']}").json()["status"] == "in_progress"
    assert server.wait(timeout=PATIENCE_S) == 0
    _, client = start()
    assert client.get(f"/v1/videos/{video['id']}").json()["status"] == "completed"


@pytest.mark.slow
def test_disconnect_cancels_the_step(start: Start) -> None:
    _, client = start()
    body = {"text": "a red ball", "num_inference_steps": 64}
    world = client.post("/v1/worlds", json=body).json()
    steps_before = number(client, "worldmodel_batch_occupancy")
    assert steps_before > 0
    with pytest.raises(httpx.ReadTimeout):
        client.post(
            f"/v1/worlds/{world['id']}/step",
            json={"step_id": 1},
            timeout=httpx.Timeout(PATIENCE_S, read=0.01),
        )
    route = 'worldmodel_requests_total{outcome="cancelled",route="/v1/worlds/{world_id}/step"}'
    until = time.monotonic() + PATIENCE_S
    while number(client, route) < 1 and time.monotonic() < until:
        time.sleep(0.02)
    assert number(client, route) == 1
    assert client.get(f"/v1/worlds/{world['id']}").json()["round"] == 0
    assert client.post(f"/v1/worlds/{world['id']}/step", json={"step_id": 1}).status_code == 200


def number(client: httpx.Client, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--host", "0.0.0.0"], "no API key"),
        (["--host", "192.0.2.1"], "no API key"),
        (["--engine", "other"], "invalid choice"),
        (["--adapter", "x"], "NAME=FOLDER"),
        (["--adapter", "x=nowhere"], "no adapter folder"),
        (["--max-worlds", "0"], "1 or more"),
        (["--job-deadline-s", "nan"], "0 or more"),
        (["--keys-file", "nowhere.txt"], "cannot be read"),
        (["--port", "99999"], "--port"),
        (["--device", "nowhere"], "nowhere"),
        (["--kv-cache-memory", "4 litres"], "4 litres"),
        (["--max-model-len", "0"], "--max-model-len"),
        (["--max-model-len", "100"], "157 positions (3 rounds of 52"),
        (["--kv-cache-memory", "64KiB", "--dtype", "bfloat16"], "one session of 530 positions"),
        (["--tensor-parallel-size", "2", "--engine", "in-process"], "--engine vllm"),
        (["--no-enforce-eager", "--engine", "in-process"], "enforce_eager False"),
        (["--quantization", "awq", "--engine", "in-process"], "'awq'"),
        (["--cache-threshold", "-1", "--engine", "in-process"], "-1"),
        (["--offload", "--device", "cpu"], "--offload"),
        ([*DIVIDED, "--offload"], "omit --offload"),
        ([*DIVIDED, "--quantization", "int8"], "omit --quantization"),
        ([*DIVIDED, "--sequence-parallel-size", "2"], "--sequence-parallel-size is 2"),
        ([*DIVIDED], "the 3 attention heads"),
        (["--cors-origins", "https://app.example"], "app.example"),
        (["--tls-key", "key.pem"], "--tls-certificate"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--config", "unknown.yaml"], "'colour'"),
        (["--database", "mysql://host/db"], "mysql"),
        (["--rounds-per-save", "0"], "1 or more"),
        (["--config", "options.yaml"], "nowhere"),
        (["--config", "options.yaml", "--device", "cpu"], "but the longest that fit are 99"),
    ],
)
def test_command_line_errors(
    options: list[str],
    named: str,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("WORLDMODEL_API_KEYS", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("options.yaml").write_text("device: nowhere\nmax_model_len: 99\nenforce-eager: true\n", "utf-8")
    Path("unknown.yaml").write_text("colour: blue\n", "utf-8")
    assert main(["serve", str(model_folder), "--port", "0", *options]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("loading ")]
    assert named in error


@pytest.mark.parametrize("live", [{"model": "other"}, {"folder": "other"}])
def test_database_of_another_model_or_folder_is_refused(
    live: dict[str, str], model: WorldModel, model_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    url = f"sqlite:///{tmp_path / 'server.db'}"
    folder = Storage(tmp_path).identity()
    Replica(Database(url), **{"model": identify(model), "folder": folder, **live})
    command = ["serve", str(model_folder), "--port", "0", "--engine", "in-process"]
    assert main([*command, "--data-dir", str(tmp_path), "--database", url]) == 2
    assert "--database" in capsys.readouterr().err


@pytest.mark.slow
def test_silent_connections_do_not_keep_others_out(start: Start) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    _, client = start()
    host, port = client.base_url.host, client.base_url.port
    silent: list[socket.socket] = []
    try:
        for index in range(1050):
            silent.append(socket.create_connection((host, port)))
            if index % 2:
                silent[-1].sendall(b"GET /health HT")
        time.sleep(0.5)
        for _ in range(5):
            began = time.monotonic()
            assert httpx.get(f"{client.base_url}/health", timeout=5).status_code == 200
            assert time.monotonic() - began < 2
        assert client.post("/v1/worlds", json={"text": "a red ball"}).status_code == 200
        time.sleep(HEAD_TIMEOUT_S + 1)
        for each in silent:
            each.settimeout(2)
            with suppress(ConnectionResetError):  # closed with data that nobody read
                assert each.recv(1) == b""
    finally:
        for each in silent:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_connections_in_use_are_not_closed(start: Start) -> None:
    _, client = start()
    with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
        until = time.monotonic() + HEAD_TIMEOUT_S + 3
        while time.monotonic() < until:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            received = b""
            while not received.endswith(b'{"status":"ok"}'):
                received += (more := connection.recv(4096))
                assert more, "the connection was closed"
            time.sleep(0.3)


@pytest.mark.slow
def test_connections_that_clients_and_proxies_keep_stay_open(start: Start) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"

    def answer(connection: socket.socket) -> bytes:
        connection.sendall(request)
        received = b""
        while not received.endswith(b'{"status":"ok"}'):
            received += (more := connection.recv(4096))
            assert more, "the connection was closed"
        return received

    _, client = start()
    address = client.base_url.host, client.base_url.port
    with socket.create_connection(address) as kept, socket.create_connection(address) as silent:
        assert answer(kept).startswith(b"HTTP/1.1 200")
        assert answer(silent).startswith(b"HTTP/1.1 200")
        silent.sendall(request[:10])
        time.sleep(HEAD_TIMEOUT_S + 2)
        assert answer(kept).startswith(b"HTTP/1.1 200")
        silent.settimeout(2)
        with suppress(ConnectionResetError):
            assert silent.recv(4096) == b""  # the rest of a request is not waited for
