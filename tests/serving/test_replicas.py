"""Replicas with one database: worlds are stored, move, and are played by one replica at a time."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from local_client import LocalClient
from served import KEYS, bearer, frames_of, local, step
from sqlalchemy import Connection

from worldmodel.errors import OutputError
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.auth import Keys
from worldmodel.serving.context import ServerContext
from worldmodel.serving.replicas.database import worlds
from worldmodel.serving.replicas.replica import LEASE_S
from worldmodel.serving.worlds.saved import Origin

MINE, OTHER = map(bearer, KEYS)


class Replicas:
    """Starts replicas of one model with one database, each in an event loop of its own."""

    def __init__(self, model: WorldModel, url: str, folder: Path, stack: ExitStack) -> None:
        self.model, self.url, self.folder, self.stack = model, url, folder, stack

    def start(self, model: WorldModel | None = None, **limits: Any) -> LocalClient:
        api = local(model or self.model, self.folder, keys=Keys(KEYS), database=self.url, **limits)
        api.headers.update(MINE)
        return self.stack.enter_context(api)


@pytest.fixture
def replicas(url: str, model: WorldModel, tmp_path: Path) -> Iterator[Replicas]:
    with ExitStack() as stack:
        yield Replicas(model, url, tmp_path / "data", stack)


def context_of(api: LocalClient) -> ServerContext:
    app: Any = api.app
    return app.state.context


def call(api: LocalClient, function: Any, *args: Any) -> Any:
    assert api.portal is not None
    return api.portal.call(function, *args)


def create(api: LocalClient, **fields: Any) -> str:
    response = api.post("/v1/worlds", json={"text": "a ball", "num_inference_steps": 1, **fields})
    assert response.status_code == 200, response.text
    return response.json()["id"]


def suspend(api: LocalClient) -> None:
    """Stop the heartbeats of a replica, as a machine that is suspended does."""

    async def stop() -> None:
        replica = context_of(api).replica
        assert replica is not None
        assert replica._beating is not None
        replica._beating.cancel()

    call(api, stop)


def test_a_world_whose_client_leaves_while_it_is_stored_is_not_kept(replicas: Replicas) -> None:
    api = replicas.start()

    def stored(db: Connection) -> int:
        return len(db.execute(sa.select(worlds.c.id)).all())

    async def leave() -> tuple[int, int]:
        context = context_of(api)
        database, service = context.database, context.models.first
        settings = service.settings(num_inference_steps=1)
        starting = asyncio.create_task(context.worlds.start("me", service, Origin(text="a ball"), settings))
        while not database.run_now(stored):  # in the event loop, which cannot go on meanwhile
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait({starting})
        assert starting.cancelled()
        return len(context.worlds), database.run_now(stored)

    assert call(api, leave) == (0, 0)


def test_no_id_is_an_error_of_the_database(replicas: Replicas) -> None:
    """PostgreSQL has no text with a zero byte."""
    api = replicas.start()
    for path in ("/v1/worlds/%00", "/v1/videos/video_%00"):
        assert api.get(path).status_code == 400, path
    source = {"video": {"id": "video_\0"}, "prompt": "go"}
    assert api.post("/v1/videos/edits", json=source).status_code == 400


def test_world_moves_to_the_replica_that_is_asked(replicas: Replicas, model: WorldModel) -> None:
    first, second = replicas.start(), replicas.start()
    session = model.session(seed=0, num_inference_steps=1)
    session.reset(text="a ball")
    world = create(first)
    for round_number, api in enumerate((first, second, second, first, second), start=1):
        played = frames_of(step(api, world, round_number, "go"))
        assert np.array_equal(played, session.step("go").frames), round_number
    repeated = step(first, world, 5, "go")
    assert np.array_equal(frames_of(repeated), session._state.frames[0])  # type: ignore[union-attr]
    assert step(first, world, 5, "other").json()["error"]["code"] == "step_already_committed"
    assert len(context_of(first).worlds) == 1
    assert len(context_of(second).worlds) == 0
    missing = second.get(f"/v1/worlds/{world}", headers=OTHER)
    assert missing.status_code == 404
    assert missing.json() == second.get("/v1/worlds/world-nothing", headers=OTHER).json()


def test_stopped_replica_leaves_its_worlds(replicas: Replicas) -> None:
    with ExitStack() as stack:
        stopping = Replicas(replicas.model, replicas.url, replicas.folder, stack).start(rounds_per_save=10)
        world = create(stopping)
        expected = [frames_of(step(stopping, world, index, "go")) for index in (1, 2)]
    second = replicas.start()
    began = time.monotonic()
    assert second.get(f"/v1/worlds/{world}").json()["round"] == 2
    assert time.monotonic() - began < LEASE_S
    assert np.array_equal(frames_of(step(second, world, 2, "go")), expected[1])


def test_suspended_replica_cannot_go_on_with_a_world_that_was_taken(replicas: Replicas) -> None:
    first, second = replicas.start(), replicas.start()
    saved_late = replicas.start(rounds_per_save=10)
    worlds = [create(first), create(saved_late)]
    for api, world in zip((first, saved_late), worlds, strict=True):
        step(api, world, 1, "go")
        suspend(api)
    assert [second.get(f"/v1/worlds/{world}").json()["round"] for world in worlds] == [1, 0]
    refused = step(first, worlds[0], 2, "go")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "world_moved")
    assert step(saved_late, worlds[1], 2, "go").status_code == 503
    assert frames_of(step(second, worlds[0], 2, "go")).shape == (8, 32, 32, 3)


def test_world_in_a_call_is_held(replicas: Replicas) -> None:
    first, second = replicas.start(), replicas.start()
    world = create(first)
    entry = call(first, context_of(first).worlds.get, context_of(first).keys.caller(KEYS[0]), world)
    call(first, entry.lock.acquire)
    held = second.get(f"/v1/worlds/{world}")
    assert (held.status_code, held.json()["error"]["code"]) == (409, "world_held")

    async def unlock() -> None:
        entry.lock.release()

    call(first, unlock)
    assert second.get(f"/v1/worlds/{world}").status_code == 200


def test_deleted_and_idle_worlds_leave_the_database(replicas: Replicas) -> None:
    first, second = replicas.start(), replicas.start()
    worlds = [create(first) for _ in range(3)]
    assert first.delete(f"/v1/worlds/{worlds[0]}").status_code == 200
    assert second.delete(f"/v1/worlds/{worlds[1]}").status_code == 200
    call(first, context_of(first).worlds.sweep, -1.0)
    for world in worlds:
        assert second.get(f"/v1/worlds/{world}").status_code == 404


def test_limits_hold_for_resumed_worlds_and_forks_are_stored(replicas: Replicas) -> None:
    first, second = replicas.start(), replicas.start(max_worlds_per_key=1)
    world = create(first)
    fork = first.post(f"/v1/worlds/{world}/fork").json()["id"]
    assert second.get(f"/v1/worlds/{fork}").status_code == 200
    refused = second.get(f"/v1/worlds/{world}")
    assert refused.status_code == 429
    assert first.get(f"/v1/worlds/{world}").status_code == 200  # it was let go again


def test_requests_that_resume_a_world_at_the_same_time_get_one(replicas: Replicas) -> None:
    with ExitStack() as stack:
        world = create(Replicas(replicas.model, replicas.url, replicas.folder, stack).start())
    second = replicas.start()
    caller = context_of(second).keys.caller(KEYS[0])

    async def both() -> list[Any]:
        worlds = context_of(second).worlds
        return await asyncio.gather(*(worlds.get(caller or "", world) for _ in range(4)))

    found = call(second, both)
    assert {id(each) for each in found} == {id(found[0])}
    assert len(context_of(second).worlds) == 1


def test_replica_with_another_model_is_refused(replicas: Replicas, make_model: Any) -> None:
    replicas.start()
    with pytest.raises(OutputError, match="--database"):
        replicas.start(make_model(1))
