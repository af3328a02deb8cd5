"""A server without --database: no lease, no heartbeat, and its data folder to itself."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from served import error_of, frames_of, local, step, wait_for
from sqlalchemy import Engine, event

from worldmodel.errors import OutputError
from worldmodel.media.encoding import encode_png
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.realtime.connection import ROUTE
from worldmodel.serving.replicas.database import FolderLock, replicas
from worldmodel.serving.replicas.replica import HEARTBEAT_S


@contextmanager
def statements() -> Iterator[list[str]]:
    """Collects the SQL statements of all databases of this process."""
    found: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        found.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def test_no_statement_runs_while_a_world_is_played(model: WorldModel, tmp_path: Path) -> None:
    with local(model, tmp_path) as api:
        with statements() as ordering:
            api.get("/v1/videos")
        assert ordering, "the orders of videos are in the database"
        with statements() as playing:
            world = api.post("/v1/worlds", json={"text": "a ball", "num_inference_steps": 1}).json()["id"]
            for number in (1, 2, 3):
                body = {"step_id": number, "action": {"text": "go"}}
                assert api.post(f"/v1/worlds/{world}/step", json=body).status_code == 200
            time.sleep(2 * HEARTBEAT_S)
        assert playing == []
        database = api.app.state.context.database  # type: ignore[attr-defined]
        assert database.run_now(lambda db: db.execute(sa.select(replicas)).all()) == []


def test_a_second_server_on_the_folder_is_refused_and_the_next_one_is_not(
    model: WorldModel, tmp_path: Path
) -> None:
    with local(model, tmp_path) as api:
        with pytest.raises(OutputError, match="--data-dir"):
            local(model, tmp_path)
        with pytest.raises(OutputError, match="--database"):
            FolderLock(tmp_path, shared=True)
        order = {"prompt": "a ball", "num_frames": 512, "num_inference_steps": 64}
        video = api.post("/v1/videos", json=order).json()["id"]
        wait_for(api, video, "in_progress")
    with local(model, tmp_path) as api:
        wait_for(api, video, "in_progress")
        assert api.delete(f"/v1/videos/{video}").status_code == 200


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """A folder on a disk that nobody can write; without root, one that its owner must not write."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", folder]
    mounted = os.geteuid() == 0 and subprocess.run(mount, check=False).returncode == 0
    if not mounted:
        if os.geteuid() == 0:
            pytest.skip("root can write every folder, and mounts none here")
        folder.chmod(0o500)
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", folder], check=True)
        else:
            folder.chmod(0o700)


@pytest.mark.parametrize("name", ["", "server/data"])
def test_a_server_that_can_write_nothing_serves_all_but_videos(
    name: str, model: WorldModel, image: np.ndarray, tmp_path: Path
) -> None:
    with read_only(tmp_path / "disk") as disk, local(model, disk / name) as api:
        ready = api.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (200, "ok")
        assert "videos" in ready.json()["missing"]
        assert api.get("/health").json() == {"status": "ok"}
        upload = {"observation": ("x.png", encode_png(image))}
        world = api.post("/v1/worlds", files=upload, data={"seed": "3"}).json()["id"]
        session = model.session(seed=3)
        session.reset(image)
        assert np.array_equal(frames_of(step(api, world, 1)), session.step("action 1").frames)
        assert api.post(f"/v1/worlds/{world}/fork").status_code == 200
        with api.websocket_connect(ROUTE) as socket:
            assert socket.receive_json()["type"] == "session.created"
            socket.send_json({"type": "session.start", "text": "a ball", "num_inference_steps": 1})
            assert socket.receive_json()["type"] == "video.start"
        order = {"prompt": "a ball", "num_frames": 8}
        for response in (
            api.post("/v1/videos", json=order),
            api.post("/v1/videos", json=order, headers={"idempotency-key": "a"}),
            api.post(
                "/v1/videos", data={"prompt": "a"}, files={"input_reference": ("x.png", encode_png(image))}
            ),
            api.post("/v1/videos/edits", data={"prompt": "a"}, files={"video": ("x.mp4", b"x")}),
        ):
            message = error_of(response, 503)["message"]
            assert message.count(".") == 1 and str(tmp_path) not in message
        assert api.get("/v1/videos").json()["data"] == []
        error_of(api.get("/v1/videos/video_1"), 404)
        assert "worldmodel_queued_jobs 0.0" in api.get("/metrics").text
        assert not any(disk.iterdir())


def test_replicas_need_a_data_folder_that_they_can_write(model: WorldModel, tmp_path: Path) -> None:
    with read_only(tmp_path / "disk") as disk, pytest.raises(OutputError, match="--data-dir"):
        local(model, disk, database=f"sqlite:///{tmp_path / 'server.db'}")


def test_a_data_folder_that_is_a_file_is_refused(model: WorldModel, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file"):
        local(model, tmp_path / "file")


def test_replicas_share_the_lock(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path, shared=True), FolderLock(tmp_path, shared=True)
    first.release()
    with pytest.raises(OutputError):
        FolderLock(tmp_path, shared=False)
    second.release()
    FolderLock(tmp_path, shared=False).release()


def test_the_length_of_the_queue_is_in_the_metrics(model: WorldModel, tmp_path: Path) -> None:
    order = {"prompt": "a ball", "num_frames": 512, "num_inference_steps": 64}
    with local(model, tmp_path, max_running_jobs=1) as api:
        for _ in range(3):
            api.post("/v1/videos", json=order)
        until = time.monotonic() + 30
        while "worldmodel_queued_jobs 2.0" not in api.get("/metrics").text:
            assert time.monotonic() < until
            time.sleep(0.05)
