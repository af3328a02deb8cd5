"""Worlds as files: another server of the same model plays on with the same frames; others refuse."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from local_client import LocalClient
from safetensors.torch import load, save
from served import KEYS, bearer, local

from worldmodel.actions import Action
from worldmodel.config import GeneratorConfig
from worldmodel.errors import InputError
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.saved import _digest, identify
from worldmodel.serving.auth import Keys
from worldmodel.serving.client import Client
from worldmodel.serving.worlds.identity import Identity
from worldmodel.serving.worlds.saved import FORMAT, Origin, PlayedStep, SavedWorld
from worldmodel.serving.worlds.service import World, WorldService

MADE_BY = Identity("m")
ACTIONS = ("a ball", {"keys": ["left"]}, {"vector": [0.1, 0.2, 0.3]}, None)


async def played(service: WorldService, image: np.ndarray, rounds: int, **settings: Any) -> World:
    world = await service.start(image[None], seed=3, **settings)
    for index in range(rounds):
        await world.step(ACTIONS[index % len(ACTIONS)])
    return world


async def moved(world: World, service: WorldService) -> World:
    """The world in another service, by way of its bytes."""
    identity = service.identity
    data = SavedWorld(world.settings, world.state(), Origin(text="a")).to_bytes(identity)
    saved = SavedWorld.from_bytes(data, service.model, identity)
    return await service.resume(saved.settings, saved.state)


@pytest.mark.parametrize("rounds", [0, 1, 2, 3, 4, 5, 7])
def test_moved_world_goes_on_bit_for_bit(rounds: int, model: WorldModel, image: np.ndarray) -> None:
    """Over the rounds after which the history is cut: the frames and every later state are the same."""
    assert model.config.context_rounds == 3

    async def body() -> None:
        here, there = WorldService(model), WorldService(model)
        try:
            world = await played(here, image, rounds, num_inference_steps=2)
            copy = await moved(world, there)
            for action in ACTIONS:
                expected, frames = await world.step(action), await copy.step(action)
                assert np.array_equal(expected, frames)
                assert torch.equal(world.state().latents, copy.state().latents)
                pairs = zip(world.state().histories[0], copy.state().histories[0], strict=True)
                assert all(torch.equal(*pair) for pair in pairs)
            assert world.settings == copy.settings
            assert copy.round == rounds + len(ACTIONS)
        finally:
            await here.close()
            await there.close()

    asyncio.run(body())


def test_moved_world_keeps_the_chunk_that_the_next_one_overlaps(
    make_model: Callable[..., WorldModel], image: np.ndarray
) -> None:
    model = make_model(sampler="swin", num_inference_steps=2)

    async def body() -> None:
        here, there = WorldService(model), WorldService(model)
        try:
            world = await played(here, image, 2)
            assert world.state().trace is not None
            copy = await moved(world, there)
            for _ in range(2):
                assert np.array_equal(await world.step("go"), await copy.step("go"))
        finally:
            await here.close()
            await there.close()

    asyncio.run(body())


def test_a_chunk_that_would_fail_the_batches_of_others_is_refused(
    make_model: Callable[..., WorldModel], image: np.ndarray
) -> None:
    """Each part of a condition is batched with that of other worlds, so none may be missing."""
    model = make_model(sampler="swin", num_inference_steps=2)

    async def body() -> None:
        service = WorldService(model)
        world = await played(service, image, 1, guidance_scale=2.0)
        state = world.state()
        trace = state.trace
        assert trace is not None
        assert len(trace.conditions) == 2
        for index, condition in enumerate(trace.conditions):
            for field in fields(condition):
                conditions = list(trace.conditions)
                conditions[index] = replace(condition, **{field.name: None})
                changed = replace(state, trace=replace(trace, conditions=tuple(conditions)))
                data = SavedWorld(world.settings, changed, Origin(text="a")).to_bytes(MADE_BY)
                if getattr(condition, field.name) is None:
                    SavedWorld.from_bytes(data, model, MADE_BY)
                else:
                    with pytest.raises(InputError):
                        SavedWorld.from_bytes(data, model, MADE_BY)
        await service.close()

    asyncio.run(body())


def test_the_longest_actions_can_be_moved(model: WorldModel, image: np.ndarray) -> None:
    longest = {
        "text": "!" * (model.config.action.text.max_tokens - 1),
        "keys": ["left", "right"],
        "vector": [1, 2, 3],
    }
    assert len(model.backbone.token_ids(longest["text"])) == model.config.action.text.max_tokens
    (embedded,) = model.encode_action([Action.of(longest)]).tokens
    assert len(embedded) == model.action.max_tokens

    async def body() -> None:
        here, there = WorldService(model), WorldService(model)
        world = await here.start(image[None], seed=3)
        await world.step(longest)
        copy = await moved(world, there)
        assert np.array_equal(await world.step(longest), await copy.step(longest))
        for keys in (["left"] * 2, ["left"] * 100_000):
            with pytest.raises(InputError, match="twice"):
                await world.step({"keys": keys})
        await here.close()
        await there.close()

    asyncio.run(body())


def test_saved_world_has_everything(model: WorldModel, image: np.ndarray) -> None:
    async def body() -> None:
        service = WorldService(model)
        world = await played(service, image, 2)
        action = Action.of({"keys": ["left"], "vector": [0.1, 2.0, 0.0]})
        origin, last = Origin(frames=image[None]), PlayedStep(action, (3, 0, 1), seed=2**62)
        written = SavedWorld(world.settings, world.state(), origin, last)
        read = SavedWorld.from_bytes(written.to_bytes(MADE_BY), model, MADE_BY)
        assert (read.settings, read.last_step) == (world.settings, last)
        assert read.origin.frames is not None
        assert np.array_equal(read.origin.frames, image[None])
        assert read.state.cameras == world.state().cameras
        assert np.array_equal(read.state.previous_frames, world.state().previous_frames)  # type: ignore[arg-type]
        await service.close()

    asyncio.run(body())


@pytest.fixture(scope="module")
def exported(model: WorldModel, image: np.ndarray) -> bytes:
    async def body() -> bytes:
        service = WorldService(model)
        world = await played(service, image, 2, num_inference_steps=1)
        data = SavedWorld(world.settings, world.state(), Origin(frames=image[None])).to_bytes(MADE_BY)
        await service.close()
        return data

    return asyncio.run(body())


def tampered(
    data: bytes, tensors: dict[str, torch.Tensor] | None = None, world: dict[str, Any] | None = None
) -> bytes:
    """The file with other tensors or another document, and a digest that fits."""
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    metadata.pop("sha256")
    document = json.loads(metadata["world"])
    document["settings"] |= (world or {}).pop("settings", {})
    metadata["world"] = json.dumps(document | (world or {}))
    held = {**load(data), **(tensors or {})}
    return save(held, {**metadata, "sha256": _digest(metadata, held)})


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": {"history.1": torch.zeros(3, 5)}},
        {"tensors": {"history.0": torch.full((2, 64), torch.nan)}},
        {"tensors": {"history.9": torch.zeros(2, 64)}},
        {"tensors": {"history.0": torch.zeros(1, 64)}},
        {"tensors": {"history.0": torch.zeros(5000, 64)}},
        {"tensors": {"origin": torch.zeros(4000, 32, 32, 3, dtype=torch.uint8)}},
        {"tensors": {"context": torch.zeros(1, 3, 4, 4, 4)}},
        {"tensors": {"latents": torch.zeros(2, 8, 4, 4, 4)}},
        {"tensors": {"latents": torch.zeros(1, 8, 4, 4, 4, dtype=torch.float64)}},
        {"tensors": {"latents": torch.zeros(1, 10_000, 4, 4, 4)}},
        {"tensors": {"frames": torch.zeros(1, 8, 64, 64, 3, dtype=torch.uint8)}},
        {"tensors": {"frames": torch.zeros(1, 8, 32, 32, 3)}},
        {"tensors": {"frames": torch.zeros((), dtype=torch.uint8)}},
        {"tensors": {"frames": torch.zeros(0, 8, 32, 32, 3, dtype=torch.uint8)}},
        {"tensors": {"frames": torch.zeros(1, 0, 32, 32, 3, dtype=torch.uint8)}},
        {"tensors": {"origin": torch.zeros((), dtype=torch.uint8)}},
        {"tensors": {"origin": torch.zeros(1, 8, 32, 32, 3, dtype=torch.uint8)}},
        {"world": {"timesteps": [0.5]}},
        {"world": {"round": -1}},
        {"world": {"round": True}},
        {"world": {"camera": {"translation": [0, 0, "x"], "rotation": [0, 0, 0, 1]}}},
        {"world": {"camera": None}},
        {"world": {"settings": {"seed": "3"}}},
        {"world": {"settings": {"other": 3}}},
        {"world": {"settings": {"guidance_scale": "x"}}},
        {"world": {"settings": {"negative_prompt": 3}}},
        {"world": {"last_step": {"action": {"jump": 1}}}},
        {"world": {"last_step": {"action": {}, "code": [-1]}}},
        {"world": {"last_step": {"action": {}, "code": [0] * 5000}}},
        {"world": {"last_step": {"action": {}, "seed": 2**63}}},
        {"world": {"last_step": {"action": {}, "other": 1}}},
        {"world": {"outcome": {"reward": float("nan"), "ended": False}}},
        {"world": {"outcome": {"reward": 10**400, "ended": False}}},
    ],
)
def test_tensors_and_values_that_do_not_fit_are_refused(
    change: dict[str, Any], exported: bytes, model: WorldModel
) -> None:
    SavedWorld.from_bytes(tampered(exported), model, MADE_BY)
    with pytest.raises(InputError):
        SavedWorld.from_bytes(tampered(exported, **change), model, MADE_BY)


def test_a_file_of_another_version_is_refused_by_name(exported: bytes, model: WorldModel) -> None:
    for made, named in (("worldmodel.world.1", r"worldmodel\.world\.1"), ("worldmodel.session.1", "damaged")):
        length = int.from_bytes(exported[:8], "little")
        header = json.loads(exported[8 : 8 + length])
        assert header["__metadata__"]["format"] == FORMAT != made
        header["__metadata__"]["format"] = made
        head = json.dumps(header).encode()
        with pytest.raises(InputError, match=named):
            SavedWorld.from_bytes(len(head).to_bytes(8, "little") + head, model, MADE_BY)


@given(data=st.data())
def test_damaged_file_is_refused(data: st.DataObject, exported: bytes, model: WorldModel) -> None:
    where = data.draw(st.integers(0, len(exported) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
    damaged = bytearray(exported)
    if kind == "flip":
        damaged[where] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del damaged[where:]
    else:
        damaged[where:where] = data.draw(st.binary(min_size=1, max_size=16))
    with pytest.raises(InputError):
        SavedWorld.from_bytes(bytes(damaged), model, MADE_BY)


def test_identity_is_that_of_config_and_weights(
    make_model: Callable[..., WorldModel], model: WorldModel, model_folder: Path
) -> None:
    assert identify(WorldModel.from_pretrained(model_folder)) == identify(model) == identify(make_model())
    assert identify(make_model(1)) != identify(model)
    wider = make_model(generator=GeneratorConfig(width=96, num_layers=2, num_heads=3))
    assert identify(wider) != identify(model)
    trained = make_model()
    trained.generator.requires_grad_(True)
    for parameter in trained.generator.parameters():
        parameter.data.add_(1e-3)
    assert identify(trained) != identify(model)


# Over HTTP


@pytest.fixture
def keyed(model: WorldModel, tmp_path: Path) -> Iterator[LocalClient]:
    with local(model, tmp_path, keys=Keys(KEYS), max_worlds_per_key=2) as client:
        yield client


def test_client_exports_from_one_server_and_loads_into_another(
    image: np.ndarray, serve: Callable[..., str], tmp_path: Path
) -> None:
    with Client(serve()) as here, Client(serve()) as there:
        world = here.worlds.create(image, seed=3, num_inference_steps=2)
        before = [world.step("a ball"), world.step({"keys": ["left"]})][-1].frames
        name = world.snapshot()
        (tmp_path / "world.safetensors").write_bytes(world.export())
        copy = there.worlds.load(tmp_path / "world.safetensors")
        assert copy.id != world.id
        assert (copy.round, copy.info.seed, copy.info.num_inference_steps) == (2, 3, 2)
        assert np.array_equal(copy.frames(), before)
        ours, theirs = world.step("jump").frames, copy.step("jump").frames
        assert np.array_equal(ours, theirs)
        assert there.worlds.load(world.export(name)).round == 2
        assert np.array_equal(copy.reset(), world.reset())


def test_retried_step_is_known_to_the_loaded_world(keyed: LocalClient) -> None:
    mine = bearer(KEYS[0])
    made = keyed.post("/v1/worlds", json={"text": "a ball"}, headers=mine).json()
    body, npy = {"step_id": 1, "action": {"text": "go"}}, {"format": "npy"}
    frames = keyed.post(f"/v1/worlds/{made['id']}/step", json=body, params=npy, headers=mine).content
    response = keyed.get(f"/v1/worlds/{made['id']}/snapshot", headers=mine)
    assert response.headers["content-type"] == "application/octet-stream"
    upload = {"snapshot": ("world.safetensors", response.content)}
    copy = keyed.post("/v1/worlds", files=upload, headers=mine).json()
    path = f"/v1/worlds/{copy['id']}/step"
    assert keyed.post(path, json=body, params=npy, headers=mine).content == frames
    assert keyed.get(f"/v1/worlds/{copy['id']}", headers=mine).json()["round"] == 1
    assert keyed.post(path, json={"step_id": 1}, headers=mine).json()["error"]["code"] == (
        "step_already_committed"
    )


def test_ownership_limits_and_fields_of_the_request(keyed: LocalClient) -> None:
    mine, other = map(bearer, KEYS)
    made = keyed.post("/v1/worlds", json={"text": "a ball"}, headers=mine).json()
    path = f"/v1/worlds/{made['id']}/snapshot"
    assert keyed.get(path).status_code == 401
    assert keyed.get(path, headers=other).status_code == 404
    assert keyed.get(path, headers=mine, params={"name": "nothing"}).status_code == 404
    data = keyed.get(path, headers=mine).content
    upload = {"snapshot": ("world.safetensors", data)}
    assert keyed.post("/v1/worlds", files=upload, data={"seed": "3"}, headers=mine).status_code == 400
    assert keyed.post("/v1/worlds", files=upload, headers=mine).status_code == 200
    assert keyed.post("/v1/worlds", files=upload, headers=mine).status_code == 429
    assert keyed.post("/v1/worlds", files=upload, headers=other).status_code == 200  # a file is its bearer's
    assert keyed.post("/v1/worlds", files={"snapshot": ("x", b"\x89PNG")}, headers=other).status_code == 400


def test_snapshot_with_settings_out_of_range_or_of_another_model_is_refused(
    keyed: LocalClient, model: WorldModel, exported: bytes
) -> None:
    identity = Identity(identify(model))

    def post(data: bytes) -> dict[str, Any]:
        upload = {"snapshot": ("world.safetensors", data)}
        response = keyed.post("/v1/worlds", files=upload, headers=bearer(KEYS[0]))
        assert response.status_code == 400
        return response.json()["error"]

    assert identity.model[:12] in post(exported)["message"]
    read = SavedWorld.from_bytes(exported, model, MADE_BY)
    settings = replace(read.settings, num_inference_steps=1000)
    many = SavedWorld(settings, read.state, read.origin).to_bytes(identity)
    assert "1000" in post(many)["message"]
    settings = replace(read.settings, adapter="robot")
    with_adapter = SavedWorld(settings, read.state, read.origin).to_bytes(identity)
    assert "robot" in post(with_adapter)["message"]
    assert keyed.get("/v1/worlds", headers=bearer(KEYS[0])).json()["data"] == []
