"""Rectangular frames through every endpoint of a server."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
from local_client import LocalClient
from PIL import Image
from served import local, wait_for

from worldmodel.env.single import WorldSpec
from worldmodel.media import encoding
from worldmodel.models.world_model import WorldModel

HEIGHT, WIDTH = 32, 48
LEFT = "the red ball moves left"


@pytest.fixture(scope="module")
def wide(make_model: Callable[..., WorldModel]) -> WorldModel:
    return make_model(image_size=(HEIGHT, WIDTH))


@pytest.fixture(scope="module")
def scene() -> np.ndarray:
    """An image that no turn, flip or transposition leaves as it is."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (4, 6, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)


@pytest.fixture
def api(wide: WorldModel, tmp_path: Path) -> Iterator[LocalClient]:
    with local(wide, tmp_path) as client:
        yield client


def test_live_world_with_rectangular_frames(api: LocalClient, wide: WorldModel, scene: np.ndarray) -> None:
    session = wide.session(seed=3)
    session.reset(scene)
    above = np.pad(scene, ((16, 16), (0, 0), (0, 0)))  # its centre is what the world begins with
    upload = {"observation": ("x.png", encoding.encode_png(above))}
    world = api.post("/v1/worlds", files=upload, data={"seed": "3"}).json()
    assert world["size"] == "48x32"
    info = SimpleNamespace(**world)
    assert WorldSpec.from_world(SimpleNamespace(info=info)) == WorldSpec.from_world(wide)
    response = api.post(
        f"/v1/worlds/{world['id']}/step",
        json={"step_id": 1, "action": LEFT},
        params={"format": "npy"},
    )
    frames = np.load(io.BytesIO(response.content), allow_pickle=False)
    assert frames.shape == (8, HEIGHT, WIDTH, 3)
    assert np.abs(frames.astype(int) - session.step(LEFT).frames).max() <= 1


def test_size_is_width_by_height(api: LocalClient) -> None:
    for size, status in (("32x48", 400), ("48x32", 200)):
        for route in ("/v1/videos", "/v1/images/generations"):
            body = {"prompt": "a red ball", "size": size}
            response = api.post(route, json=body if "images" in route else {**body, "actions": [LEFT]})
            assert response.status_code == status, response.text
            if status == 400:
                assert "48x32" in response.json()["error"]["message"]
    video = api.get("/v1/videos").json()["data"][0]
    assert video["size"] == "48x32"
    wait_for(api, video["id"], "completed")
    content = api.get(f"/v1/videos/{video['id']}/content").content
    with av.open(io.BytesIO(content)) as film:
        frame = next(film.decode(video=0))
    assert (frame.width, frame.height) == (8 * WIDTH, 8 * HEIGHT)


@pytest.mark.parametrize("form", ["jpeg", "png", "fmp4"])
def test_websocket_with_rectangular_frames(api: LocalClient, scene: np.ndarray, form: str) -> None:
    with api.websocket_connect("/v1/realtime/video") as socket:
        assert socket.receive_json()["image_size"] == [HEIGHT, WIDTH]
        socket.send_text(json.dumps({"type": "session.start", "upload": True, "format": form}))
        socket.send_bytes(encoding.encode_png(scene))
        start = socket.receive_json()
        assert (start["type"], start["width"], start["height"]) == ("video.start", WIDTH, HEIGHT)
        film = b"".join(socket.receive_bytes() for _ in range(start["num_messages"]))
        chunk = socket.receive_json()
        shown = [socket.receive_bytes() for _ in range(chunk["num_messages"])]
    if form != "fmp4":
        first = np.array(Image.open(io.BytesIO(shown[0])))
    else:
        with av.open(io.BytesIO(film + shown[0])) as container:
            large = next(container.decode(video=0)).to_ndarray(format="rgb24")
        first = large.reshape(HEIGHT, 8, WIDTH, 8, 3).mean(axis=(1, 3))
    assert first.shape == scene.shape
    assert np.abs(first - scene.astype(float)).mean() < 12
