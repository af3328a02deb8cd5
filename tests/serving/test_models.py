"""Models that an administrator adds and removes while a server runs."""

import asyncio
import base64
import json
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_client import LocalClient
from safetensors.torch import load_file, save_file
from served import KEYS, bearer, decoded, error_of, frames_of, local, near, step, wait_for

from worldmodel.errors import ConfigError
from worldmodel.media import encoding
from worldmodel.models.world_model import WorldModel
from worldmodel.serving import loading
from worldmodel.serving.auth import Keys
from worldmodel.serving.engine import limits
from worldmodel.serving.models import ServedModels
from worldmodel.serving.realtime.connection import ROUTE
from worldmodel.serving.server import load_app
from worldmodel.serving.settings import EngineOptions, ServerConfig
from worldmodel.serving.worlds.service import WorldService

ADMIN, OTHER = map(bearer, KEYS)
LOAD, UNLOAD = "/v1/load_model", "/v1/unload_model"
SETTINGS: dict[str, Any] = {"num_inference_steps": 2, "seed": 3}


@pytest.fixture(scope="module")
def folders(make_model: Callable[..., WorldModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models: one with wide frames, one like the server's with other weights."""
    root = tmp_path_factory.mktemp("models")
    make_model(seed=1, image_size=(32, 48)).save_pretrained(root / "wide", dtype=torch.float32)
    make_model(seed=2).save_pretrained(root / "other", dtype=torch.float32)
    return root


@pytest.fixture(scope="module")
def wide(folders: Path) -> WorldModel:
    return WorldModel.from_pretrained(folders / "wide")


@pytest.fixture
def api(model: WorldModel, folders: Path, tmp_path: Path) -> Iterator[LocalClient]:
    """A server with an administrator's key and another one, and a folder of models."""
    keys = tmp_path / "keys"
    keys.write_text(f"{KEYS[0]} admin\n{KEYS[1]}\n", "ascii")
    keys.chmod(0o600)
    with local(model, tmp_path / "data", keys=Keys.load(keys), models_dir=folders) as client:
        client.headers.update(ADMIN)
        yield client


def load(api: LocalClient, name: str, path: str, **options: Any) -> Any:
    return api.post(LOAD, json={"model_name": name, "model_path": path}, **options)


def unload(api: LocalClient, name: str, **options: Any) -> Any:
    return api.post(UNLOAD, json={"model_name": name}, **options)


def start(api: LocalClient, **fields: Any) -> Any:
    return api.post("/v1/worlds", json={"text": "a red ball", **SETTINGS, **fields})


def test_an_administrator_adds_a_model_that_all_routes_offer(
    api: LocalClient, wide: WorldModel, model: WorldModel
) -> None:
    base = start(api).json()
    added = load(api, "wide", "wide").json()
    assert (added["id"], added["size"], added["fps"]) == ("wide", "48x32", wide.config.fps)
    listed = api.get("/v1/models", headers=OTHER).json()["data"]
    assert [(each["id"], each["size"]) for each in listed] == [("tiny", "32x32"), ("wide", "48x32")]
    assert api.get("/v1/models/wide").json() == added == listed[1]

    session = wide.session(**SETTINGS)
    session.reset(text="a red ball")
    world = start(api, model="wide").json()
    assert (world["model"], world["size"]) == ("wide", "48x32")
    expected = [session.step(f"action {index}").frames for index in (1, 2)]
    for index, frames in enumerate(expected, start=1):
        assert near(frames_of(step(api, world["id"], index)), frames)
    assert near(frames_of(step(api, base["id"], 1)), played(model)[0])

    order = {"prompt": "a red ball", "model": "wide", "num_frames": 16, "actions": ["action 1"], **SETTINGS}
    video = wait_for(api, api.post("/v1/videos", json=order).json()["id"])
    assert (video["status"], video["model"], video["size"]) == ("completed", "wide", "48x32")
    film = api.get(f"/v1/videos/{video['id']}/content").content
    extension = {"prompt": "action 2", "video": {"id": video["id"]}}
    extended = wait_for(api, api.post("/v1/videos/extensions", json=extension).json()["id"])
    assert (extended["model"], extended["num_frames"]) == ("wide", 24)
    upload = {"video": ("x.mp4", film)}
    edit = {"prompt": "action 1", "model": "wide"}
    edited = wait_for(api, api.post("/v1/videos/edits", data=edit, files=upload).json()["id"])
    assert (edited["status"], edited["size"]) == ("completed", "48x32")
    named = {**extension, "model": "wide"}
    assert "own model" in error_of(api.post("/v1/videos/extensions", json=named), 400)["message"]

    images = api.post("/v1/images/generations", json={"prompt": "a ball", "model": "wide", "size": "48x32"})
    assert images.status_code == 200
    error_of(api.post("/v1/images/generations", json={"prompt": "a ball", "size": "48x32"}), 400)
    png = encoding.encode_png(expected[1][-1])
    answer = api.post("/v1/chat/completions", json=question(png, "wide")).json()
    assert answer["model"] == "wide"
    with api.websocket_connect(ROUTE, headers=OTHER) as socket:
        socket.receive_json()
        socket.send_json({"type": "session.start", "text": "a ball", "model": "wide", "num_frames": 8})
        event = socket.receive_json()
        assert (event["type"], event["width"], event["height"]) == ("video.start", 48, 32)
    assert api.get("/v1/models/wide/start_images").json()["data"] == []


def played(model: WorldModel) -> list[np.ndarray]:
    session = model.session(**SETTINGS)
    session.reset(text="a red ball")
    return [session.step(f"action {index}").frames for index in (1, 2)]


def question(png: bytes, model: str) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4}


def test_what_a_removed_model_did_ends_and_nothing_else(api: LocalClient, model: WorldModel) -> None:
    base = start(api).json()["id"]
    assert load(api, "wide", "wide").status_code == 200
    parameters = [weakref.ref(each) for each in served(api, "wide").model.parameters()]
    assert parameters
    idle = start(api, model="wide").json()["id"]
    exported = {"snapshot": ("world.safetensors", api.get(f"/v1/worlds/{idle}/snapshot").content)}
    finished = {"prompt": "a ball", "model": "wide", "num_frames": 8, "num_inference_steps": 1}
    earlier = wait_for(api, api.post("/v1/videos", json=finished).json()["id"])["id"]
    busy = start(api, model="wide", num_inference_steps=64).json()["id"]
    long = {"prompt": "a ball", "model": "wide", "num_frames": 512, "num_inference_steps": 64}
    video = api.post("/v1/videos", json=long).json()["id"]
    wait_for(api, video, "in_progress", progress=1)
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(step(api, busy, 1)))
    with api.websocket_connect(ROUTE, headers=OTHER) as mine, api.websocket_connect(ROUTE) as others:
        for socket, name in ((mine, "wide"), (others, "tiny")):
            assert socket.receive_json()["type"] == "session.created"
            begin = {"type": "session.start", "text": "a ball", "model": name, "pace": "on_action"}
            socket.send_json({**begin, "num_inference_steps": 1})
            assert socket.receive_json()["type"] == "video.start"
        waiting.start()
        while api.get(f"/v1/worlds/{busy}").json()["progress"] is None:
            continue
        assert unload(api, "wide").json() == {"id": "wide", "object": "model.deleted", "deleted": True}
        assert all(each() is None for each in parameters)
        while (event := mine.receive())["type"] == "websocket.send":
            if "session.done" in (event.get("text") or ""):
                assert json.loads(event["text"])["reason"] == "model_unloaded"
                break
        others.send_json({"type": "session.ping"})
        while "session.pong" not in (others.receive().get("text") or ""):
            continue
    waiting.join()
    assert error_of(answers[0], 404)["code"] == "model_unloaded"
    failed = wait_for(api, video)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "model_changed")
    assert error_of(api.get(f"/v1/worlds/{idle}"), 404)["code"] == "not_found"
    assert error_of(start(api, model="wide"), 404)["code"] == "model_not_found"
    assert decoded(api.get(f"/v1/videos/{earlier}/content").content).shape[0] == 8
    error_of(api.post(f"/v1/videos/{earlier}/remix", json={"prompt": "a box"}), 404)
    assert [each["id"] for each in api.get("/v1/models").json()["data"]] == ["tiny"]
    assert api.get("/ready").status_code == 200
    for index, frames in enumerate(played(model), start=1):
        assert np.array_equal(frames_of(step(api, base, index)), frames)
    error_of(api.post("/v1/worlds", files=exported), 400)
    assert load(api, "again", "wide").status_code == 200  # the name does not matter, the weights do
    assert api.post("/v1/worlds", files=exported).json()["model"] == "again"


def served(api: LocalClient, name: str) -> WorldService:
    app: Any = api.app
    return app.state.context.models.find(name).service


def test_a_model_of_another_server_goes_on_here_by_its_weights(
    api: LocalClient, wide: WorldModel, tmp_path: Path
) -> None:
    with local(wide, tmp_path / "there") as there:
        world = start(there).json()["id"]
        first = frames_of(step(there, world, 1))
        exported = there.get(f"/v1/worlds/{world}/snapshot").content
        second = frames_of(step(there, world, 2))
    assert load(api, "wide", "wide").status_code == 200
    here = api.post("/v1/worlds", files={"snapshot": ("world.safetensors", exported)}).json()
    assert (here["model"], here["round"]) == ("wide", 1)
    assert np.array_equal(frames_of(api.get(f"/v1/worlds/{here['id']}/frames?format=npy")), first)
    assert np.array_equal(frames_of(step(api, here["id"], 2)), second)


def test_worlds_of_several_models_play_at_the_same_time(
    model: WorldModel, folders: Path, wide: WorldModel
) -> None:
    """They share the thread, and no batch."""

    async def body() -> list[list[np.ndarray]]:
        service = WorldService(model)
        models = ServedModels(service, "tiny")
        added = [await models.add(name, folders / name) for name in ("wide", "other")]
        try:

            async def play(each: WorldService) -> list[np.ndarray]:
                world = await each.start(text="a red ball", **SETTINGS)
                return [await world.step(f"action {index}") for index in (1, 2)]

            services = [service, *(each.service for each in added)]
            return list(await asyncio.gather(*map(play, [*services, *services])))
        finally:
            await models.close()

    made = asyncio.run(body())
    expected = [played(each) for each in (model, wide, WorldModel.from_pretrained(folders / "other"))]
    assert not near(expected[0][1], expected[2][1])
    for own, session in zip(made, [*expected, *expected], strict=True):
        assert all(near(frames, clip) for frames, clip in zip(own, session, strict=True))


def test_other_models_go_on_while_one_is_loaded(api: LocalClient, monkeypatch: pytest.MonkeyPatch) -> None:
    world = start(api).json()["id"]
    began, go_on, load_ = threading.Event(), threading.Event(), loading.load

    def slowly(*args: Any) -> Any:
        began.set()
        assert go_on.wait(60)
        return load_(*args)

    monkeypatch.setattr(loading, "load", slowly)
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(load(api, "wide", "wide")))
    waiting.start()
    assert began.wait(60)
    assert step(api, world, 1).status_code == 200
    assert error_of(start(api, model="wide"), 404)["code"] == "model_not_found"
    go_on.set()
    waiting.join()
    assert answers[0].status_code == 200


def test_what_cannot_be_served_changes_nothing(
    api: LocalClient, folders: Path, model: WorldModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = start(api).json()["id"]
    (folders / "empty").mkdir(exist_ok=True)
    (folders / "file").touch()
    shutil.copytree(folders / "wide", folders / "nan", dirs_exist_ok=True)
    weights = load_file(folders / "nan" / "generator" / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = float("nan")
    save_file(weights, folders / "nan" / "generator" / "model.safetensors")
    shutil.copytree(folders / "wide", folders / "damaged", dirs_exist_ok=True)
    (folders / "damaged" / "config.json").write_text('{"format": 1, "model": {"nothing": 1}}')
    outside = ("..", ".", "../models", "/etc", str(folders / "wide"), "wide/codec", "https://a.b/c")
    for path in (*outside, "", "a\0", "wide\n", "x" * 65, "file", "nothing", "empty", "nan", "damaged"):
        assert error_of(load(api, "new", path), 400)["message"].count("\n") == 0, path
    for name in ("", "a b", "../x", "wide\n", "x" * 65):
        error_of(load(api, name, "wide"), 400)
    monkeypatch.setattr(limits, "_free_bytes", lambda device: 2**10)
    assert "memory" in error_of(load(api, "new", "wide"), 400)["message"]
    monkeypatch.undo()
    finish = WorldService._finished

    def broken(service: WorldService, rows: Any) -> Any:
        if service.name != "tiny":
            raise RuntimeError("shapes do not fit")
        return finish(service, rows)

    monkeypatch.setattr(WorldService, "_finished", broken)
    assert "play" in error_of(load(api, "new", "wide"), 400)["message"]
    monkeypatch.undo()
    assert error_of(load(api, "tiny", "wide"), 409)["code"] == "conflict"
    assert error_of(unload(api, "tiny"), 409)["code"] == "conflict"
    assert error_of(unload(api, "new"), 404)["code"] == "model_not_found"
    for refused in (load(api, "new", "wide", headers=OTHER), unload(api, "tiny", headers=OTHER)):
        error_of(refused, 403)
    with local(model, tmp_path / "without") as other:
        assert "--models-dir" in error_of(load(other, "new", "wide"), 403)["message"]
    assert [each["id"] for each in api.get("/v1/models").json()["data"]] == ["tiny"]
    assert np.array_equal(frames_of(step(api, world, 1)), played(model)[0])
    assert api.get("/ready").status_code == 200


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (EngineOptions(offload=True), "--offload"),
        (EngineOptions(sequence_parallel_size=2), "--sequence-parallel-size"),
        (EngineOptions(), "nowhere"),
    ],
)
def test_options_for_one_model_alone_exclude_others(
    options: EngineOptions, named: str, model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path if named.startswith("--") else tmp_path / "nowhere"
    config = ServerConfig("tiny", tmp_path / "data", models_dir=folder)
    with pytest.raises(ConfigError, match=named):
        asyncio.run(load_app(str(model_folder), config, "in-process", "cpu", options=options))
