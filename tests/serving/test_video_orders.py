"""Orders of videos on disk: what the next server on a data folder does with them."""

import asyncio
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from served import decoded, local, wait_for

from worldmodel.actions import Action
from worldmodel.leases import Holder
from worldmodel.media import encoding
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.saved import identify
from worldmodel.serving.auth import ANONYMOUS
from worldmodel.serving.replicas.database import Database, videos
from worldmodel.serving.settings import ServerConfig
from worldmodel.serving.videos.orders import Orders, _columns
from worldmodel.serving.videos.record import RECORDS, VideoPlan, VideoRecord, new_record
from worldmodel.serving.worlds.service import WorldSettings

SETTINGS = WorldSettings(num_inference_steps=1, seed=3, adapter=None)
FOREVER = {"prompt": "a red ball", "num_frames": 512, "num_inference_steps": 64}


def order(folder: Path, **values: Any) -> VideoRecord:
    """Store an order as a server does before it accepts one."""
    fields = {"model": "tiny", "prompt": "a red ball", "size": "32x32", "seconds": "1", "num_frames": 8}
    plan = VideoPlan(SETTINGS, (Action(),), text="a red ball")
    fields |= {"fps": 8, "seed": 3, "plan": plan}
    record = new_record(ANONYMOUS, ServerConfig("tiny", folder), **{**fields, **values})
    folder.mkdir(parents=True, exist_ok=True)
    row = {"id": record.id, "steps_done": 0, **_columns(record)}
    change(folder, sa.insert(videos).values(**row))
    return record


def change(folder: Path, *statements: Any) -> None:
    """Change the database of a server that does not run."""
    database = Database(f"sqlite:///{folder / 'server.db'}")
    for statement in statements:
        database.run_now(lambda db, statement=statement: db.execute(statement))
    database.close()


def stored(folder: Path, video_id: str) -> dict[str, Any]:
    database = Database(f"sqlite:///{folder / 'server.db'}")
    chosen = sa.select(videos.c.record).where(videos.c.id == video_id)
    text = database.run_now(lambda db: db.scalar(chosen))
    database.close()
    return json.loads(text or "{}")


def test_orders_are_stored_with_their_input_before_they_are_accepted(
    world: WorldModel, image: np.ndarray, tmp_path: Path
) -> None:
    """The data folder as a killed server leaves it: every order that it accepted can be generated."""
    actions = [
        {"keys": [world.config.action.keys[0]], "mouse": [0.5, -0.25]},
        {"camera": {"mode": "velocity", "data": {"translation": [0.0, 0.0, 0.5]}}},
    ]
    with local(world, tmp_path / "killed", max_running_jobs=1) as api:
        running = api.post("/v1/videos", json=FOREVER).json()["id"]
        fields = {"prompt": "the red ball moves left", "seed": "3", "actions": json.dumps(actions)}
        upload = {"input_reference": ("a.png", encoding.encode_png(image))}
        headers = {"idempotency-key": "one"}
        queued = api.post("/v1/videos", data=fields, files=upload, headers=headers).json()["id"]
        while stored(tmp_path / "killed", running)["attempts"] == 0:
            time.sleep(0.01)
        shutil.copytree(tmp_path / "killed", tmp_path / "left")
    film_without_record = tmp_path / "left" / f"{running}.mp4"
    film_without_record.write_bytes(b"")
    os.utime(film_without_record, (0, 0))

    with local(world, tmp_path / "left", max_running_jobs=2) as api:
        assert api.post("/v1/videos", data=fields, files=upload, headers=headers).json()["id"] == queued
        wait_for(api, queued, "completed")
        film = decoded(api.get(f"/v1/videos/{queued}/content").content)
        assert wait_for(api, running, "in_progress")["progress"] < 100
        while stored(tmp_path / "left", running)["attempts"] == 1:  # until the killed server's lease ends
            time.sleep(0.05)
        assert stored(tmp_path / "left", running)["attempts"] == 2
        assert not film_without_record.exists()
        api.delete(f"/v1/videos/{queued}")
        assert not list((tmp_path / "left").glob(f"{queued}*"))

    session = world.session(seed=3)
    session.reset(image)
    rounds = [session.step(action).frames for action in ("the red ball moves left", *actions)]
    expected = decoded(encoding.encode_video(np.concatenate(rounds), world.config.fps))
    assert film.shape == expected.shape
    assert np.abs(film.astype(int) - expected.astype(int)).mean() < 1


def test_orders_run_in_their_sequence_after_a_restart(model: WorldModel, tmp_path: Path) -> None:
    ids = [order(tmp_path, weights=identify(model)).id for _ in range(6)]
    with local(model, tmp_path, max_running_jobs=1) as api:
        listed = api.get("/v1/videos", params={"order": "asc"}).json()["data"]
        assert [each["id"] for each in listed] == ids
        wait_for(api, ids[-1], "completed")
        assert all(api.get(f"/v1/videos/{each}").json()["status"] == "completed" for each in ids)


def test_stopped_server_leaves_its_orders_to_the_next(model: WorldModel, tmp_path: Path) -> None:
    with local(model, tmp_path, max_running_jobs=1) as api:
        running, queued = (api.post("/v1/videos", json=FOREVER).json()["id"] for _ in range(2))
        wait_for(api, running, "in_progress")
    for each in (running, queued):
        assert (stored(tmp_path, each)["status"], stored(tmp_path, each)["attempts"]) == ("queued", 0)


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"status": "in_progress", "attempts": 3}, "server_restarted"),
        ({"model": "another"}, "model_changed"),
        ({"size": "64x64"}, "model_changed"),
        ({"weights": "another"}, "model_changed"),
        ({"plan": VideoPlan(SETTINGS, (Action(),))}, "files_lost"),
        ({"status": "completed", "completed_at": 1}, "files_lost"),
    ],
)
def test_order_that_cannot_be_generated_fails_and_may_be_sent_again(
    values: dict[str, Any], code: str, model: WorldModel, tmp_path: Path
) -> None:
    body = {"prompt": "a red ball", "num_frames": 8, "num_inference_steps": 1}
    with local(model, tmp_path) as api:
        first = api.post("/v1/videos", json=body, headers={"idempotency-key": "one"}).json()["id"]
        wait_for(api, first, "completed")
    keys = {name: stored(tmp_path, first)[name] for name in ("idempotency", "fingerprint", "weights")}
    change(tmp_path, sa.delete(videos))
    lost = order(tmp_path, **{**keys, **values})

    with local(model, tmp_path) as api:
        failed = wait_for(api, lost.id, "failed")
        assert (failed["status"], failed["error"]["code"]) == ("failed", code)
        again = api.post("/v1/videos", json=body, headers={"idempotency-key": "one"}).json()["id"]
        assert again != lost.id
        assert wait_for(api, again, "completed", "failed")["status"] == "completed"
        assert api.post("/v1/videos", json=body, headers={"idempotency-key": "one"}).json()["id"] == again


def test_expired_and_damaged_orders_do_not_run(model: WorldModel, tmp_path: Path) -> None:
    expired, damaged = order(tmp_path, status="queued"), order(tmp_path)
    text = json.dumps({"id": damaged.id, "plan": {}})
    change(
        tmp_path,
        sa.update(videos).where(videos.c.id == expired.id).values(expires_at=1),
        sa.update(videos).where(videos.c.id == damaged.id).values(record=text),
    )
    with local(model, tmp_path) as api:
        assert api.get("/v1/videos").json()["data"] == []
    assert stored(tmp_path, expired.id) == {}


def test_full_queue_is_answered_before_the_request_is_checked(model: WorldModel, tmp_path: Path) -> None:
    """A refusal waits neither for the thread of the model nor for a decoder."""
    with local(model, tmp_path, max_running_jobs=1, max_queued_jobs=1) as api:
        for _ in range(2):
            api.post("/v1/videos", json=FOREVER)
        broken = {"input_reference": ("a.png", b"\x89PNG\r\n\x1a\n")}
        assert api.post("/v1/videos", data={"prompt": "a red ball"}, files=broken).status_code == 429


def test_orders_of_the_key_with_the_fewest_in_progress_come_first(tmp_path: Path) -> None:
    owners = ["a", "a", "a", "b", "a", "c"]
    ids = [order(tmp_path, seed=number).id for number in range(len(owners))]
    for owner, video_id in zip(owners, ids, strict=True):
        record = RECORDS.validate_python({**stored(tmp_path, video_id), "owner": owner})
        change(tmp_path, sa.update(videos).where(videos.c.id == video_id).values(_columns(record)))
    database = Database(f"sqlite:///{tmp_path / 'server.db'}")
    orders = Orders(database, Holder(), ServerConfig("tiny", tmp_path))

    async def claims() -> tuple[list[int], list[int]]:
        waiting = [await orders.get(video_id) for video_id in ids]
        positions = [each.position or 0 for each in waiting if each is not None]
        claimed = [await orders.claim() for _ in ids]
        return positions, [ids.index(record.id) for record in claimed if record is not None]

    positions, claimed = asyncio.run(claims())
    database.close()
    assert claimed == [0, 3, 5, 1, 2, 4]
    assert [claimed[position - 1] for position in positions] == list(range(len(ids)))


def test_record_survives_the_disk(tmp_path: Path) -> None:
    action = Action.of({"text": "go", "keys": ["left"], "vector": [0.1, 2.0], "mouse": [0.5, 0.0]})
    settings = replace(SETTINGS, seed=2**62, guidance_scale=1.5, adapter="style")
    record = order(
        tmp_path, plan=VideoPlan(settings, (action, Action())), error={"code": "a", "message": "b"}
    )
    assert RECORDS.validate_python(stored(tmp_path, record.id)) == record
