"""The Python client against a real server: results match sessions, retries are safe."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from served import near

from worldmodel.actions import Action
from worldmodel.episodes import StartImage
from worldmodel.errors import ConfigError, InputError, WorldModelError
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.auth import Keys
from worldmodel.serving.client import (
    AsyncClient,
    BadRequestError,
    Client,
    ServerError,
    ServerUnreachableError,
    VideoObject,
)
from worldmodel.serving.errors import (
    AuthenticationError,
    ConflictError,
    NotFoundError,
    RateLimitError,
    UnsupportedFormatError,
)

ACTIONS = ("the red ball moves left", {"keys": ["left"]}, None, Action(text="wait", vector=(0.0, 1.0, 0.5)))
KEY = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
def address(serve: Callable[..., str]) -> str:
    """A server in a thread of its own, which requires a key."""
    return serve(keys=Keys([KEY]), max_worlds_per_key=6, requests_per_minute=60_000)


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(f"{address}/", KEY, timeout_s=60) as client:
        yield client


def test_remote_world_matches_session(client: Client, model: WorldModel, image: np.ndarray) -> None:
    session = model.session(seed=3, num_inference_steps=2)
    assert client.ready()
    with client.worlds.create(image, seed=3, num_inference_steps=2) as world:
        assert (world.round, world.info.fps, world.info.chunk_frames) == (0, 8, 8)
        assert near(world.frames(), session.reset(image))
        for action in ACTIONS:
            assert near(world.step(action).frames, session.step(action).frames)
        assert world.round == world.refresh().round == len(ACTIONS)
        assert world.describe() == session.describe()
        assert world.describe("how many") == session.describe("how many")
        assert world.infer_action() == session.infer_action()
        name, before = world.snapshot(), world.frames()
        with world.fork() as other:
            assert (other.id != world.id, other.round) == (True, len(ACTIONS))
            assert near(world.step("the red ball jumps").frames, other.step("the red ball jumps").frames)
            assert {world.id, other.id} <= {info.id for info in client.worlds.list()}
        world.restore(name)
        assert world.round == len(ACTIONS)
        assert near(world.frames(), before)
        assert client.worlds.open(world.id).round == world.round
        assert near(world.reset(), session.reset(image))
        assert world.round == 0
        assert near(world.step(ACTIONS[0]).frames, session.step(ACTIONS[0]).frames)
    with pytest.raises(NotFoundError):
        world.step()
    world.close()  # twice does no harm


def test_every_observation_type_starts_a_world(
    client: Client, model: WorldModel, image: np.ndarray, tmp_path: Path
) -> None:
    Image.fromarray(image).save(tmp_path / "first.png")
    kinds = (tmp_path / "first.png", str(tmp_path / "first.png"), (tmp_path / "first.png").read_bytes())
    for kind in (*kinds, Image.fromarray(image)):
        with client.worlds.create(kind) as world:
            assert np.array_equal(world.frames()[0], image)
    clip = np.stack([np.roll(image, 4 * shift, axis=1) for shift in range(8)])
    with client.worlds.create(clip) as world:
        expected = model.session().reset(clip)
        assert np.abs(world.frames().astype(int) - expected.astype(int)).mean() < 12  # MP4 is not exact
        assert near(world.reset(image), image[None])
    with client.worlds.create(text="a red ball", seed=5) as world:
        assert near(world.frames(), model.session(seed=5).reset(text="a red ball"))


class Lossy:
    """Loses responses: the server has done the work, but the client gets an error."""

    def __init__(self, http: httpx.Client, lost: int) -> None:
        self.http, self.lost, self.sent = http, lost, 0

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        self.sent += 1
        response = self.http.request(method, path, **options)
        if self.sent <= self.lost:
            raise httpx.ReadError("lost", request=response.request)
        return response


def test_retried_step_is_played_once(
    client: Client, model: WorldModel, image: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = model.session()
    session.reset(image)

    async def pause(seconds: float) -> None:
        assert 0 < seconds <= 15

    with client.worlds.create(image) as world:
        api = client._async._api
        http, lossy = api.http, Lossy(api.http, lost=99)
        with monkeypatch.context() as patch:
            patch.setattr(api, "pause", pause)
            patch.setattr(api, "http", Lossy(http, lost=2))
            assert near(world.step(ACTIONS[0]).frames, session.step(ACTIONS[0]).frames)
            patch.setattr(api, "http", lossy)
            with pytest.raises(ServerUnreachableError):
                world.step(ACTIONS[1])
            assert lossy.sent == 1 + api.retries
            patch.setattr(api, "http", Lossy(http, lost=1))
            with pytest.raises(ServerUnreachableError):
                world.fork()  # a second fork would be one too many
        with pytest.raises(ConflictError, match="Step 2") as refused:
            world.step("the blue box jumps")
        assert refused.value.code == "step_already_committed"
        assert near(world.step(ACTIONS[1]).frames, session.step(ACTIONS[1]).frames)
        assert world.refresh().round == 2
        for other in client.worlds.list():
            if other.id != world.id:
                client.worlds.open(other.id).close()


def test_client_retries_when_the_server_is_full(
    address: str, image: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def pause(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            worlds.pop().close()

    with Client(address, KEY, retries=3) as client:
        worlds = [client.worlds.create(image) for _ in range(6)]
        monkeypatch.setattr(client._async._api, "pause", pause)
        worlds.append(client.worlds.create(image))
        assert len(waits) == 2
        assert min(waits) >= 1
        client._async._api.retries = 0
        with pytest.raises(RateLimitError) as full:
            client.worlds.create(image)
        assert full.value.retry_after >= 1
        for world in worlds:
            world.close()


def test_errors_are_typed(address: str, client: Client, image: np.ndarray) -> None:
    with client.worlds.create(image) as world:
        with pytest.raises(BadRequestError, match="jump") as refused:
            world.step({"keys": ["jump"]})
        assert isinstance(refused.value, InputError)
        assert (refused.value.status, refused.value.type) == (400, "invalid_request_error")
        with pytest.raises(InputError, match="empty"):
            world.step(" ")
        with pytest.raises(NotFoundError):
            world.restore("snapshot-none")
        assert world.round == 0
    for bad, expected in (
        (None, "observation"),
        ("nowhere.png", "cannot be read"),
        (np.zeros((2, 2)), "uint8"),
    ):
        with pytest.raises(InputError, match=expected):
            client.worlds.create(bad)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedFormatError):
        client.worlds.create(b"GIF89a but not really")
    with pytest.raises(NotFoundError):
        client.worlds.open("world-../../health")
    with pytest.raises(AuthenticationError) as unknown, Client(address, "x" * 20) as other:
        other.models()
    assert unknown.value.code == "invalid_api_key"
    with Client("http://127.0.0.1:9", retries=0) as unreachable:
        assert not unreachable.ready()
        with pytest.raises(ServerUnreachableError, match=r"http://127.0.0.1:9"):
            unreachable.models()
    for wrong in ("127.0.0.1:8000", "file:///etc/passwd", ""):
        with pytest.raises(ConfigError, match="URL"):
            Client(wrong)
    assert issubclass(ServerError, WorldModelError)


def test_videos_create_wait_download_delete(client: Client, image: np.ndarray, tmp_path: Path) -> None:
    seen: list[VideoObject] = []
    asked = client.videos.create(
        "the red ball moves left", image, actions=["wait", {"keys": ["left"]}, None], idempotency_key="once"
    )
    again = client.videos.create(
        "the red ball moves left", image, actions=["wait", {"keys": ["left"]}, None], idempotency_key="once"
    )
    assert again.id == asked.id
    video = client.videos.wait(asked.id, seen.append, poll_s=0.05)
    assert (video.status, video.progress, video.done) == ("completed", 100, True)
    assert seen[-1] == video
    assert [one.progress for one in seen] == sorted(one.progress for one in seen)
    path = client.videos.download(video.id, tmp_path / "new" / "out.mp4")
    assert path.read_bytes()[4:8] == b"ftyp"
    assert video.id in {one.id for one in client.videos.list(limit=5)}
    client.videos.delete(video.id)
    with pytest.raises(NotFoundError):
        client.videos.retrieve(video.id)
    imagined = client.videos.create("a red ball", num_frames=8, seed=2)
    assert client.videos.wait(imagined.id).num_frames == 8


def test_describe_and_generate_image(client: Client, model: WorldModel, image: np.ndarray) -> None:
    session = model.session(seed=1)
    session.reset(image)
    assert client.models() == ["tiny"]
    assert client.describe(image) == session.describe()
    assert client.describe(image, "how many") == session.describe("how many")
    assert near(client.generate_image("a red ball", seed=1)[None], session.reset(text="a red ball")[-1:])


def test_start_images_are_those_of_the_model(
    client: Client, model: WorldModel, image: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.start_images() == []
    monkeypatch.setattr(model, "start_images", [StartImage("a door", image)])
    for name in (None, "tiny"):
        (start,) = client.start_images(name)
        assert start.title == "a door"
        assert np.array_equal(start.image, image)
    with pytest.raises(NotFoundError):
        client.start_images("gpt")


def test_outcomes_of_rounds_reach_the_client(
    make_model: Callable[..., WorldModel], serve: Callable[..., str], client: Client, image: np.ndarray
) -> None:
    scored = make_model(outcomes=True)
    own = serve(scored)
    session = scored.session(seed=3)
    session.reset(image)
    with Client(own) as scoring, scoring.worlds.create(image, seed=3) as world:
        assert world.outcome is None
        for action in ACTIONS[:2]:
            there, here = world.step(action).outcome, session.step(action).outcome
            assert there is not None and here is not None
            assert there == world.outcome
            assert there.reward == pytest.approx(here.reward, abs=1e-2)
            assert there.ended == here.ended
        stated = httpx.get(f"{own}/v1/worlds/{world.id}").json()["outcome"]
        assert stated["reward"] == pytest.approx(world.outcome.reward, rel=1e-4)  # type: ignore[union-attr]
        world.reset()
        assert world.outcome is None
    with client.worlds.create(image) as plain:
        assert plain.step(ACTIONS[0]).outcome is None
        assert plain.outcome is None


def test_async_client_runs_requests_concurrently(address: str, model: WorldModel, image: np.ndarray) -> None:
    async def whole() -> list[np.ndarray]:
        async with AsyncClient(address, KEY) as client:
            assert await client.ready()

            async def one(seed: int) -> np.ndarray:
                async with await client.worlds.create(image, seed=seed) as world:
                    return (await world.step(ACTIONS[0])).frames

            return list(await asyncio.gather(*(one(seed) for seed in range(4))))

    for seed, frames in enumerate(asyncio.run(whole())):
        session = model.session(seed)
        session.reset(image)
        assert near(frames, session.step(ACTIONS[0]).frames)


def test_client_imports_no_heavy_packages() -> None:
    code = "import sys; import worldmodel.serving.client; print(*sys.modules)"
    modules = set(subprocess.check_output([sys.executable, "-P", "-c", code], text=True, timeout=60).split())
    assert not modules & {"torch", "transformers", "fastapi", "uvicorn", "gradio", "sqlalchemy"}
