"""Two replicas in Ray Serve: worlds are pinned to them, and those of a killed one go on at the other."""

import io
import os
import signal
import socket
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from worldmodel.errors import ConfigError
from worldmodel.models.world_model import WorldModel

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: openworldmodel[ray]")

import ray
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema

from worldmodel.cli.ray_serve import app
from worldmodel.serving.replicas import ray_serve

pytestmark = pytest.mark.slow
KEY = "some-key-0123456789"
DEPLOYMENT = Path(__file__).parents[2] / "deploy" / "replicas" / "ray_serve.yaml"
LEAST_WORLDS, MOST_WORLDS = 4, 24
PATIENCE_S = 120.0


@pytest.fixture
def options(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Those of the deployment file, for two replicas of a tiny model on this machine."""
    monkeypatch.setenv("WORLDMODEL_API_KEYS", KEY)
    deployed = ServeDeploySchema.model_validate(yaml.safe_load(DEPLOYMENT.read_text(encoding="utf-8")))
    (application,) = deployed.applications
    assert application.import_path == f"{app.__module__}:{app.__name__}"
    here = {"model": str(model_folder), "engine": "in-process", "data_dir": str(tmp_path / "data")}
    return {**application.args, **here, "database": f"sqlite:///{tmp_path / 'worlds.db'}"}


@pytest.fixture
def client(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[httpx.Client]:
    """Sends requests to the replicas, through Ray's proxy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", f"{ray_serve.__name__}:middlewares")
    monkeypatch.chdir(tmp_path)  # processes of Ray import from here first, and a clone has a worldmodel/
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app(options))
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=PATIENCE_S) as made:
        yield made
    serve.shutdown()
    ray.shutdown()


def replicas() -> list[psutil.Process]:
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # Ray also ends processes meanwhile
            if "ServeReplica" in " ".join(each.cmdline()):
                found.append(each)
    return found


def holders(options: dict[str, Any]) -> dict[str, str]:
    """The replica that has each world."""
    with sqlite3.connect(options["database"].removeprefix("sqlite:///")) as database:
        return dict(database.execute("select id, holder from server_worlds"))


def step(client: httpx.Client, world: str, step_id: int) -> np.ndarray:
    """Take a step, again while its replica is dead: its number says which one it is."""
    body = {"step_id": step_id, "action": {"text": f"action {step_id}"}}
    until = time.monotonic() + PATIENCE_S
    while True:
        response = client.post(f"/v1/worlds/{world}/step", json=body, params={"format": "npy"})
        if response.status_code == 200:
            return np.load(io.BytesIO(response.content), allow_pickle=False)
        assert response.status_code >= 409 and time.monotonic() < until, response.text
        time.sleep(0.2)


def test_worlds_are_pinned_and_go_on_without_their_replica(
    client: httpx.Client, options: dict[str, Any], model: WorldModel
) -> None:
    worlds: list[str] = []
    first: list[np.ndarray] = []
    while len(worlds) < LEAST_WORLDS or len(set(holders(options).values())) < 2:
        assert len(worlds) < MOST_WORLDS, "all are at one replica"
        body = {"text": "a ball", "seed": len(worlds), "num_inference_steps": 2}
        worlds.append(client.post("/v1/worlds", json=body).json()["id"])
        first.append(step(client, worlds[-1], 1))
    with ThreadPoolExecutor() as pool:

        def play(index: int) -> list[np.ndarray]:
            return list(pool.map(lambda world: step(client, world, index), worlds))

        played, pinned = [first], holders(options)
        for index in (2, 3):
            played.append(play(index))
            assert holders(options) == pinned
        os.kill(replicas()[0].pid, signal.SIGKILL)
        killed = time.monotonic()
        played += [play(index) for index in (4, 5)]
    moved = holders(options)
    assert any(moved[world] != pinned[world] for world in worlds)
    assert any(moved[world] == pinned[world] for world in worlds)
    print(f"two rounds of all worlds {time.monotonic() - killed:.1f} s after the kill")
    for row in range(len(worlds)):
        session = model.session(seed=row, num_inference_steps=2)
        session.reset(text="a ball")
        for index, frames in enumerate(played, start=1):
            here = session.step(f"action {index}").frames.astype(int)
            assert np.abs(frames[row].astype(int) - here).max() <= 1, (row, index)  # rounding of batches


def test_options_that_cannot_be_replicated_are_refused(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong, named in (
        ({"port": 8001}, "port"),
        ({"database": None}, "database"),
        ({"no_such": 1}, "no_such"),
    ):
        with pytest.raises(ConfigError, match=named):
            app({name: value for name, value in (options | wrong).items() if value is not None})
    monkeypatch.delenv("WORLDMODEL_API_KEYS")
    with pytest.raises(ConfigError, match="API key"):
        app(options)
