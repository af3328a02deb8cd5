"""Servers of tests: started in this process or in one of their own, and what they answer."""

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
from local_client import LocalClient

from worldmodel.media import encoding
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.app import create_app
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.worlds.service import WorldService

PATIENCE_S = 600.0
KEYS = ("first-key-0123456789", "second-key-0123456789")

Process = tuple["subprocess.Popen[str]", httpx.Client]


def local(model: WorldModel, folder: Path, **config: Any) -> LocalClient:
    """Return a client of a server in this process, which runs while the client is open."""
    return LocalClient(create_app(WorldService(model), ServerConfig("tiny", folder, **config)))


class Processes:
    """Starts servers in processes of their own, and ends those that a test has left."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, list[subprocess.Popen[str]]()

    def start(
        self, model: Path, *options: str, module: Sequence[str] = ("-m", "worldmodel"), key: str = ""
    ) -> Process:
        """Start a server of a model; without a key, it needs none."""
        command = [sys.executable, "-P", *module, "serve", str(model), "--engine", "in-process"]
        command += ["--port", "0", "--data-dir", str(self.folder / "data"), *options]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"WORLDMODEL_API_KEYS": key} if key else {})
        log = self.folder / f"{len(self.started)}.log"
        with log.open("w") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ)
        self.started.append(process)
        assert process.stdout is not None
        greeting = process.stdout.readline()
        found = re.match(r"serving tiny on (http://127\.0\.0\.1:\d+) \(engine: in-process, ", greeting)
        assert found, greeting + log.read_text()
        headers = bearer(key) if key else {}
        return process, httpx.Client(base_url=found[1], headers=headers, timeout=PATIENCE_S)


@contextmanager
def processes(folder: Path) -> Iterator[Processes]:
    """Kill what is left when the block ends."""
    made = Processes(folder)
    yield made
    for process in made.started:
        process.kill()
        process.wait()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def error_of(response: httpx.Response, status: int) -> dict[str, str]:
    """Return the error of a refused request."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    assert set(response.json()["error"]) == {"type", "code", "message"}
    return response.json()["error"]


def step(client: Any, world: str, step_id: int, text: str | None = None) -> httpx.Response:
    """Play a round of a world."""
    body = {"step_id": step_id, "action": {"text": text or f"action {step_id}"}}
    return client.post(f"/v1/worlds/{world}/step", json=body, params={"format": "npy"})


def frames_of(response: httpx.Response) -> np.ndarray:
    """Return the frames of an answer in the format npy."""
    assert response.status_code == 200, response.text
    return np.load(io.BytesIO(response.content), allow_pickle=False)


def near(made: np.ndarray, expected: np.ndarray) -> bool:
    """Whether frames agree up to the rounding of a batch: a value may fall on either side of a half."""
    return made.shape == expected.shape and int(np.abs(made.astype(int) - expected.astype(int)).max()) <= 1


def wait_for(client: Any, video: str, *statuses: str, progress: int = 0) -> dict[str, Any]:
    """Wait for a video, by default until it has finished, and return its description."""
    until = time.monotonic() + PATIENCE_S
    while True:
        response = client.get(f"/v1/videos/{video}")
        now = response.json()
        if now["status"] in (statuses or ("completed", "failed")) and now["progress"] >= progress:
            return now
        finished = now["status"] in ("completed", "failed")
        assert time.monotonic() < until and not finished, now
        assert int(response.headers["openai-poll-after-ms"]) > 0
        time.sleep(0.02)


def decoded(film: bytes) -> np.ndarray:
    """Return the frames of an MP4."""
    with av.open(io.BytesIO(film)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def assert_same_film(film: bytes | np.ndarray, frames: np.ndarray) -> None:
    """Check that a film shows frames, up to what an MP4 loses."""
    made = decoded(film) if isinstance(film, bytes) else film
    expected = decoded(encoding.encode_video(frames, 8))
    assert made.shape == expected.shape
    assert np.abs(made.astype(int) - expected.astype(int)).mean() < 1
