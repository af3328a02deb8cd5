"""Adapters by request: LoRA of the backbone and the generator, queries, several in one batch."""

import asyncio
import json
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from local_client import LocalClient
from safetensors.torch import load_file, save_file
from served import KEYS, bearer, error_of, frames_of, local, near, wait_for
from tiny_models import tiny_config

from worldmodel.config import TrainedConfig
from worldmodel.errors import ConfigError, InputError, ModelError
from worldmodel.models import lora
from worldmodel.models.adapters import Adapters
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.auth import Keys
from worldmodel.serving.client import Client
from worldmodel.serving.engine.adapters import ServedAdapters
from worldmodel.serving.engine.batching import Compute
from worldmodel.serving.engine.local import InProcessEngine
from worldmodel.serving.errors import ConflictError, NotFoundError
from worldmodel.serving.models import Served, ServedModels
from worldmodel.serving.realtime.connection import ROUTE
from worldmodel.serving.server import load_app
from worldmodel.serving.settings import EngineOptions, ServerConfig
from worldmodel.serving.worlds.saved import Origin, SavedWorld
from worldmodel.serving.worlds.service import WorldService

ACTIONS = ("the red ball moves left", "the blue box jumps")
PARTS = {"text": ("backbone",), "look": ("generator", "condition_adapter"), "both": ("backbone", "generator")}
"""Components of each adapter; the last one replaces the queries, too."""
WORLDS = (None, *PARTS)


@pytest.fixture(scope="module")
def folders(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of different parts and ranks, as an export writes them."""
    root = tmp_path_factory.mktemp("adapters")
    for rank, (name, components) in enumerate(PARTS.items(), 2):
        model = WorldModel.from_pretrained(model_folder)
        train = {component: TrainedConfig(lora_rank=rank) for component in components}
        torch.manual_seed(rank)
        lora.add(model, train)
        for key, parameter in model.named_parameters():
            if ".lora_B." in key:
                parameter.data.normal_(std=0.3)
        lora.save(model, train, root / name)
    base = WorldModel.from_pretrained(model_folder)
    save_file({"queries": torch.randn_like(base.queries)}, root / "both" / lora.WHOLE)
    return {name: root / name for name in PARTS}


@pytest.fixture(scope="module")
def expected(
    folders: dict[str, Path], model_folder: Path, image: np.ndarray
) -> dict[str | None, SimpleNamespace]:
    """What models with one merged adapter generate and say."""
    results: dict[str | None, SimpleNamespace] = {}
    for name in WORLDS:
        merged = WorldModel.from_pretrained(model_folder, adapters=folders[name] if name else None)
        session = merged.session(seed=3, num_inference_steps=2)
        session.reset(image)
        clips = [session.step(action).frames for action in ACTIONS]
        results[name] = SimpleNamespace(clips=clips, text=session.describe())
    return results


def serve(model: WorldModel, folders: dict[str, Path], body: Any) -> Any:
    async def whole() -> Any:
        compute, adapters = Compute(), ServedAdapters(model, folders)
        engine = InProcessEngine(model.backbone, compute, adapters)
        service = WorldService(model, engine, compute=compute, adapters=adapters)
        try:
            return await asyncio.wait_for(body(service), 120)
        finally:
            await service.close()

    return asyncio.run(whole())


@pytest.mark.slow
def test_worlds_of_several_adapters_match_merged_models(
    folders: dict[str, Path],
    expected: dict[str | None, SimpleNamespace],
    model_folder: Path,
    image: np.ndarray,
) -> None:
    async def body(service: WorldService) -> list[tuple[list[np.ndarray], str]]:
        assert service.engine.adapters == tuple(PARTS)

        async def one(name: str | None) -> tuple[list[np.ndarray], str]:
            world = await service.start(image[None], seed=3, num_inference_steps=2, adapter=name)
            return [await world.step(action) for action in ACTIONS], await world.describe()

        return list(await asyncio.gather(*(one(name) for name in WORLDS)))

    played = serve(WorldModel.from_pretrained(model_folder), folders, body)
    for name, (clips, text) in zip(WORLDS, played, strict=True):
        wanted = expected[name]
        assert text == wanted.text, name
        assert all(near(made, clip) for made, clip in zip(clips, wanted.clips, strict=True)), name
    different = [expected[name].clips[-1].astype(int) for name in WORLDS]
    for row, clip in enumerate(different):
        for other in different[:row]:
            assert np.abs(clip - other).max() > 1


@pytest.mark.parametrize(
    "file", ["backbone/adapter_model.safetensors", "backbone/adapter_config.json", lora.WHOLE]
)
def test_exported_world_goes_on_with_the_adapter_that_made_it_alone(
    file: str, folders: dict[str, Path], model_folder: Path, image: np.ndarray, tmp_path: Path
) -> None:
    """Another adapter of the same name, whatever file of it differs, is refused."""

    async def export(service: WorldService) -> bytes:
        world = await service.start(image[None], seed=3, num_inference_steps=1, adapter="robot")
        return SavedWorld(world.settings, world.state(), Origin(image[None])).to_bytes(service.identity)

    async def load(service: WorldService) -> int:
        saved = SavedWorld.from_bytes(data, service.model, service.identity)
        return (await service.resume(saved.settings, saved.state)).round

    def start(folder: Path, body: Any) -> Any:
        return serve(
            WorldModel.from_pretrained(model_folder), {"other": folders["text"], "robot": folder}, body
        )

    data = start(folders["both"], export)
    copied = shutil.copytree(folders["both"], tmp_path / "copied")
    assert start(copied, load) == 0
    if file.endswith(".json"):
        config = json.loads((copied / file).read_text("utf-8"))
        (copied / file).write_text(json.dumps(config | {"lora_alpha": 2 * config["lora_alpha"]}), "utf-8")
    else:
        weights = load_file(copied / file)
        next(iter(weights.values())).view(-1)[-1] += 1e-3
        save_file(weights, copied / file)
    with pytest.raises(InputError, match="robot"):
        start(copied, load)


def test_adapters_come_and_go_between_rounds(
    folders: dict[str, Path],
    expected: dict[str | None, SimpleNamespace],
    model_folder: Path,
    image: np.ndarray,
    tmp_path: Path,
) -> None:
    """Each plays as if it had been there from the start, and what does not fit changes nothing."""
    copied = shutil.copytree(folders["both"], tmp_path / "copied")
    weights = load_file(copied / "generator" / "adapter_model.safetensors")
    save_file(dict(list(weights.items())[1:]), copied / "generator" / "adapter_model.safetensors")

    async def body(service: WorldService) -> None:
        adapters = service.adapters

        async def plays(name: str | None, like: str | None) -> None:
            world = await service.start(image[None], seed=3, num_inference_steps=2, adapter=name)
            for action, clip in zip(ACTIONS, expected[like].clips, strict=True):
                assert near(await world.step(action), clip), name

        layers = {name: type(module) for name, module in service.model.named_modules()}
        for _ in range(2):
            for name in PARTS:
                await service.compute.run(adapters.add, "robot", folders[name])
                await plays("robot", name)
                await plays(None, None)
                with pytest.raises(ModelError, match="robot"):
                    adapters.add("robot", folders["look"])
                with pytest.raises(ModelError, match="layers"):
                    await service.compute.run(adapters.add, "damaged", copied)
                await service.compute.run(adapters.add, "other", folders["both"])
                await plays("robot", name)
                await plays("other", "both")
                assert service.engine.adapters == ("robot", "other")
                await service.compute.run(adapters.remove, "robot")
                await plays("other", "both")
                with pytest.raises(InputError, match="robot"):
                    await service.start(image[None], adapter="robot")
                await service.compute.run(adapters.remove, "other")
            assert {name: type(module) for name, module in service.model.named_modules()} == layers
        await plays(None, None)

    serve(WorldModel.from_pretrained(model_folder), {}, body)


def test_the_model_is_unchanged_outside_of_an_adapter(
    folders: dict[str, Path],
    expected: dict[str | None, SimpleNamespace],
    model_folder: Path,
    image: np.ndarray,
) -> None:
    model = WorldModel.from_pretrained(model_folder)
    queries, adapters = model.queries, Adapters(model, folders)
    with adapters.using("both"):
        assert model.queries is not queries
    assert model.queries is queries
    session = model.session(seed=3, num_inference_steps=2)
    session.reset(image)
    assert np.array_equal(session.step(ACTIONS[0]).frames, expected[None].clips[0])


def test_adapters_that_do_not_fit_are_named(
    folders: dict[str, Path], model_folder: Path, tmp_path: Path
) -> None:
    model = WorldModel.from_pretrained(model_folder)
    with pytest.raises(ModelError, match=str(tmp_path)):
        Adapters(model, {"empty": tmp_path})
    for weights in ({"queries": torch.zeros(1, 2)}, {"nothing": torch.zeros(1)}):
        save_file(weights, tmp_path / lora.WHOLE)
        with pytest.raises(ModelError, match=next(iter(weights))):
            Adapters(model, {"other": tmp_path})
    name, weight = next(iter(model.backbone.named_parameters(prefix="backbone")))
    save_file({name: weight.clone()}, tmp_path / lora.WHOLE)
    with pytest.raises(ModelError, match="in-process"):
        Adapters(model, {"vllm": tmp_path}, elsewhere=("backbone",))


# Over HTTP

ADMIN, OTHER = map(bearer, KEYS)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def api(folders: dict[str, Path], model_folder: Path, tmp_path: Path) -> Iterator[LocalClient]:
    """A server with an administrator's key and another one, and a folder of adapters."""
    keys = tmp_path / "keys"
    keys.write_text(f"{KEYS[0]} admin\n{KEYS[1]}\n", "ascii")
    keys.chmod(0o600)
    model, root = WorldModel.from_pretrained(model_folder), folders["both"].parent
    with local(model, tmp_path / "data", keys=Keys.load(keys), adapters_dir=root) as client:
        client.headers.update(ADMIN)
        yield client


def load(api: LocalClient, name: str, path: str, base: Any = None, **options: Any) -> Any:
    body = {"lora_name": name, "lora_path": path} | ({} if base is None else {"base_model_name": base})
    return api.post(LOAD, json=body, **options)


def start(api: LocalClient, png: bytes, **settings: Any) -> str:
    upload = {"observation": ("x.png", png)}
    settings = {"num_inference_steps": 2, "seed": 3, **settings}
    response = api.post("/v1/worlds", files=upload, data={k: str(v) for k, v in settings.items()})
    assert response.status_code == 200, response.text
    return response.json()["id"]


def test_an_administrator_adds_an_adapter_and_removes_it(
    api: LocalClient, png: bytes, expected: dict[str | None, SimpleNamespace]
) -> None:
    assert load(api, "robot", "both").json()["id"] == "robot"
    assert [each["id"] for each in api.get("/v1/models").json()["data"]] == ["tiny", "robot"]
    path = f"/v1/worlds/{start(api, png, model='robot')}"
    for index, (action, clip) in enumerate(zip(ACTIONS, expected["both"].clips, strict=True), start=1):
        body = {"step_id": index, "action": {"text": action}}
        made = frames_of(api.post(f"{path}/step", json=body, params={"format": "npy"}))
        assert near(made, clip)
    exported = api.get(f"{path}/snapshot").content
    base = f"/v1/worlds/{start(api, png)}"

    with api.websocket_connect(ROUTE, headers=OTHER) as mine, api.websocket_connect(ROUTE) as others:
        for socket, model in ((mine, "robot"), (others, "tiny")):
            assert socket.receive_json()["type"] == "session.created"
            begin = {"type": "session.start", "text": "a ball", "model": model, "pace": "on_action"}
            socket.send_json({**begin, "num_inference_steps": 1})
            assert socket.receive_json()["type"] == "video.start"
        gone = api.post(UNLOAD, json={"lora_name": "robot"}).json()
        assert gone == {"id": "robot", "object": "model.deleted", "deleted": True}
        while (event := mine.receive())["type"] == "websocket.send":
            if "session.done" in (event.get("text") or ""):
                assert json.loads(event["text"])["reason"] == "model_unloaded"
                break
        others.send_json({"type": "session.ping"})
        while "session.pong" not in (others.receive().get("text") or ""):
            continue
    assert error_of(api.get(path), 404)["code"] == "not_found"
    assert api.get(base).json()["round"] == 0
    assert error_of(api.post("/v1/videos", json={"prompt": "a", "model": "robot"}), 404)["code"] == (
        "model_not_found"
    )
    upload = {"snapshot": ("world.safetensors", exported)}
    assert "robot" in error_of(api.post("/v1/worlds", files=upload), 400)["message"]
    assert load(api, "robot", "look").status_code == 200
    assert "robot" in error_of(api.post("/v1/worlds", files=upload), 400)["message"]  # of other weights
    assert api.post(UNLOAD, json={"lora_name": "robot"}).status_code == 200
    assert load(api, "robot", "both").status_code == 200
    assert api.post("/v1/worlds", files=upload).json()["round"] == len(ACTIONS)


def test_what_runs_with_an_adapter_ends_with_it(api: LocalClient, png: bytes) -> None:
    load(api, "robot", "both")
    world = start(api, png, model="robot", num_inference_steps=64)
    long = {"prompt": "a ball", "model": "robot", "num_frames": 512, "num_inference_steps": 64}
    video = api.post("/v1/videos", json=long).json()["id"]
    wait_for(api, video, "in_progress", progress=1)
    answers: list[Any] = []

    def step() -> None:
        answers.append(api.post(f"/v1/worlds/{world}/step", json={"step_id": 1}))

    waiting = threading.Thread(target=step)
    waiting.start()
    while api.get(f"/v1/worlds/{world}").json()["progress"] is None:
        continue
    assert api.post(UNLOAD, json={"lora_name": "robot"}).status_code == 200
    waiting.join()
    assert error_of(answers[0], 404)["code"] == "model_unloaded"
    failed = wait_for(api, video)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "model_changed")
    assert api.get("/ready").status_code == 200


def test_only_an_administrator_adds_adapters_and_only_from_the_folder(
    api: LocalClient, folders: dict[str, Path], model: WorldModel, tmp_path: Path
) -> None:
    root = folders["both"].parent
    (root / "empty").mkdir(exist_ok=True)
    (root / "file").touch()
    error_of(load(api, "robot", "both", headers=OTHER), 403)
    error_of(api.post(UNLOAD, json={"lora_name": "robot"}, headers=OTHER), 403)
    outside = (
        "..",
        ".",
        "../adapters",
        "/etc",
        str(root / "both"),
        "both/backbone",
        "https://a.b/c",
        "",
        "a\0",
    )
    for path in (*outside, "both\n", "file", "nothing", "empty", "x" * 65):
        error_of(load(api, "robot", path), 400)
    for name in ("", "a b", "../x", "robot\n", "x" * 65):
        error_of(load(api, name, "both"), 400)
    assert error_of(load(api, "tiny", "both"), 409)["code"] == "conflict"
    assert load(api, "robot", "both").status_code == 200
    assert error_of(load(api, "robot", "look"), 409)["code"] == "conflict"
    assert error_of(api.post(UNLOAD, json={"lora_name": "other"}), 404)["code"] == "model_not_found"
    error_of(api.post(UNLOAD, json={"lora_name": "tiny"}), 404)
    with local(model, tmp_path / "without") as other:
        assert "--adapters-dir" in error_of(load(other, "robot", "both"), 403)["message"]


# Of models that were added


def test_adapters_of_an_added_model_come_and_go_through_the_client(
    serve: Callable[..., str],
    make_model: Callable[..., WorldModel],
    folders: dict[str, Path],
    expected: dict[str | None, SimpleNamespace],
    model_folder: Path,
    image: np.ndarray,
) -> None:
    """It plays as a model into which the adapter is merged, and the first model has its own adapters."""
    first = make_model(seed=5)
    root = folders["both"].parent
    url = serve(first, keys=Keys(KEYS[:1]), models_dir=model_folder.parent, adapters_dir=root)

    with Client(url, KEYS[0]) as client:

        def plays(name: str) -> list[np.ndarray]:
            with client.worlds.create(image, model=name, seed=3, num_inference_steps=2) as world:
                return [world.step(action).frames for action in ACTIONS]

        before = plays("tiny")
        assert (client.load_model("added", model_folder.name).id, client.models()) == (
            "added",
            ["tiny", "added"],
        )
        robot = client.load_adapter("robot", "both", model="added")
        assert (robot.id, robot.parent) == ("robot", "added")
        assert (client.load_adapter("own", "look").parent, client.model("added").parent) == ("tiny", None)
        assert client.models() == ["tiny", "own", "added", "robot"]
        for name, like in (("robot", "both"), ("added", None)):
            clips = zip(plays(name), expected[like].clips, strict=True)
            assert all(near(made, clip) for made, clip in clips), name
        assert all(map(np.array_equal, plays("tiny"), before))
        assert not near(plays("own")[-1], before[-1])
        client.unload_adapter("robot")
        with pytest.raises(NotFoundError):
            plays("robot")
        client.load_adapter("robot", "text", model="added")
        assert near(plays("robot")[-1], expected["text"].clips[-1])
        client.unload_model("added")
        assert client.models() == ["tiny", "own"]
        with pytest.raises(NotFoundError):
            plays("robot")


def test_a_model_that_is_removed_takes_its_adapters_along(
    model_folder: Path, folders: dict[str, Path], png: bytes, tmp_path: Path
) -> None:
    root, first = folders["both"].parent, WorldModel.from_pretrained(model_folder)
    with local(first, tmp_path, models_dir=model_folder.parent, adapters_dir=root) as api:
        added = {"model_name": "added", "model_path": model_folder.name}
        assert api.post("/v1/load_model", json=added).status_code == 200
        assert load(api, "robot", "both", "added").json()["parent"] == "added"
        models = api.app.state.context.models  # type: ignore[attr-defined]
        parameters = [weakref.ref(each) for each in models.find("robot").service.model.parameters()]
        world = start(api, png, model="robot")
        video = {"prompt": "a ball", "model": "robot", "num_frames": 512, "num_inference_steps": 64}
        ordered = api.post("/v1/videos", json=video).json()["id"]
        wait_for(api, ordered, "in_progress", progress=1)
        with api.websocket_connect(ROUTE) as socket:
            assert socket.receive_json()["type"] == "session.created"
            begin = {"type": "session.start", "text": "a ball", "model": "robot", "pace": "on_action"}
            socket.send_json({**begin, "num_inference_steps": 1})
            assert socket.receive_json()["type"] == "video.start"
            assert api.post("/v1/unload_model", json={"model_name": "added"}).status_code == 200
            while "session.done" not in (text := socket.receive().get("text") or ""):
                continue
            assert json.loads(text)["reason"] == "model_unloaded"
        assert wait_for(api, ordered)["error"]["code"] == "model_changed"
        error_of(api.get(f"/v1/worlds/{world}"), 404)
        assert error_of(api.get("/v1/models/robot"), 404)["code"] == "model_not_found"
        assert [each["id"] for each in api.get("/v1/models").json()["data"]] == ["tiny"]
        assert parameters
        assert all(each() is None for each in parameters)
        assert load(api, "robot", "both").json()["parent"] == "tiny"


def test_adapters_that_a_model_cannot_have_change_nothing(
    model_folder: Path,
    make_model: Callable[..., WorldModel],
    folders: dict[str, Path],
    image: np.ndarray,
    tmp_path: Path,
) -> None:
    root, models_dir = folders["both"].parent, tmp_path / "models"
    parts = tiny_config()
    narrow = replace(parts.backbone, architecture={**parts.backbone.architecture, "intermediate_size": 48})
    make_model(backbone=narrow).save_pretrained(models_dir / "narrow", dtype=torch.float32)
    shutil.copytree(model_folder, models_dir / "same")
    first = WorldModel.from_pretrained(model_folder)
    with local(first, tmp_path / "data", models_dir=models_dir, adapters_dir=root) as api:
        for name in ("narrow", "same"):
            added = api.post("/v1/load_model", json={"model_name": name, "model_path": name})
            assert added.status_code == 200, added.text
        assert load(api, "robot", "text", "same").status_code == 200
        for name in ("robot", "tiny", "narrow"):  # whichever model has it
            assert error_of(load(api, name, "look"), 409)["code"] == "conflict"
        taken = {"model_name": "robot", "model_path": "same"}
        assert error_of(api.post("/v1/load_model", json=taken), 409)["code"] == "conflict"
        assert error_of(load(api, "other", "look", "nothing"), 404)["code"] == "model_not_found"
        assert "'same'" in error_of(load(api, "other", "look", "robot"), 400)["message"]
        error_of(load(api, "other", "text", "narrow"), 400)
        for base in ("", 3, "a\0", "x" * 200):
            error_of(load(api, "other", "look", base), 400)
        names = [each["id"] for each in api.get("/v1/models").json()["data"]]
        assert names == ["tiny", "narrow", "same", "robot"]
        assert load(api, "other", "look", "narrow").status_code == 200


def test_two_requests_at_a_time_cannot_have_one_name(folders: dict[str, Path], model_folder: Path) -> None:
    async def body(service: WorldService) -> None:
        models = ServedModels(service, "tiny")
        try:
            await models.add("added", model_folder)
            made = await asyncio.gather(
                models.add_adapter("robot", folders["look"], "added"),
                models.add_adapter("robot", folders["look"]),
                models.add("robot", model_folder),
                return_exceptions=True,
            )
            assert [type(each) for each in made] == [Served, ConflictError, ConflictError]
            assert models.names == ["tiny", "added", "robot"]
            adding = asyncio.create_task(models.add_adapter("late", folders["both"], "added"))
            await asyncio.sleep(0)
            await models.unload(models.withdraw("added"))
            with pytest.raises(NotFoundError):
                await adding
            await models.add_adapter("late", folders["both"])
            assert models.names == ["tiny", "late"]
        finally:
            await models.close()

    asyncio.run(asyncio.wait_for(body(WorldService(WorldModel.from_pretrained(model_folder))), 120))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (EngineOptions(quantization="int8"), "--quantization"),
        (EngineOptions(compile=True), "--compile"),
        (EngineOptions(sequence_parallel_size=2), "--sequence-parallel-size"),
        (EngineOptions(), "nowhere"),
    ],
)
def test_options_that_change_layers_exclude_adapters_that_come_later(
    options: EngineOptions, named: str, model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path if named.startswith("--") else tmp_path / "nowhere"
    config = ServerConfig("tiny", tmp_path / "data", adapters_dir=folder)
    with pytest.raises(ConfigError, match=named):
        asyncio.run(load_app(str(model_folder), config, "in-process", "cpu", options=options))
