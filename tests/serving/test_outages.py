"""Databases and disks that fail under a running server: clear answers meanwhile, and nothing is lost."""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_client import LocalClient
from postgres import PostgresServer
from served import PATIENCE_S, error_of, frames_of, local, step, wait_for

from worldmodel.models.world_model import WorldModel
from worldmodel.serving.replicas.replica import LEASE_S

VIDEO = {"prompt": "a red ball", "num_frames": 16, "num_inference_steps": 2}
LONG = {"prompt": "a red ball", "num_frames": 96, "num_inference_steps": 8}


def wait_until(condition: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def assert_unavailable(response: Any) -> None:
    """Check that a request was answered with 503, one sentence, and when to come back."""
    message = error_of(response, 503)["message"]
    assert int(response.headers["retry-after"]) > 0
    assert message.endswith(".")
    assert message.count(".") == 1


def order(api: LocalClient, **fields: Any) -> Any:
    return api.post("/v1/videos", json={**VIDEO, **fields})


def running_steps(api: LocalClient, video: str) -> int:
    app: Any = api.app
    return app.state.context.jobs._running[video].steps_done


@pytest.mark.slow
def test_a_database_that_is_killed_and_started_again_loses_nothing(
    postgres: PostgresServer, model: WorldModel, tmp_path: Path
) -> None:
    with local(model, tmp_path, database=postgres.database(), max_running_jobs=1) as api:
        world = api.post("/v1/worlds", json={"text": "a ball", "num_inference_steps": 1}).json()["id"]
        session = model.session(seed=0, num_inference_steps=1)
        session.reset(text="a ball")
        assert np.array_equal(frames_of(step(api, world, 1)), session.step("action 1").frames)
        running = order(api, **LONG).json()["id"]
        queued = [order(api, seed=seed).json()["id"] for seed in range(3)]
        wait_for(api, running, "in_progress", progress=1)
        postgres.kill()
        killed = time.monotonic()
        for request in (
            lambda: api.get("/v1/videos"),
            lambda: api.get(f"/v1/videos/{queued[0]}"),
            lambda: order(api),
            lambda: step(api, world, 2),
            lambda: api.post("/v1/worlds", json={"text": "a ball"}),
            lambda: api.delete(f"/v1/videos/{queued[0]}"),
        ):
            assert_unavailable(request())
        assert api.get("/health").status_code == 200
        for _ in range(3):  # also where it is not asked again
            ready = api.get("/ready")
            assert (ready.status_code, ready.json()["status"]) == (503, "failed")
        # The video in progress is finished, which cannot be stored yet.
        wait_until(lambda: running_steps(api, running) == 12 * LONG["num_inference_steps"])
        time.sleep(max(0.0, LEASE_S + 1 - (time.monotonic() - killed)))
        postgres.start()
        wait_until(lambda: api.get("/ready").status_code == 200)
        expected = session.step("action 2").frames
        assert np.array_equal(frames_of(step(api, world, 2)), expected)
        assert np.array_equal(frames_of(step(api, world, 2)), expected)  # also when it is repeated
        for video in (running, *queued, order(api).json()["id"]):
            assert wait_for(api, video)["status"] == "completed"
            assert api.get(f"/v1/videos/{video}/content").status_code == 200


# Disks


@contextmanager
def disk(folder: Path, size: str) -> Iterator[None]:
    """A small file system of its own; only root can have one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    if os.geteuid() or subprocess.run(mount).returncode:
        pytest.skip("only root can mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> Path:
    """Leave no byte free, and return the file to delete."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (2**16, 2**10, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue
    return ballast


@pytest.mark.slow
def test_a_full_disk_loses_nothing(model: WorldModel, tmp_path: Path, png: bytes) -> None:
    data = tmp_path / "data"
    with disk(data, "16m"), local(model, data, max_running_jobs=1) as api:
        world = api.post("/v1/worlds", json={"text": "a ball", "num_inference_steps": 1}).json()["id"]
        earlier = wait_for(api, order(api).json()["id"])["id"]
        running = order(api, **LONG).json()["id"]
        queued = order(api, seed=2).json()["id"]
        wait_for(api, running, "in_progress", progress=1)
        ballast = fill(data)
        assert_unavailable(order(api))
        upload = {"input_reference": ("x.png", png)}
        assert_unavailable(api.post("/v1/videos", data={"prompt": "go"}, files=upload))
        assert api.get(f"/v1/videos/{earlier}/content").status_code == 200
        assert step(api, world, 1).status_code == 200
        assert api.get("/health").status_code == 200
        wait_until(lambda: running_steps(api, running) == 12 * LONG["num_inference_steps"])
        time.sleep(2.5)  # it is tried again, and not given up
        assert api.get(f"/v1/videos/{running}").json()["status"] == "in_progress"
        ballast.unlink()
        for video in (running, queued, order(api).json()["id"]):
            assert wait_for(api, video)["status"] == "completed"
            assert api.get(f"/v1/videos/{video}/content").status_code == 200
        assert not list(data.glob(".writing-*"))


@pytest.mark.slow
def test_a_video_that_cannot_be_stored_is_left_to_the_next_server_or_deleted(
    model: WorldModel, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    url = f"sqlite:///{tmp_path / 'server.db'}"
    with disk(data, "4m"):
        with local(model, data, database=url) as api:
            left, deleted = (order(api, seed=seed, **LONG).json()["id"] for seed in (1, 2))
            wait_for(api, deleted, "in_progress", progress=1)
            ballast = fill(data)
            for video in (left, deleted):
                wait_until(lambda video=video: running_steps(api, video) == 12 * LONG["num_inference_steps"])
            assert api.delete(f"/v1/videos/{deleted}").status_code == 200
            assert api.get(f"/v1/videos/{deleted}").status_code == 404
        ballast.unlink()
        with local(model, data, database=url) as api:
            assert wait_for(api, left)["status"] == "completed"
            assert [each["id"] for each in api.get("/v1/videos").json()["data"]] == [left]


@pytest.mark.slow
def test_a_disk_that_turns_read_only_loses_nothing(model: WorldModel, tmp_path: Path, png: bytes) -> None:
    data = tmp_path / "data"
    url = f"sqlite:///{tmp_path / 'server.db'}"
    with disk(data, "16m"), local(model, data, database=url, max_running_jobs=1) as api:
        earlier = wait_for(api, order(api).json()["id"])["id"]
        running = order(api, **LONG).json()["id"]
        wait_for(api, running, "in_progress", progress=1)
        subprocess.run(["mount", "-o", "remount,ro", data], check=True)
        upload = {"input_reference": ("x.png", png)}
        assert_unavailable(api.post("/v1/videos", data={"prompt": "go"}, files=upload))
        queued = order(api).json()["id"]  # the database takes it
        assert api.get(f"/v1/videos/{earlier}/content").status_code == 200
        wait_until(lambda: running_steps(api, running) == 12 * LONG["num_inference_steps"])
        time.sleep(1.5)
        assert api.get(f"/v1/videos/{running}").json()["status"] == "in_progress"
        assert api.delete(f"/v1/videos/{earlier}").status_code == 200
        assert api.get(f"/v1/videos/{earlier}/content").status_code == 404
        subprocess.run(["mount", "-o", "remount,rw", data], check=True)
        for video in (running, queued):
            assert wait_for(api, video)["status"] == "completed"


def test_uploads_that_find_no_place_in_the_temporary_folder_are_refused(
    model: WorldModel, tmp_path: Path, png: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    with disk(temporary, "1m"), local(model, tmp_path / "data") as api:
        fill(temporary)
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        large = {"observation": ("x.mp4", bytes(3 * 2**20))}
        assert_unavailable(api.post("/v1/worlds", files=large))
        small = {"observation": ("x.png", png)}
        assert api.post("/v1/worlds", files=small).status_code == 200
