"""The server of a model without a generator."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from realtime_sessions import Server, serve
from served import local, wait_for

from worldmodel.media import encoding
from worldmodel.models.world_model import WorldModel
from worldmodel.serving.settings import MAX_STEPS


@pytest.fixture(scope="module")
def bare(make_model: Callable[..., WorldModel]) -> WorldModel:
    return make_model(generator=None, num_inference_steps=0)


def test_worlds_show_the_forecast(bare: WorldModel, image: np.ndarray, tmp_path: Path) -> None:
    upload = {"observation": ("x.png", encoding.encode_png(image))}
    with local(bare, tmp_path) as api:
        for name, value in (("num_inference_steps", 2), ("guidance_scale", 1.5)):
            refused = api.post("/v1/worlds", files=upload, data={name: value})
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "invalid_input"
            assert f"{name} is {value}" in refused.text or f"{name} {value}" in refused.text
        world = api.post("/v1/worlds", files=upload).json()
        assert (world["num_inference_steps"], world["guidance_scale"]) == (0, 1)
        step = {"step_id": 1, "action": {"keys": ["left"]}}
        assert api.post(f"/v1/worlds/{world['id']}/step", json=step).status_code == 200


def test_videos_show_the_forecast(bare: WorldModel, tmp_path: Path) -> None:
    body = {"prompt": "a red ball", "actions": [None]}
    with local(bare, tmp_path) as api:
        refused = api.post("/v1/videos", json={**body, "num_inference_steps": 2})
        assert refused.status_code == 400 and "2" in refused.json()["error"]["message"]
        video = api.post("/v1/videos", json=body).json()
        assert video["progress"] == 0
        video = wait_for(api, video["id"])
        assert (video["status"], video["progress"]) == ("completed", 100)


@pytest.mark.parametrize("generates", [True, False])
def test_sessions_are_told_how_many_steps_there_are(
    generates: bool, model: WorldModel, bare: WorldModel
) -> None:
    async def body(server: Server) -> None:
        async with server.client() as client:
            hello = await client.event()
            assert hello["limits"]["max_inference_steps"] == (MAX_STEPS if generates else 0)

    serve(model if generates else bare, body)
