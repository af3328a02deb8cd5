"""Live worlds over HTTP: steps, retries, ownership."""

import base64
import io
import json
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from local_client import LocalClient
from PIL import Image
from served import KEYS, bearer, error_of, frames_of, local

from worldmodel.actions import Action
from worldmodel.actions.words import say
from worldmodel.media.encoding import encode_video
from worldmodel.models.world_model import WorldModel
from worldmodel.rollout.observation_score import known_observations
from worldmodel.serving.auth import Keys
from worldmodel.serving.engine.local import InProcessEngine

NPY = {"format": "npy"}


@pytest.fixture
def api(model: WorldModel, tmp_path: Path) -> Iterator[LocalClient]:
    with local(model, tmp_path, max_worlds_per_key=4) as client:
        yield client


@pytest.fixture
def keyed(model: WorldModel, tmp_path: Path) -> Iterator[LocalClient]:
    with local(model, tmp_path, keys=Keys(KEYS)) as client:
        yield client


def start(api: LocalClient, png: bytes, **fields: Any) -> dict[str, Any]:
    response = api.post("/v1/worlds", files={"observation": ("x.png", png)}, data=fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_world_matches_session(api: LocalClient, model: WorldModel, image: np.ndarray, png: bytes) -> None:
    world = start(api, png, seed="3", num_inference_steps="2")
    assert world["object"] == "world"
    assert (world["round"], world["fps"], world["size"], world["chunk_frames"]) == (0, 8, "32x32", 8)
    assert (world["seed"], world["num_inference_steps"], world["engine"]) == (3, 2, "in-process")
    assert world["action_schema"] == {
        "per_round": 1,
        "kinds": {"text": {"max_tokens": 64}, "keys": ["left", "right"], "vector": {"size": 3}},
        "widgets": {
            "text": {"type": "text", "merge": "newest"},
            "keys": {"type": "keys", "names": ["left", "right"], "merge": "union"},
            "vector": {
                "type": "sliders",
                "sliders": [{"name": name, "low": -1.0, "high": 1.0} for name in "123"],
                "merge": "newest",
            },
        },
    }
    session = model.session(seed=3, num_inference_steps=2)
    session.reset(image)
    actions = ["the red ball moves left", {"keys": ["left"]}, {"vector": [0.1, 0.2, 0.3]}, None]
    for step_id, action in enumerate(actions, 1):
        body = {"step_id": step_id, "action": action}
        response = api.post(f"/v1/worlds/{world['id']}/step", json=body, params=NPY)
        played, expected = frames_of(response), session.step(action).frames
        assert np.abs(played.astype(int) - expected.astype(int)).max() <= 1
        assert response.headers["x-round"] == response.headers["x-step-id"] == str(step_id)
    assert api.get(f"/v1/worlds/{world['id']}").json()["round"] == 4
    assert [each["id"] for each in api.get("/v1/worlds").json()["data"]] == [world["id"]]


def test_a_world_goes_on_as_an_uploaded_video_did(api: LocalClient, model: WorldModel) -> None:
    film = np.random.default_rng(2).integers(0, 256, (17, 32, 32, 3), dtype=np.uint8)
    video, done = encode_video(film, 8), [None, {"vector": [0.9, -0.8, 0.7]}]
    world = start_video(api, video, actions=json.dumps(done), seed="3", num_inference_steps="2")
    session, still = (model.session(seed=3, num_inference_steps=2) for _ in range(2))
    session.reset(video, actions=done)
    still.reset(video)
    response = api.post(f"/v1/worlds/{world['id']}/step", json={"step_id": 1}, params=NPY)
    made, expected = frames_of(response).astype(int), session.step().frames
    assert np.abs(made - expected).max() <= 1
    assert np.abs(made - still.step().frames).max() > 1
    # It starts so again after a reset, also on another server.
    copy = api.get(f"/v1/worlds/{world['id']}/snapshot").content
    response = api.post("/v1/worlds", files={"snapshot": ("x.safetensors", copy)})
    for identity in (world["id"], response.json()["id"]):
        assert api.post(f"/v1/worlds/{identity}/reset", json={}).status_code == 200
        again = api.post(f"/v1/worlds/{identity}/step", json={"step_id": 1}, params=NPY)
        assert np.array_equal(frames_of(again), made)


def start_video(api: LocalClient, video: bytes, **fields: str) -> dict[str, Any]:
    response = api.post("/v1/worlds", files={"observation": ("x.mp4", video)}, data=fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_actions_without_their_rounds_are_refused(api: LocalClient, png: bytes) -> None:
    files = {"observation": ("x.png", png)}
    for body, said in (
        ({"data": {"actions": '[{"keys": ["left"]}]'}, "files": files}, "1 actions for a video of 1 frames"),
        ({"data": {"actions": "left"}, "files": files}, "one JSON list"),
        ({"json": {"text": "a ball", "actions": [None]}}, "actions are those of an uploaded video"),
    ):
        response = api.post("/v1/worlds", **body)
        assert response.status_code == 400 and said in response.text
    film = encode_video(np.zeros((9, 32, 32, 3), np.uint8), 8)
    data = {"actions": '[{"keys": ["jump"]}]'}
    response = api.post("/v1/worlds", files={"observation": ("x.mp4", film)}, data=data)
    assert response.status_code == 400 and "jump" in response.text


def test_frame_formats(api: LocalClient, png: bytes) -> None:
    path = f"/v1/worlds/{start(api, png)['id']}/step"
    expected = frames_of(api.post(path, json={"step_id": 1}, params=NPY))
    for params in ({}, {"format": "mp4"}):
        response = api.post(path, json={"step_id": 1}, params=params)
        assert response.headers["content-type"] == "video/mp4"
        with av.open(io.BytesIO(response.content)) as video:
            assert len(list(video.decode(video=0))) == 8
    response = api.post(path, json={"step_id": 1}, params={"format": "zip"})
    assert response.headers["content-type"] == "application/zip"
    with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
        images = [np.asarray(Image.open(archive.open(name))) for name in archive.namelist()]
    assert np.array_equal(np.stack(images), expected)
    rejected = api.post(path, json={"step_id": 2}, params={"format": "html"})
    assert "'format'" in error_of(rejected, 400)["message"]
    assert api.get(path.removesuffix("/step")).json()["round"] == 1
    newest = api.get(path.replace("step", "frames"), params=NPY)
    assert np.array_equal(frames_of(newest), expected)
    last = api.get(path.replace("step", "frame.png"))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(last.content))), expected[-1])


def test_retried_step_is_not_played_twice(api: LocalClient, png: bytes) -> None:
    path = f"/v1/worlds/{start(api, png)['id']}/step"
    body = {"step_id": 1, "action": "the red ball moves left"}
    first = frames_of(api.post(path, json=body, params=NPY))
    again = api.post(path, json=body, params=NPY)
    assert np.array_equal(frames_of(again), first)
    assert again.headers["x-round"] == "1"
    other = api.post(path, json={"step_id": 1, "action": "wait"})
    assert error_of(other, 409)["code"] == "step_already_committed"
    for step_id in (3, 7):
        assert error_of(api.post(path, json={"step_id": step_id}), 409)["code"] == "step_out_of_order"
    frames_of(api.post(path, json={"step_id": 2}, params=NPY))
    assert error_of(api.post(path, json=body), 409)["code"] == "step_out_of_order"


def test_restore_fork_reset_delete(api: LocalClient, png: bytes) -> None:
    world = start(api, png)["id"]
    path = f"/v1/worlds/{world}"

    def step(step_id: int, action: str, name: str = world) -> np.ndarray:
        body = {"step_id": step_id, "action": action}
        return frames_of(api.post(f"/v1/worlds/{name}/step", json=body, params=NPY))

    first = step(1, "the red ball moves left")
    kept = api.post(f"{path}/snapshot").json()
    assert kept["round"] == 1
    second = step(2, "the blue box jumps")
    assert api.get(path).json()["snapshots"] == [kept["snapshot"]]
    restored = api.post(f"{path}/restore", json={"snapshot": kept["snapshot"]}).json()
    assert restored["round"] == 1
    fork = api.post(f"{path}/fork").json()
    assert fork["id"] != world
    for name in (world, fork["id"]):
        # The step played before `restore` is no longer the last one.
        assert np.abs(step(2, "the blue box jumps", name).astype(int) - second.astype(int)).max() <= 1
    assert error_of(api.post(f"{path}/restore", json={"snapshot": "none"}), 404)["code"] == "not_found"

    begun = frames_of(api.post(f"{path}/reset", params=NPY))
    assert api.get(path).json()["round"] == 0
    assert np.array_equal(step(1, "the red ball moves left"), first)
    assert begun.shape == (1, 32, 32, 3)
    assert frames_of(api.post(f"{path}/reset", json={"text": "a red ball"}, params=NPY)).shape == (
        8,
        32,
        32,
        3,
    )
    upload = {"observation": ("x.png", png)}
    assert np.array_equal(frames_of(api.post(f"{path}/reset", files=upload, params=NPY)), begun)

    assert api.delete(path).json() == {"id": world, "object": "world.deleted", "deleted": True}
    assert error_of(api.get(path), 404)["code"] == "not_found"
    assert api.get(f"/v1/worlds/{fork['id']}").status_code == 200


def test_describe_and_infer_action_match_session(
    api: LocalClient, model: WorldModel, image: np.ndarray, png: bytes
) -> None:
    path = f"/v1/worlds/{start(api, png)['id']}"
    session = model.session()
    session.reset(image)
    assert error_of(api.post(f"{path}/infer_action"), 400)["code"] == "invalid_input"
    assert api.post(f"{path}/describe").json()["text"] == session.describe()
    asked = api.post(f"{path}/describe", json={"question": "how many"}).json()
    assert asked == {"object": "world.text", "text": session.describe("how many"), "round": 0}
    api.post(f"{path}/step", json={"step_id": 1, "action": "the red ball moves left"})
    session.step("the red ball moves left")
    inferred = session.infer_action()
    found = api.post(f"{path}/infer_action").json()
    assert Action.of(found.pop("action")) == inferred
    assert found == {"object": "world.action", "text": say(inferred), "round": 1}


def test_confidence_is_returned_for_texts_if_asked_for(
    api: LocalClient, model: WorldModel, image: np.ndarray, png: bytes
) -> None:
    path = f"/v1/worlds/{start(api, png, seed='3')['id']}/step"
    session = model.session(seed=3)
    session.reset(image)
    for step_id, (action, asked) in enumerate(
        (("the red ball jumps", False), ("the red ball jumps", True), ({"keys": ["left"]}, True)), 1
    ):
        session.step(action)
        params = {"confidence": "true"} if asked else {}
        response = api.post(path, params=params, json={"step_id": step_id, "action": action})
        assert ("x-confidence" in response.headers) is (asked and isinstance(action, str))
        if "x-confidence" in response.headers:
            expected = session.confidence("the red ball jumps")
            assert float(response.headers["x-confidence"]) == pytest.approx(expected, abs=0.05)


def test_no_round_is_played_where_the_engine_gives_no_confidence(
    api: LocalClient, png: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"/v1/worlds/{start(api, png)['id']}"
    monkeypatch.setattr(InProcessEngine, "likelihoods", False)  # as of vLLM
    body = {"step_id": 1, "action": "the red ball jumps"}
    refused = api.post(f"{path}/step", params={"confidence": "true"}, json=body)
    assert error_of(refused, 400)["code"] == "invalid_input"
    assert api.get(path).json()["round"] == 0
    assert api.post(f"{path}/step", json=body).status_code == 200


def test_world_from_text_matches_session(api: LocalClient, model: WorldModel) -> None:
    world = api.post("/v1/worlds", json={"text": "a red ball", "seed": 5}).json()
    seen = frames_of(api.get(f"/v1/worlds/{world['id']}/frames", params=NPY))
    expected = model.session(seed=5).reset(text="a red ball")
    assert np.abs(seen.astype(int) - expected.astype(int)).max() <= 1


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "text"),
        ({"text": ""}, "text"),
        ({"text": "a ball", "prompt": "a ball"}, "prompt"),
        ({"text": "a ball", "seed": -1}, "seed"),
        ({"text": "a ball", "num_inference_steps": 65}, "num_inference_steps"),
        ({"text": "a ball", "guidance_scale": "NaN"}, "guidance_scale"),
        ({"text": "a ball", "output_path": "/tmp/x"}, "'output_path'"),
        (["text"], "invalid"),
    ],
)
def test_invalid_requests_have_the_error_format(api: LocalClient, body: Any, named: str) -> None:
    assert named in error_of(api.post("/v1/worlds", json=body), 400)["message"]


def test_unknown_routes_and_models_have_the_error_format(api: LocalClient, png: bytes) -> None:
    assert error_of(api.get("/v1/nothing"), 404)["code"] == "not_found"
    refused = api.put("/v1/worlds")
    assert error_of(refused, 405)["code"] == "method_not_allowed"
    assert refused.headers["allow"] == "GET, HEAD, POST"
    assert error_of(api.post("/v1/worlds", content=b"{"), 415)["code"] == "unsupported_format"
    broken = api.post("/v1/worlds", content=b"{", headers={"content-type": "application/json"})
    assert error_of(broken, 400)["code"] == "invalid_input"
    unknown = api.post("/v1/worlds", json={"text": "a ball", "model": "other"})
    assert error_of(unknown, 404)["code"] == "model_not_found"
    path = f"/v1/worlds/{start(api, png)['id']}/step"
    for action in ({"keys": ["jump"]}, {"vector": [1.0]}, {"text": "x " * 500}):
        assert error_of(api.post(path, json={"step_id": 1, "action": action}), 400)["code"] == "invalid_input"
    assert api.get(path.replace("/step", "")).json()["round"] == 0


def test_world_limit_and_idle_timeout(api: LocalClient, png: bytes) -> None:
    worlds = [start(api, png)["id"] for _ in range(4)]
    refused = api.post("/v1/worlds", json={"text": "a ball"})
    assert error_of(refused, 429)["code"] == "too_many_requests"
    assert int(refused.headers["retry-after"]) >= 1
    assert error_of(api.post(f"/v1/worlds/{worlds[0]}/fork"), 429)
    api.delete(f"/v1/worlds/{worlds[0]}")
    start(api, png)
    app: Any = api.app
    api.portal.call(app.state.context.worlds.sweep, -1.0)  # type: ignore[union-attr]
    assert error_of(api.get(f"/v1/worlds/{worlds[1]}"), 404)
    assert api.get("/v1/worlds").json()["data"] == []
    start(api, png)


def test_every_request_for_a_world_counts_as_use(api: LocalClient, png: bytes) -> None:
    """Also one that plays no round; a list of all worlds is not for one of them."""
    worlds = [start(api, png)["id"] for _ in range(4)]
    time.sleep(2)
    assert api.post(f"/v1/worlds/{worlds[1]}/snapshot").status_code == 200
    assert api.get(f"/v1/worlds/{worlds[2]}/frames").status_code == 200
    assert api.get(f"/v1/worlds/{worlds[3]}").status_code == 200
    assert len(api.get("/v1/worlds").json()["data"]) == 4
    app: Any = api.app
    api.portal.call(app.state.context.worlds.sweep, 2.0)  # type: ignore[union-attr]
    assert [each["id"] for each in api.get("/v1/worlds").json()["data"]] == worlds[1:]


def test_worlds_are_visible_only_to_their_owner(keyed: LocalClient, png: bytes) -> None:
    mine, other = map(bearer, KEYS)
    assert error_of(keyed.get("/v1/worlds"), 401)["code"] == "invalid_api_key"
    made = keyed.post("/v1/worlds", files={"observation": ("x", png)}, headers=mine).json()
    path = f"/v1/worlds/{made['id']}"
    calls = [("GET", ""), ("DELETE", ""), ("GET", "/frames"), ("GET", "/frame.png")]
    calls += [("POST", f"/{verb}") for verb in ("reset", "fork", "snapshot", "describe", "infer_action")]
    for method, verb in calls:
        assert error_of(keyed.request(method, path + verb, headers=other), 404)
    assert error_of(keyed.post(f"{path}/step", json={"step_id": 1}, headers=other), 404)
    assert error_of(keyed.post(f"{path}/restore", json={"snapshot": "x"}, headers=other), 404)
    assert keyed.get("/v1/worlds", headers=other).json()["data"] == []
    assert keyed.get(path, headers=mine).json()["id"] == made["id"]


def test_metrics_count_outcomes(api: LocalClient, png: bytes) -> None:
    path = f"/v1/worlds/{start(api, png)['id']}/step"
    api.post(path, json={"step_id": 1})
    api.post(path, json={"step_id": 9})
    text = api.get("/metrics").text
    route = 'route="/v1/worlds/{world_id}/step"'
    assert f'worldmodel_requests_total{{outcome="ok",{route}}} 1.0' in text
    assert f'worldmodel_requests_total{{outcome="rejected",{route}}} 1.0' in text
    assert 'worldmodel_rejects_total{reason="step_out_of_order"} 1.0' in text
    assert "worldmodel_time_to_first_chunk_seconds_count 1.0" in text
    assert "worldmodel_chunk_seconds_count 1.0" in text
    assert "worldmodel_sessions 1.0" in text
    assert "worldmodel_deadline_attainment" in text
    assert "worldmodel_kv_bytes_per_session" in text


def test_chat_route_exists(api: LocalClient, png: bytes) -> None:
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    assert api.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/worlds/WORLD/step", {"step_id": 1, "action": {"mouse": ["left", 0]}}, "'action.mouse.0'"),
        ("/v1/worlds/WORLD/step", {"step_id": True}, "'step_id'"),
        ("/v1/worlds/WORLD/step", {"step_id": "1"}, "'step_id'"),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "http://a.example/x.png"}}],
                    }
                ]
            },
            "'messages.0.content.0.image_url.url'",
        ),
    ],
)
def test_errors_name_fields_as_the_request_does(
    api: LocalClient, path: str, body: dict[str, Any], field: str
) -> None:
    world = api.post("/v1/worlds", json={"text": "a red ball"}).json()["id"]
    assert error_of(api.post(path.replace("WORLD", world), json=body), 400)["message"].startswith(field)


def test_json_must_be_declared_as_such(api: LocalClient) -> None:
    world = api.post("/v1/worlds", json={"text": "a red ball"}).json()["id"]
    form = {"content-type": "application/x-www-form-urlencoded"}  # what curl sends with -d
    refused = api.post(f"/v1/worlds/{world}/step", content=b'{"step_id": 1}', headers=form)
    assert "application/json" in error_of(refused, 415)["message"]


def test_root_leads_to_the_play_page(api: LocalClient) -> None:
    assert api.get("/", follow_redirects=False).headers["location"] == "play"
    assert api.get("/").headers["content-type"].startswith("text/html")


def test_the_score_of_an_upload_is_told_and_can_refuse_it(
    make_model: Callable[..., WorldModel], tmp_path: Path, image: np.ndarray, png: bytes
) -> None:
    model = make_model()
    rng = np.random.default_rng(0)
    frames = np.stack([image // 2 + rng.integers(0, 9, image.shape).astype(np.uint8) for _ in range(40)])
    model.known = known_observations(model, frames)
    session = model.session()
    session.reset(image)
    expected = session.observation_score()
    assert expected is not None
    with local(model, tmp_path) as api:
        world = start(api, png)
        assert world["observation_score"] == pytest.approx(expected, rel=1e-3)
        forked = api.post(f"/v1/worlds/{world['id']}/fork").json()
        assert forked["observation_score"] == world["observation_score"]
        refused = api.post(
            "/v1/worlds",
            files={"observation": ("x.png", png)},
            data={"max_observation_score": str(expected / 2)},
        )
        assert refused.status_code == 400
        assert api.get("/v1/worlds").json()["data"] == [
            api.get(f"/v1/worlds/{each['id']}").json() for each in (world, forked)
        ]
        start(api, png, max_observation_score=str(2 * expected))


def test_a_model_that_does_not_say_what_it_knows_has_no_score(api: LocalClient, png: bytes) -> None:
    assert start(api, png)["observation_score"] is None
