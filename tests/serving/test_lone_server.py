"""A server without --database: no lease, no heartbeat, and its data folder to itself."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from served import local, wait_for
from sqlalchemy import Engine, event

from worldmodel.errors import OutputError
from worldmodel.models.world_model import WorldModel
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
